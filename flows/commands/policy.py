"""What stands behind `mem policy evaluate|replay|explain`: from parsed arguments to an answer. No Prefect, nothing printed."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mem_core.core.policy.directive_parser import parse_directive
from mem_core.core.policy.explain import explain_decision, explain_decisions
from mem_core.core.policy.local_policy_engine import LocalPolicyEngine, request_values
from mem_core.core.policy.replay import audit_journal
from mem_core.core.run.belonging import CheckpointWords
from mem_core.core.run.identity import RunIdentity, read_identity
from mem_core.core.run.journal_check import Difference, JournalFiles, journal_files, walk_journal
from mem_core.domain.checkpoint import checkpoint_name
from mem_core.domain.environment import EnvironmentReport
from mem_core.domain.errors import EXIT_CODE_COMPLETED, InternalError, PolicyRefused, RequestError, StoreUnavailable
from mem_core.domain.events import JournalLine, PolicyDecided
from mem_core.domain.plan import CandidatePlan, MemoryPlan
from mem_core.domain.policy import BUILT_IN_BOUNDS, PolicyBounds
from mem_core.domain.request import RuntimeRequest
from mem_core.infrastructure.storage.disk import OsDisk
from mem_core.runtime.checkpoint_manager.catalog import Catalog
from mem_core.runtime.checkpoint_manager.inspection.file_checks import check_claims


@dataclass(frozen=True)
class PolicyAnswer:
    """What a command says: `report` for `--json` on standard output, `text` for people on standard error."""

    exit_code: int
    report: dict[str, Any]
    text: str


def evaluate_directive(
    request: RuntimeRequest, environment: EnvironmentReport, reply: bytes | None, bounds: PolicyBounds = BUILT_IN_BOUNDS
) -> PolicyAnswer:
    """What would happen to a directive in the first segment of a fresh run. `reply` is raw; None means no directive.

    Exit code 80 where the directive or the request is refused, else 0.
    """
    lane = bounds.of(environment.device)
    advice = None if reply is None else parse_directive(reply, lane.directive_size_limit_bytes)
    decision = LocalPolicyEngine(bounds).evaluate(request, first_plan(request), environment, advice)
    shown = decision.model_dump(
        mode="json", include={"allow", "reason", "lane", "applied_hyperparams", "clamps", "detail", "not_applicable"}
    )
    return PolicyAnswer(EXIT_CODE_COMPLETED if decision.allow else PolicyRefused.exit_code, shown, explain_decision(decision))


def first_plan(request: RuntimeRequest) -> CandidatePlan:
    """The first segment of a fresh run; its memory plan has no limits yet."""
    until_step = min(request.effective_segment_steps, request.training.max_steps)
    return CandidatePlan(
        segment_index=0,
        from_step=0,
        until_step=until_step,
        hyperparams=request_values(request),
        memory=MemoryPlan(micro_batch_rows=0, micro_batch_tokens=0),
    )


def replay_run(run_folder: Path) -> PolicyAnswer:
    """`replay_decisions` of a run folder, and its checkpoints beside what the journal said about them.

    Raises:
        RequestError: there is no journal. StoreUnavailable: it cannot be read.
    """
    files = read_journal_files(run_folder)
    return replay_decisions(files, checkpoint_differences(run_folder, files))


def checkpoint_differences(run_folder: Path, files: JournalFiles) -> tuple[Difference, ...]:
    """Where a checkpoint's manifest is not the one that the journal names for that step."""
    words = CheckpointWords(event for _, event in walk_journal(files).events)
    identity = RunIdentity(read_identity(run_folder).run_id, words=words)
    found: list[Difference] = []
    for step, present in Catalog(OsDisk(), run_folder, identity.run_id).complete():
        reasons = (*check_claims(present.manifest, step), *identity.foreign(present.manifest, present.sha256))
        found += [Difference(where=f"checkpoints/{checkpoint_name(step)}", what=reason) for reason in reasons]
    return tuple(found)


def replay_decisions(files: JournalFiles, checkpoints: tuple[Difference, ...] = ()) -> PolicyAnswer:
    """Recompute every decision and check the hash chain. Exit code 70 where anything differs, `checkpoints` included, else 0."""
    audit = audit_journal(files)
    audit = audit.model_copy(update={"differences": (*audit.differences, *checkpoints)})
    report = {"sound": audit.sound, **audit.model_dump(mode="json")}
    lines = [f"{audit.num_decisions} decisions recomputed, {audit.num_lines} journal lines chained"]
    lines += [f"DIFFERENT {difference.where}: {difference.what}" for difference in audit.differences]
    lines += [f"note: {note}" for note in audit.notes]
    wrong = "the journal does not agree with itself" if not checkpoints else "journal and checkpoints do not agree"
    lines.append("all as recorded" if audit.sound else wrong)
    return PolicyAnswer(EXIT_CODE_COMPLETED if audit.sound else InternalError.exit_code, report, "\n".join(lines))


def explain_run(files: JournalFiles) -> PolicyAnswer:
    """Every decision of a run in words. Lines that are no journal lines are left out (`replay` reports them)."""
    decisions = [event for event in _events(files) if isinstance(event, PolicyDecided)]
    text = explain_decisions(decisions) or "no decisions are recorded"
    report = {"decisions": [{"segment_index": event.segment_index, **event.decision.model_dump(mode="json")} for event in decisions]}
    return PolicyAnswer(EXIT_CODE_COMPLETED, report, text)


def _events(files: JournalFiles) -> list[object]:
    events: list[object] = []
    for _, content in files:
        for raw in content.split(b"\n")[:-1]:
            try:
                events.append(JournalLine.model_validate_json(raw).event)
            except ValidationError:
                continue
    return events


def read_journal_files(run_folder: Path) -> JournalFiles:
    """(name, content) of every attempt's journal, in order.

    Raises:
        RequestError: there is no journal. StoreUnavailable: it cannot be read.
    """
    try:
        files = journal_files(run_folder / "journal")
    except OSError as exc:
        raise StoreUnavailable(
            "the journal cannot be read", value=f"{run_folder}: {exc.strerror}", remedy="Check its permissions."
        ) from exc
    if not files:
        raise RequestError(
            "there is no journal", value=run_folder, field="RUN", remedy="Give a run id with --store, or the path of a run folder."
        )
    return files
