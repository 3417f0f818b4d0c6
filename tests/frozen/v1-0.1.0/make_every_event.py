"""Writes a journal that holds every kind of event and every kind of outcome, each with all of its fields: `... FOLDER` makes
FOLDER/journal/attempt-0001.jsonl and attempt-0002.jsonl. Run by the Python of the version whose words are to be kept.

A story that one run could have lived through: a fault of each kind, advice that was clamped, a batch left out, a stop, a second start.
"""

import hashlib
import sys
from pathlib import Path
from typing import Any

from mem_core.domain.directive import ExecutiveDirective, Refusal
from mem_core.domain.events import EVENT_ADAPTER, GENESIS_SHA256, JournalLine
from mem_core.domain.plan import Hyperparams, MemoryPlan
from mem_core.domain.policy import PolicyHistory, PolicyInputs, SegmentHealth

BORN_UNIX_S = 1_790_000_000.0
HEX = "0123456789abcdef"
HYPERPARAMS = {"lr_multiplier": 0.85, "gradient_clip_norm": 1.0, "loss_scale_initial_power": 10}
MEMORY = {"micro_batch_rows": 2, "micro_batch_tokens": 64, "activation_checkpointing": True, "offload_optimizer": "cpu"}
DIRECTIVE = {"lr_multiplier": 2.0, "gradient_clip_norm": 1.0, "loss_scale_initial_power": 8}
EVIDENCE = {
    "rank": 1, "phase": "backward", "batch_index": 14, "exception": "RuntimeError: an example", "exit_code": -9, "signal": "SIGKILL",
    "peak_bytes": 1_000_000, "limit_bytes": 2_000_000, "failed_rows": 2, "failed_length": 32, "last_lines": ["one", "two"],
    "stacks": "at x",
}  # fmt: skip
FINDINGS = (
    {"check": "dtype", "severity": "ok", "observed": "float32, as asked", "needed": "", "remedy": "", "exit_code": 0},
    {"check": "disk", "severity": "warning", "observed": "1 GiB free", "needed": "2 GiB", "remedy": "Free some space.", "exit_code": 0},
    {"check": "threads", "severity": "notice", "observed": "2 cores", "needed": "", "remedy": "", "exit_code": 0},
)
MODEL = {
    "num_parameters": 4016, "num_trainable_parameters": 4000, "num_layers": 1, "hidden_size": 16, "intermediate_size": 16,
    "vocab_size": 136, "num_heads": 2, "num_kv_heads": 2, "max_positions": 64, "tokenizer_vocab_size": 135, "tied": True,
}  # fmt: skip
REPORT = {
    "device": "cpu", "device_reason": "asked for with device: cpu", "dtype": "float32", "num_cores": 2, "threads_per_rank": 1,
    "versions": {"torch": "2.13.0"}, "estimates_bytes": {"parameters": 4016}, "findings": FINDINGS, "num_ranks": 2, "micro_batch_rows": 2,
    "memory": [{"kind": "host", "budget_bytes": 4_000, "binding_limit": "MemAvailable", "limits_bytes": {"MemAvailable": 4_000}}],
    "max_build_jobs": 2, "stale_locks": ["build/op/lock"], "model": MODEL,
}  # fmt: skip


def digest(number: int) -> str:
    return HEX[number % 16] * 64


def outcome_completed(to_step: int, loss_first: float, loss_last: float) -> dict[str, Any]:
    return {
        "kind": "completed", "from_step": to_step - 10, "to_step": to_step, "batch_index": to_step + to_step // 20, "skipped_steps": 0,
        "loss_first": loss_first, "loss_last": loss_last, "tokens": 1_240, "duration_s": 1.5, "peak_bytes": 1_000,
        "trajectory_digest": digest(to_step), "weights_digest": digest(to_step + 1),
    }  # fmt: skip


