"""`mem policy evaluate|replay|explain` as functions: an answer, an exit code, and an audit that sees every edit."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flows.commands.policy import evaluate_directive, explain_run, read_journal_files, replay_decisions
from mem_core.core.policy.explain import decision_rows
from mem_core.core.policy.history import history_for
from mem_core.core.policy.local_policy_engine import LocalPolicyEngine
from mem_core.domain.directive import ExecutiveDirective, Refusal
from mem_core.domain.environment import EnvironmentReport
from mem_core.domain.errors import RequestError
from mem_core.domain.events import GENESIS_SHA256, JournalLine, Noted, PolicyDecided
from mem_core.domain.plan import CandidatePlan, Hyperparams, MemoryPlan
from mem_core.domain.policy import SegmentHealth
from mem_core.domain.request import RuntimeRequest

REQUEST = RuntimeRequest.model_validate({"run_id": "demo"})
GREEDY = b'{"lr_multiplier": 1.4, "gradient_clip_norm": 5.0, "loss_scale_initial_power": 16}'


def environment(device: str) -> EnvironmentReport:
    return EnvironmentReport.model_validate(
        {
            "device": device, "device_reason": "", "dtype": "float32", "num_cores": 2, "threads_per_rank": 1,
            "versions": {}, "memory": (), "findings": (),
        }
    )  # fmt: skip


@pytest.mark.parametrize(("device", "lane"), [("cuda", "v89_real_chaos_mem_lane"), ("cpu", "cpu_mem_lane")])
def test_evaluate_shows_the_reference_example(device: str, lane: str) -> None:
    answer = evaluate_directive(REQUEST, environment(device), GREEDY)
    assert answer.exit_code == 0
    assert {"allow", "reason", "lane", "applied_hyperparams", "clamps"} <= answer.report.keys()
    assert (answer.report["allow"], answer.report["reason"], answer.report["lane"]) == (True, "clamped", lane)
    assert answer.report["applied_hyperparams"] == {"lr_multiplier": 0.85, "gradient_clip_norm": 1.25, "loss_scale_initial_power": 10}
    assert answer.report["not_applicable"] == ["loss_scale_initial_power"]
    assert json.loads(json.dumps(answer.report, allow_nan=False)) == answer.report
    assert "lr_multiplier 1.4 -> 0.85, above its bound (at most 0.85)" in answer.text


@pytest.mark.parametrize("reply", [b"", b"[]", b'{"max_steps": 1}', b'{"lr_multiplier": NaN}', b"\xff"])
def test_evaluate_exits_80_for_a_refused_directive(reply: bytes) -> None:
    answer = evaluate_directive(REQUEST, environment("cpu"), reply)
    assert (answer.exit_code, answer.report["allow"]) == (80, False)
    assert answer.report["applied_hyperparams"] == Hyperparams().model_dump()


def test_evaluate_exits_80_without_cuda() -> None:
    answer = evaluate_directive(REQUEST.model_copy(update={"device": "cuda"}), environment("cpu"), GREEDY)
    assert (answer.exit_code, answer.report["reason"]) == (80, "cuda_unavailable")


def test_evaluate_without_a_directive_shows_the_requests_own_values() -> None:
    answer = evaluate_directive(REQUEST, environment("cpu"), None)
    assert (answer.exit_code, answer.report["reason"]) == (0, "no_directive")


class Journal:
    """A journal as a run writes it: chained raw lines over several attempts."""

    def __init__(self) -> None:
        self.files: list[list[bytes]] = [[]]
        self.events: list[Any] = []
        self.previous = GENESIS_SHA256

    def emit(self, event: Any) -> None:
        line = JournalLine(sequence=len(self.events), time_unix_s=1.5, attempt=len(self.files), previous_sha256=self.previous, event=event)
        raw = line.model_dump_json().encode()
        self.files[-1].append(raw)
        self.events.append(event)
        self.previous = hashlib.sha256(raw).hexdigest()

    def decide(self, advice: ExecutiveDirective | Refusal | None, text: str | None = None, loss: float = 2.0) -> None:
        index = sum(isinstance(event, PolicyDecided) for event in self.events)
        plan = CandidatePlan(
            segment_index=index, from_step=index, until_step=index + 1, hyperparams=Hyperparams(), memory=MemoryPlan(micro_batch_rows=1)
        )
        rest = (environment("cpu"), advice, SegmentHealth(loss_last=loss), history_for(self.events, index))
        engine = LocalPolicyEngine()
        decision = engine.evaluate(REQUEST, plan, *rest)
        inputs = engine.inputs(REQUEST, *rest).model_dump(mode="json")
        self.emit(PolicyDecided(segment_index=index, plan=plan, directive_text=text, inputs=inputs, decision=decision))

    def content(self) -> list[tuple[str, bytes]]:
        return [(f"attempt-{number:04d}.jsonl", b"".join(raw + b"\n" for raw in lines)) for number, lines in enumerate(self.files, start=1)]


@pytest.fixture
def journal() -> Journal:
    journal = Journal()
    journal.emit(Noted(text="start"))
    journal.decide(ExecutiveDirective(lr_multiplier=1.4), text='{"lr_multiplier": 1.4}')
    journal.decide(None)
    journal.files.append([])
    journal.decide(Refusal(reason="late", detail="no answer within 1 s"))
    journal.decide(ExecutiveDirective(lr_multiplier=0.5), text='I say {"lr_multiplier": 0.5}')
    journal.emit(Noted(text="end"))
    return journal


def test_replay_of_an_honest_journal_finds_nothing(journal: Journal) -> None:
    answer = replay_decisions(journal.content())
    assert (answer.exit_code, answer.report["sound"], answer.report["num_decisions"], answer.report["num_lines"]) == (0, True, 4, 6)


def edit(lines: list[list[bytes]], file: int, line: int, old: bytes, new: bytes) -> None:
    assert old in lines[file][line]
    lines[file][line] = lines[file][line].replace(old, new)


@pytest.mark.parametrize(
    "tamper",
    [
        lambda files: edit(files, 0, 0, b"start", b"stark"),
        lambda files: edit(files, 0, 1, b'"applied_hyperparams":{"lr_multiplier":0.85', b'"applied_hyperparams":{"lr_multiplier":0.95'),
        lambda files: edit(files, 1, 0, b'"reason":"late"', b'"reason":"busy"'),
        lambda files: files[0].pop(0),
        lambda files: files[0].pop(),
        lambda files: files[1].pop(0),
        lambda files: files[1].insert(1, files[1][0]),
        lambda files: files[0].reverse(),
        lambda files: files[0].insert(1, b"not a line"),
        lambda files: files.reverse(),
    ],
)
def test_replay_sees_every_edit(journal: Journal, tamper: Callable[[list[list[bytes]]], Any]) -> None:
    tamper(journal.files)
    answer = replay_decisions(journal.content())
    assert answer.exit_code != 0
    assert answer.report["differences"]
    assert "DIFFERENT attempt-" in answer.text


def rechained(journal: Journal, change: Callable[[dict[str, Any]], None], index: int) -> list[tuple[str, bytes]]:
    """A forger who edits one event and recomputes all hashes after it."""
    forged = Journal()
    for position, event in enumerate(journal.events):
        values = event.model_dump(mode="json")
        if position == index:
            change(values)
        forged.emit(type(event).model_validate(values))
    return forged.content()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda event: event["decision"]["applied_hyperparams"].update(lr_multiplier=0.95), "applied_hyperparams"),
        (lambda event: event["inputs"]["directive"].update(lr_multiplier=0.9), "reply says"),
        (lambda event: event["inputs"]["history"].update(cool_down_until_segment=9), "history"),
        (lambda event: event["inputs"].pop("bounds") and event["inputs"].update(bounds=3), "not complete"),
        (lambda event: event.update(segment_index=7), "another segment"),
    ],
)
def test_replay_recomputes_so_a_forged_chain_does_not_help(journal: Journal, change: Callable[[dict[str, Any]], None], words: str) -> None:
    answer = replay_decisions(rechained(journal, change, index=1))
    assert answer.exit_code != 0
    assert any(words in difference["what"] for difference in answer.report["differences"]), answer.text


def test_a_line_cut_by_a_crash_is_a_note(journal: Journal) -> None:
    name, content = journal.content()[0]
    answer = replay_decisions([(name, content + b'{"sequence": 4, "ti'), journal.content()[1]])
    assert (answer.exit_code, len(answer.report["notes"])) == (0, 1)


def test_late_lines_of_a_replaced_holder_are_a_note_but_a_late_decision_is_a_difference(journal: Journal) -> None:
    def late(event: Any) -> bytes:
        previous = hashlib.sha256(journal.files[0][-1]).hexdigest()
        return JournalLine(sequence=3, time_unix_s=2.0, attempt=1, previous_sha256=previous, event=event).model_dump_json().encode()

    harmless = [[*journal.files[0], late(Noted(text="woke up"))], journal.files[1]]
    journal_of = Journal()
    journal_of.files = harmless
    answer = replay_decisions(journal_of.content())
    assert (answer.exit_code, len(answer.report["notes"])) == (0, 1)
    journal_of.files = [[*journal.files[0], late(journal.events[1])], journal.files[1]]
    assert replay_decisions(journal_of.content()).exit_code != 0


@pytest.mark.parametrize("content", [b"", b"\n", b"\x00\xff\n", b"{}\n[]\n", b"[" * 100_000 + b"\n"])
def test_replay_never_raises(content: bytes) -> None:
    assert replay_decisions([("attempt-0001.jsonl", content)]).report["num_decisions"] == 0


def test_explain_tells_each_decision_in_words(journal: Journal) -> None:
    answer = explain_run(journal.content())
    assert answer.exit_code == 0
    assert "segment 0 (steps 0 to 1): allowed in lane cpu_mem_lane: the advice was taken within the bounds" in answer.text
    assert "the reply was refused as a whole (late)" in answer.text
    assert [decision["reason"] for decision in answer.report["decisions"]] == ["clamped", "no_directive", "late", "accepted"]
    assert explain_run([]).text == "no decisions are recorded"


def test_rows_are_plain_values(journal: Journal) -> None:
    rows = decision_rows(event for event in journal.events if isinstance(event, PolicyDecided))
    assert [row["lr_multiplier"] for row in rows] == [0.85, 1.0, 1.0, 0.5]
    assert json.loads(json.dumps(rows)) == rows


def test_journal_files_are_read_in_the_order_of_attempts(tmp_path: Path, journal: Journal) -> None:
    (tmp_path / "journal").mkdir()
    for name, content in reversed(journal.content()):
        (tmp_path / "journal" / name).write_bytes(content)
    assert read_journal_files(tmp_path) == journal.content()


def test_a_folder_without_journal_is_named(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no journal"):
        read_journal_files(tmp_path)
