"""A drill: the run under chaos, its undisturbed twin, the comparison. Knows the commands only as argument lists."""

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from mem_core.core.run.fold import fold_result
from mem_core.core.run.lease import read_lease
from mem_core.core.run.state_manager import read_journal
from mem_core.domain.errors import EnvironmentUnfit
from mem_core.domain.events import JournalLine, TimeSpent
from mem_core.domain.request import RuntimeRequest
from mem_core.domain.run import RunResult
from mem_core.infrastructure.storage.whole_file import write_atomically
from mem_core.infrastructure.storage.writing import PRIVATE, replace_text
from mem_core.runtime.chaos.drill.report import DrillReport, InvariantScore, html_report, passed, same, score_fault
from mem_core.runtime.chaos.drill.supervised_run import SupervisedRun
from mem_core.runtime.chaos.drill.twin import seed_twin, twin_request
from mem_core.runtime.chaos.faults.hostile_planner import LocalPlanner
from mem_core.runtime.chaos.faults.journal_tail import JournalTail
from mem_core.runtime.chaos.faults.scene import Scene, wait_for
from mem_core.runtime.chaos.faults.service_faults import refuses
from mem_core.runtime.chaos.faults.store_relay import StoreRelay
from mem_core.runtime.chaos.faults.view import RunView
from mem_core.runtime.chaos.plan.plan import PlannedFault
from mem_core.runtime.chaos.real_chaos import MetFault, RealChaos

GOODPUT_TOLERANCE = 0.01
GONE_LIMIT_S = 10.0


@dataclass
class Drill:
    """One drill. `command(request_file)` is the command line that trains a request, with faulty ranks where chaos needs them."""

    request: RuntimeRequest
    twin_id: str
    root: Path
    plan: tuple[PlannedFault, ...]
    seed: int
    command: Callable[[Path], list[str]]
    twin_command: Callable[[Path], list[str]]
    environment: Mapping[str, str]
    op_folder: Path
    kinds_left_out: tuple[str, ...] = ()
    outage_s: float = 5.0
    own_disk_bytes: int | None = None
    planner: LocalPlanner | None = None
    relay: StoreRelay | None = None
    with_twin: bool = True
    say: Callable[[str], None] = lambda text: None
    met: list[MetFault] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        """Run folder of the run under chaos."""
        return self.root / self.request.run_id

    @property
    def desk(self) -> Path:
        """Where the drill keeps request files, logs and the report: beside the run, so that the run's disk may fail."""
        return self.root / f"{self.request.run_id}.drill"

    def run(self) -> DrillReport:
        """Carry it out. Never leaves a process behind, whatever happens."""
        started_s = time.monotonic()
        self.desk.mkdir(parents=True, exist_ok=True)
        view = RunView(self.folder)
        under_chaos = self._supervised(self.request, self.command)
        twin = self._supervised(twin_request(self.request, self.twin_id), self.twin_command)
        with own_disk(self.folder, self.own_disk_bytes):
            try:
                code = self._under_chaos(under_chaos, view)
                twin_code = self._twin(twin) if code == 0 and self.with_twin else None
            finally:
                under_chaos.end()
                twin.end()
            report = self._score(under_chaos, code, twin_code, view, time.monotonic() - started_s)
        write_atomically(self.desk / "drill.json", report.model_dump_json(indent=2))
        write_atomically(self.desk / "drill.html", html_report(report))
        return report

    def _supervised(self, request: RuntimeRequest, command: Callable[[Path], list[str]]) -> SupervisedRun:
        path = self.desk / f"{request.run_id}.json"
        replace_text(path, request.model_dump_json(indent=2), PRIVATE)  # with the signatures of its URLs: its child needs them
        return SupervisedRun(command(path), dict(self.environment), self.desk / f"{request.run_id}.log")

    def _under_chaos(self, run: SupervisedRun, view: RunView) -> int:
        scene = Scene(
            view=view, journal=JournalTail(self.folder), flow=run.flow, op_folder=self.op_folder, outage_s=self.outage_s,
            own_disk=self.own_disk_bytes is not None, planner=self.planner, relay=self.relay, gate=run.gate,
        )  # fmt: skip
        chaos = RealChaos(self.plan, scene, self.say)
        chaos.start()
        try:
            return run.run_to_end()
        finally:
            self.met = chaos.finish()

    def _twin(self, twin: SupervisedRun) -> int:
        self.say("training the undisturbed twin")
        seed_twin(self.folder, self.root, twin_request(self.request, self.twin_id))
        return twin.run_to_end()

    # -- judging --------------------------------------------------------------------------------------------------------

    def _score(self, run: SupervisedRun, code: int, twin_code: int | None, view: RunView, duration_s: float) -> DrillReport:
        result, twin = _result(self.folder), _result(self.root / self.twin_id)
        faults = tuple(score_fault(met) for met in self.met)
        invariants = (
            InvariantScore(name="the run completed", held=code == 0 and result.status == "completed", seen=f"exit {code}, {result.status}"),
            InvariantScore(name="the twin completed", held=twin_code == 0, seen=f"exit {twin_code}"),
            InvariantScore(
                name="all steps applied",
                held=result.applied_steps == self.request.training.max_steps == twin.applied_steps,
                seen=f"{result.applied_steps} and {twin.applied_steps} of {self.request.training.max_steps}",
            ),
            same("same weights as the twin", result.weights_digest, twin.weights_digest),
            same("same trajectory as the twin", result.trajectory_digest, twin.trajectory_digest),
            InvariantScore(name="no fatal out-of-memory", held=result.ooms_fatal == 0, seen=str(result.ooms_fatal)),
            _goodput_sums(self.folder, result),
            *leftovers(self.folder, view),
        )
        return DrillReport(
            passed=passed(faults, invariants), run_id=self.request.run_id, run_folder=str(self.folder), twin_run_id=self.twin_id,
            twin_folder=str(self.root / self.twin_id), seed=self.seed, max_steps=self.request.training.max_steps,
            num_ranks=self.request.parallel.num_ranks, weights_digest=result.weights_digest, twin_weights_digest=twin.weights_digest,
            trajectory_digest=result.trajectory_digest, twin_trajectory_digest=twin.trajectory_digest,
            kinds_fired=tuple(sorted({fault.kind for fault in faults if fault.fired})), kinds_left_out=self.kinds_left_out, faults=faults,
            invariants=invariants, starts=tuple(ending.exit_code for ending in run.endings), duration_s=round(duration_s, 1),
            goodput=result.goodput.model_dump(mode="json"), restarts=result.restarts, skipped_steps=result.skipped_steps,
            ooms_absorbed=result.ooms_absorbed, ooms_fatal=result.ooms_fatal,
        )  # fmt: skip


