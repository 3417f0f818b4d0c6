"""`mem prove-resume`: N steps straight against N steps in three pieces with kills between them, bit for bit, as a certificate."""

import sys
import time

from flows.commands.drill import MAX_RUN_ID, child_command, free_run_id
from mem_core.bootstrap import examine_only, live_root
from mem_core.core.doctor.environment_doctor import error_of
from mem_core.core.results.length import refuse_epochs
from mem_core.domain.errors import RequestError
from mem_core.domain.request import RuntimeRequest
from mem_core.domain.units import Value
from mem_core.infrastructure.request.file import load_request
from mem_core.infrastructure.settings import Settings
from mem_core.infrastructure.storage.whole_file import write_atomically
from mem_core.runtime.chaos.drill.drill import Drill
from mem_core.runtime.chaos.drill.report import DrillReport, FaultScore, InvariantScore, text_report
from mem_core.runtime.chaos.plan.plan import PlannedFault

MIN_STEPS = 9
CERTIFICATE_NAME = "certificate.json"


class ResumeCertificate(Value):
    """Two runs of the same request, one of them killed twice. `equal` means the same weights and the same trajectory, to the bit."""

    equal: bool
    passed: bool
    run_id: str
    straight_run_id: str
    num_steps: int
    weights_digest: str
    straight_weights_digest: str
    trajectory_digest: str
    straight_trajectory_digest: str
    kills: tuple[FaultScore, ...]
    invariants: tuple[InvariantScore, ...]
    starts: tuple[int, ...]
    versions: dict[str, str] = {}
    issued_unix_s: float = 0.0
    certificate_path: str = ""


def prove_resume(path: str, overrides: list[str], as_json: bool) -> int:
    """Issue the certificate; exit 0 only where everything is equal."""
    certificate, report = issue_certificate(load_request(path, overrides))
    print(text_report(report), file=sys.stderr)
    verdict = "equal to the bit" if certificate.equal else "NOT equal"
    print(f"{certificate.num_steps} steps straight and in three pieces: {verdict}; {certificate.certificate_path}", file=sys.stderr)
    if as_json:
        print(certificate.model_dump_json())
    return 0 if certificate.passed else 1


def issue_certificate(request: RuntimeRequest) -> tuple[ResumeCertificate, DrillReport]:
    """Train both, compare, write the certificate into the folder of the run in pieces.

    Raises:
        RequestError: too few steps for three pieces. MemError: request or machine are unfit.
    """
    settings = Settings.from_environment()
    refuse_epochs(request, "the proof")
    num_steps = request.training.max_steps
    if num_steps < MIN_STEPS:
        raise RequestError(
            "too few steps for three pieces", field="training.max_steps", value=num_steps, bound=f"at least {MIN_STEPS}", remedy="Raise it."
        )
    environment = examine_only(request, settings)
    error = error_of(environment)
    if error is not None:
        raise error
    root = live_root(request, settings)
    run_id = free_run_id(root, f"{request.run_id}-proof")
    drill = Drill(
        request=in_pieces(request, run_id), twin_id=f"{run_id[: MAX_RUN_ID - 9]}-straight", root=root, plan=two_kills(num_steps), seed=0,
        command=lambda file: child_command(file, ""), twin_command=lambda file: child_command(file, ""), environment=settings.environ,
        op_folder=settings.torch_extensions_dir, say=lambda text: print(f"prove-resume: {text}", file=sys.stderr, flush=True),
    )  # fmt: skip
    report = drill.run()
    certificate = certificate_of(report, environment.versions, str(drill.folder / CERTIFICATE_NAME))
    write_atomically(drill.folder / CERTIFICATE_NAME, certificate.model_dump_json(indent=2))
    return certificate, report


def in_pieces(request: RuntimeRequest, run_id: str) -> RuntimeRequest:
    """The request with at least nine segments, so that each piece holds commits of its own."""
    segment_steps = min(request.training.segment_steps, max(1, request.training.max_steps // 9))
    training = request.training.model_copy(update={"segment_steps": segment_steps})
    return request.model_copy(update={"run_id": run_id, "training": training, "chaos": None})


def two_kills(num_steps: int) -> tuple[PlannedFault, ...]:
    """SIGKILL of the flow, and with it of every worker, after a third and after two thirds of the steps."""
    return (
        PlannedFault(1, "kill_flow", at_step=num_steps // 3 + 1, salt=1),
        PlannedFault(2, "kill_flow", at_step=2 * num_steps // 3 + 1, salt=2),
    )


def certificate_of(report: DrillReport, versions: dict[str, str], path: str) -> ResumeCertificate:
    """What a drill with two kills proves."""
    equal = bool(report.weights_digest) and (report.weights_digest, report.trajectory_digest) == (
        report.twin_weights_digest, report.twin_trajectory_digest,
    )  # fmt: skip
    return ResumeCertificate(
        equal=equal, passed=equal and report.passed, run_id=report.run_id, straight_run_id=report.twin_run_id, num_steps=report.max_steps,
        weights_digest=report.weights_digest, straight_weights_digest=report.twin_weights_digest,
        trajectory_digest=report.trajectory_digest, straight_trajectory_digest=report.twin_trajectory_digest, kills=report.faults,
        invariants=report.invariants, starts=report.starts, versions=versions, issued_unix_s=time.time(), certificate_path=path,
    )  # fmt: skip
