"""`mem drill`: a run under real faults, then its undisturbed twin, then a scored comparison."""

import os
import sys
from pathlib import Path

from mem_core.bootstrap import examine_only, live_root
from mem_core.core.doctor.environment_doctor import error_of
from mem_core.core.doctor.keeping import num_held
from mem_core.core.results.length import refuse_epochs
from mem_core.domain.errors import RequestError
from mem_core.domain.fault_kinds import FAULT_KINDS, offered_kinds
from mem_core.domain.request import ChaosSection, RuntimeRequest
from mem_core.infrastructure.request.file import load_request
from mem_core.infrastructure.settings import Settings
from mem_core.runtime.chaos.drill.drill import Drill, is_root
from mem_core.runtime.chaos.drill.report import DrillReport, text_report
from mem_core.runtime.chaos.faults.faulty_names import MAKE_FAULTY
from mem_core.runtime.chaos.faults.hostile_planner import LocalPlanner
from mem_core.runtime.chaos.faults.store_relay import StoreRelay
from mem_core.runtime.chaos.plan.plan import kinds_that_fit, plan_faults

MAX_RUN_ID = 64
DISK_FLOOR_BYTES, DISK_CEILING_BYTES = 256 * 2**20, 2 * 2**30


def drill(path: str, overrides: list[str], seed: int | None, as_json: bool) -> int:
    """Carry out a drill; exit 0 only if every invariant held and every planned fault fired and was survived."""
    request = load_request(path, overrides)
    report = carry_out_drill(request, seed)
    print(text_report(report), file=sys.stderr)
    print(f"as a page: {report.run_folder}.drill/drill.html", file=sys.stderr)
    if as_json:
        print(report.model_dump_json())
    return 0 if report.passed else 1


def carry_out_drill(request: RuntimeRequest, seed: int | None = None) -> DrillReport:
    """Plan, run, compare. `seed` wins over the request's own. Call it from the main thread of a process.

    Raises:
        MemError: the request or the machine is unfit before anything was started.
    """
    refuse_epochs(request, "a drill")
    settings = Settings.from_environment()
    section = request.chaos or ChaosSection()
    section = section if seed is None else section.model_copy(update={"seed": seed})
    environment = examine_only(request, settings)
    error = error_of(environment)
    if error is not None:
        raise error
    root = live_root(request, settings)
    run_id = free_run_id(root, f"{request.run_id}-drill-{section.seed}")
    planner = LocalPlanner() if _may_plan(request, section) else None
    relay = StoreRelay(settings.s3_endpoint_url or "") if _may_relay(request, section, settings) else None
    disk_bytes = small_disk_bytes(request, environment.estimates_bytes.get("checkpoint", 0))
    try:
        drilled = _drilled(request, run_id, planner)
        kinds = chosen_kinds(
            request, section, settings, planner=planner is not None, relay=relay is not None, own_disk=disk_bytes is not None
        )
        if section.at_steps is None and section.every_s is None:
            segments = request.training.max_steps // request.effective_segment_steps
            kinds = kinds_that_fit(section.seed, kinds, segments, asked=section.kinds is not None)
        return Drill(
            request=drilled,
            twin_id=f"{run_id[: MAX_RUN_ID - 5]}-twin",
            root=root,
            plan=plan_faults(section.seed, section, request.training.max_steps, kinds),
            seed=section.seed,
            command=lambda file: child_command(file, MAKE_FAULTY),
            twin_command=lambda file: child_command(file, ""),
            environment={**settings.environ, **({settings.s3_endpoint_source: relay.endpoint} if relay else {})},
            op_folder=settings.torch_extensions_dir,
            kinds_left_out=tuple(kind for kind in FAULT_KINDS if kind not in kinds),
            planner=planner,
            relay=relay,
            own_disk_bytes=disk_bytes if "full_disk" in kinds else None,
            say=lambda text: print(f"drill: {text}", file=sys.stderr, flush=True),
        ).run()
    finally:
        for helper in (planner, relay):
            if helper is not None:
                helper.close()


def child_command(request_file: Path, on_built: str) -> list[str]:
    """What trains a request in a process that dies with this one."""
    return [sys.executable, "-P", "-m", "flows.commands.drill_child", str(os.getpid()), on_built, str(request_file)]


def free_run_id(root: Path, wanted: str) -> str:
    """The wanted id, or with the next free number: a drill never goes on with an older one."""
    base = wanted[: MAX_RUN_ID - 10].rstrip("-")
    candidates = (base, *(f"{base}-{number}" for number in range(2, 1_000)))
    free = next((run_id for run_id in candidates if not (root / run_id).exists()), None)
    if free is None:
        raise RequestError("no free run id is left for a drill", field="run_id", value=base, remedy=f"Remove old drills under {root}.")
    return free


def chosen_kinds(
    request: RuntimeRequest, section: ChaosSection, settings: Settings, *, planner: bool, relay: bool, own_disk: bool
) -> tuple[str, ...]:
    """Kinds to draw from: those asked for, else all that machine and request allow.

    Raises:
        RequestError: a kind that was asked for is not possible here.
    """
    offered = offered_kinds(
        root=is_root(),
        own_disk=own_disk,
        planner=planner,
        prefect=settings.prefect_api_url is None,
        relay=relay,
        cpu=request.device != "cuda",
    )
    if section.kinds is None:
        return offered
    impossible = sorted(set(section.kinds) & FAULT_KINDS.keys() - set(offered))
    if impossible:
        raise RequestError(
            "this kind of fault is not possible here", field="chaos.kinds", value=impossible[0], bound=", ".join(offered),
            remedy="Leave it out. Some kinds need root, a local store, the embedded Prefect server, no planner of your own, or an S3 "
            "store whose endpoint is given as http://.",
        )  # fmt: skip
    return section.kinds


def _may_plan(request: RuntimeRequest, section: ChaosSection) -> bool:
    wanted = section.kinds is None or "hostile_planner" in section.kinds
    return wanted and request.policy.planner.kind == "none"


def _may_relay(request: RuntimeRequest, section: ChaosSection, settings: Settings) -> bool:
    """S3 in use, its endpoint named and without TLS, which a relay could not read."""
    wanted = section.kinds is None or {"store_errors", "store_resets"} & set(section.kinds)
    in_use = any((url or "").startswith("s3://") for url in (request.store, request.checkpoint.mirror))
    return bool(wanted) and in_use and (settings.s3_endpoint_url or "").startswith("http://")


def small_disk_bytes(request: RuntimeRequest, checkpoint_bytes: int) -> int | None:
    """Size of a disk in memory that holds the run's checkpoints twice over; None where that would take too much of it."""
    size_bytes = DISK_FLOOR_BYTES + 2 * num_held(request, None) * checkpoint_bytes
    local = "://" not in request.store or request.store.startswith("file://")
    return size_bytes if local and size_bytes <= DISK_CEILING_BYTES else None


def _drilled(request: RuntimeRequest, run_id: str, planner: LocalPlanner | None) -> RuntimeRequest:
    update: dict[str, object] = {"run_id": run_id, "chaos": None}
    if planner is not None:
        asked = request.policy.planner.model_copy(update={"kind": "openai", "base_url": planner.base_url, "model": "drill"})
        update["policy"] = request.policy.model_copy(update={"planner": asked})
    return request.model_copy(update=update)