OUTCOMES: tuple[dict[str, Any], ...] = (
    {"kind": "out_of_memory", "memory": "host", "evidence": EVIDENCE},
    {"kind": "worker_lost", "cause": "SIGKILL", "evidence": EVIDENCE},
    {"kind": "hung", "waited_s": 12.5, "evidence": EVIDENCE},
    {"kind": "non_finite", "what": "loss", "batch_index": 14, "sample_ids": [3, 5], "evidence": EVIDENCE},
    {"kind": "worker_error", "evidence": EVIDENCE},
    {"kind": "save_failed", "evidence": EVIDENCE},
)
INTERRUPTED = {
    "kind": "interrupted", "by": "SIGTERM", "to_step": 25, "batch_index": 26, "loss_first": 3.0, "loss_last": 2.75, "tokens": 620,
    "duration_s": 0.75, "peak_bytes": 1_000, "trajectory_digest": digest(25), "weights_digest": digest(26),
}  # fmt: skip


def decided() -> dict[str, Any]:
    inputs = PolicyInputs(
        device_asked="auto", device="cpu", dtype="float32", base=Hyperparams(), high_watermark=0.9, memory_warnings=("memory.host_budget",),
        approval_required=True, approval="granted", directive=ExecutiveDirective.model_validate(DIRECTIVE),
        refusal=Refusal(reason="late", detail="an example"),
        health=SegmentHealth(loss_mean=3.5, loss_first=4.0, loss_last=3.0, ooms_absorbed=1, memory_used_fraction=0.5),
        history=PolicyHistory(
            current=Hyperparams(), current_memory=MemoryPlan.model_validate(MEMORY), cool_down_until_segment=1, canary_until_segment=2,
            canary_baseline_loss=4.0, before_change=Hyperparams(),
        ),
    )  # fmt: skip
    plan = {"segment_index": 1, "from_step": 10, "until_step": 20, "hyperparams": HYPERPARAMS, "memory": MEMORY}
    clamp = {"field": "lr_multiplier", "proposed": 2.0, "applied": 0.85, "bound": "at most 0.85", "reason": "the lane's upper bound"}
    decision = {
        "allow": True, "reason": "clamped", "detail": "one value was clamped", "lane": "cpu_mem_lane", "applied_hyperparams": HYPERPARAMS,
        "clamps": [clamp], "not_applicable": ["loss_scale_initial_power"], "directive": DIRECTIVE, "request_refused": False,
        "proposed_hyperparams": HYPERPARAMS, "applied_memory": MEMORY,
    }  # fmt: skip
    return {
        "event": "policy_decided", "segment_index": 1, "plan": plan, "directive_text": '{"lr_multiplier": 2.0}',
        "inputs": inputs.model_dump(mode="json"), "decision": decision,
    }  # fmt: skip


def attempt_started(attempt: int, resumed_step: int | None) -> dict[str, Any]:
    return {
        "event": "attempt_started",
        "attempt": attempt,
        "pid": 7,
        "host": "frozen",
        "resumed_step": resumed_step,
        "note": "cpu, float32",
    }


def segment_started(index: int, from_step: int, try_number: int = 1) -> dict[str, Any]:
    return {
        "event": "segment_started",
        "segment_index": index,
        "from_step": from_step,
        "until_step": 10 * index + 10,
        "try_number": try_number,
    }


def saved(step: int, valid: bool = True) -> list[dict[str, Any]]:
    """Committed and judged."""
    verdict = {
        "step": step, "level": "integrity", "valid": valid, "reasons": [] if valid else ["a file is cut short"], "weights_bad": False,
        "manifest_sha256": digest(step + 2), "weights_digest": digest(step + 1), "duration_s": 0.125, "judged_unix_s": BORN_UNIX_S + step,
    }  # fmt: skip
    committed = {
        "event": "checkpoint_committed", "step": step, "size_bytes": 64_256, "duration_s": 0.25, "weights_digest": digest(step + 1),
        "trajectory_digest": digest(step),
    }  # fmt: skip
    return [committed, {"event": "checkpoint_judged", "verdict": verdict}]