def _result(folder: Path) -> RunResult:
    return fold_result(read_journal(folder / "journal"), run_id=folder.name, run_folder=str(folder))


def _goodput_sums(folder: Path, result: RunResult) -> InvariantScore:
    """The ledger's seconds against the time of day from the first ledger's beginning to the journal's last line."""
    lines = read_journal(folder / "journal")
    if not lines:
        return InvariantScore(name="goodput sums to the wall time", held=False, seen="no journal")
    wall_s = lines[-1].time_unix_s - ledger_began_unix_s(lines)
    summed_s = sum(result.goodput.seconds.values())
    held = abs(summed_s - wall_s) <= GOODPUT_TOLERANCE * wall_s
    return InvariantScore(name="goodput sums to the wall time", held=held, seen=f"{summed_s:.1f} s booked of {wall_s:.1f} s")


def ledger_began_unix_s(lines: list[JournalLine]) -> float:
    """When the first process began to measure: before its first line, by what it booked more than the lines account for."""
    first_unix_s = lines[0].time_unix_s
    for line in lines:
        if isinstance(line.event, TimeSpent) and line.attempt == lines[0].attempt:
            return first_unix_s - max(0.0, sum(line.event.seconds.values()) - (line.time_unix_s - first_unix_s))
    return first_unix_s


def leftovers(folder: Path, view: RunView) -> tuple[InvariantScore, ...]:
    """No process, port, lock or staging of the run is left (I10)."""
    wait_for(lambda: not view.leftovers(), GONE_LIMIT_S, 0.1)
    processes = view.leftovers()
    ports = sorted({process.port for process in view.seen.values() if process.port and not refuses(process.port)})
    lease = read_lease(folder)
    held = lease is not None and lease.holder_alive(time.time())
    staged = [path.name for path in (folder / "staging").glob("attempt-*/save-*")] if folder.exists() else []
    live = [path.name for path in (folder / "live").iterdir()] if (folder / "live").is_dir() else []
    return (
        InvariantScore(name="no process left", held=not processes, seen=", ".join(f"{p.role} {p.pid}" for p in processes) or "none"),
        InvariantScore(name="no port left", held=not ports, seen=", ".join(map(str, ports)) or "none"),
        InvariantScore(name="no lease held", held=not held, seen=f"pid {lease.pid}" if held and lease is not None else "released"),
        InvariantScore(name="no staging left", held=not staged and not live, seen=", ".join([*staged, *live]) or "none"),
    )


def is_root() -> bool:
    """Whether mounts may be made."""
    return os.geteuid() == 0


@contextmanager
def own_disk(folder: Path, size_bytes: int | None) -> Generator[None]:
    """A small file system in memory for a run folder; what it holds at the end stays in the folder. None: no disk of its own.

    Raises:
        EnvironmentUnfit: this machine refuses the mount.
    """
    if size_bytes is None:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size_bytes},mode=0755", "mem-drill", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise EnvironmentUnfit(
            f"no disk of its own for the run: {done.stderr.strip()}", field="chaos.kinds", value="full_disk", remedy="Leave full_disk out."
        )
    kept = folder.with_name(f"{folder.name}.kept")
    try:
        yield
    finally:
        shutil.copytree(folder, kept, symlinks=True)
        subprocess.run(["umount", "--lazy", str(folder)], check=True, capture_output=True)
        folder.rmdir()
        kept.rename(folder)