def failures() -> list[dict[str, Any]]:
    """A fault of each kind in the second segment, each followed by another try."""
    events: list[dict[str, Any]] = []
    for number, outcome in enumerate(OUTCOMES, start=1):
        events += [
            {"event": "segment_ended", "segment_index": 1, "outcome": outcome},
            {"event": "fault_met", "kind": outcome["kind"], "step": 10, "detail": "an example"},
            segment_started(1, 10, number + 1),
            {"event": "recovered", "kind": outcome["kind"], "step": 11, "recovered_s": 0.5},
        ]
    return events


def first_attempt() -> list[dict[str, Any]]:
    change = {"batch_index": 14, "plan": MEMORY, "reason": "above the high watermark", "failed_tokens": 64, "limit_bytes": 2_000_000}
    return [
        attempt_started(1, None),
        {"event": "doctor_reported", "report": REPORT},
        segment_started(0, 0),
        {"event": "segment_ended", "segment_index": 0, "outcome": outcome_completed(10, 5.0, 4.0)},
        {"event": "time_spent", "seconds": {"start": 1.0, "productive": 1.5, "save_stall": 0.25}},
        *saved(10),
        decided(),
        segment_started(1, 10),
        {"event": "memory_plan_changed", "change": change, "observed_bytes": 1_900_000, "limit_bytes": 2_000_000},
        {"event": "oom_absorbed", "batch_index": 14, "memory": "host", "phase": "forward", "detail": "an example"},
        *failures(),
        {"event": "batch_skipped", "batch_index": 14, "sample_ids": [3, 5], "reason": "it failed again and again"},
        {"event": "segment_ended", "segment_index": 1, "outcome": outcome_completed(20, 4.0, 3.0)},
        *saved(20, valid=False),
        {"event": "checkpoint_removed", "step": 20, "reason": "quarantine"},
        *saved(20),
        {"event": "evaluated", "step": 20, "validation_loss": 3.25},
        segment_started(2, 20),
        {"event": "segment_ended", "segment_index": 2, "outcome": INTERRUPTED},
        *saved(25),
        {"event": "time_spent", "seconds": {"productive": 3.0, "redone": 1.0, "restart": 0.5}},
        {"event": "noted", "text": "stopped by a signal"},
        {"event": "run_ended", "status": "interrupted", "exit_code": 75, "message": "stopped"},
    ]


def second_attempt() -> list[dict[str, Any]]:
    return [
        attempt_started(2, 25),
        segment_started(2, 25),
        {"event": "segment_ended", "segment_index": 2, "outcome": outcome_completed(30, 2.75, 2.5) | {"from_step": 25, "tokens": 620}},
        *saved(30),
        {"event": "time_spent", "seconds": {"start": 0.5, "productive": 1.0}},
        {"event": "run_ended", "status": "completed", "exit_code": 0, "message": ""},
    ]


def write_journal(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    previous_sha256, sequence = GENESIS_SHA256, 0
    for attempt, events in ((1, first_attempt()), (2, second_attempt())):
        lines: list[bytes] = []
        for event in events:
            time_unix_s = BORN_UNIX_S + sequence
            parsed = EVENT_ADAPTER.validate_python(event)
            assert parsed.model_dump(mode="json") == parsed.model_dump(mode="json", exclude_unset=True), f"a field of {event} is not given"
            line = JournalLine(
                sequence=sequence, time_unix_s=time_unix_s, attempt=attempt, previous_sha256=previous_sha256, event=parsed
            )  # fmt: skip
            lines.append(line.model_dump_json().encode())
            previous_sha256, sequence = hashlib.sha256(lines[-1]).hexdigest(), sequence + 1
        (folder / f"attempt-{attempt:04d}.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))


if __name__ == "__main__":
    write_journal(Path(sys.argv[1]) / "journal")
