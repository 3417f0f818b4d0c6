"""A seeded, realistic run folder (journal, metrics, request) for whoever reads one: report, status, display."""

import hashlib
import json
import random
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mem_core.domain.environment import EnvironmentReport, Finding, MemoryBudget
from mem_core.domain.events import (
    CheckpointCommitted,
    CheckpointRemoved,
    DoctorReported,
    Evaluated,
    FaultMet,
    MemoryPlanChanged,
    Noted,
    OomAbsorbed,
    PolicyDecided,
    Recovered,
    SegmentEnded,
    SegmentStarted,
    TimeSpent,
)
from mem_core.domain.plan import CandidatePlan, Hyperparams, MemoryPlan, MemoryPlanChange
from mem_core.domain.policy import Clamp, PolicyDecision
from mem_core.domain.request import RuntimeRequest
from mem_core.domain.segment import Evidence, Hung, NonFinite, OutOfMemory, SegmentCompleted, SegmentFailure, WorkerLost
from mem_core.infrastructure.telemetry.metrics import Columns, write_segment_metrics
from mem_core.testing.synthetic_run import JournalBuilder

HOSTILE_TEXT = "<script>alert('x')</script> & \"quotes\" <img src=x onerror=alert(1)>"
_BUDGET_BYTES = 3 * 2**30


@dataclass
class SyntheticRun:
    """Parameters of an invented run. `fault_every_segments` 0 means a quiet one; `with_kills` ends some attempts without a word."""

    num_steps: int = 20_000
    segment_steps: int = 500
    seed: int = 0
    fault_every_segments: int = 3
    with_kills: bool = True
    tokens_per_step: int = 1_024
    step_s: float = 0.011
    end_status: str = "completed"
    rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    def write(self, run_folder: Path) -> JournalBuilder:
        """Write the folder; returns the journal."""
        run_folder.mkdir(parents=True, exist_ok=True)
        builder = JournalBuilder()
        builder.start().add(DoctorReported(report=_environment()), after_s=2.0)
        builder.add(TimeSpent(seconds={"start": 9.0, "op_build": 61.0, "data": 14.0}), after_s=82.0)
        builder.add(Noted(text=f"data prepared from {HOSTILE_TEXT}"))
        for index, from_step in enumerate(range(0, self.num_steps, self.segment_steps)):
            self._segment(builder, run_folder, index, from_step, min(from_step + self.segment_steps, self.num_steps))
        builder.add(Evaluated(step=self.num_steps, validation_loss=self._loss(self.num_steps) + 0.05))
        if self.end_status != "running":
            builder.end(
                self.end_status, 0 if self.end_status == "completed" else 79, "" if self.end_status == "completed" else HOSTILE_TEXT
            )
        builder.write(run_folder / "journal")
        request = RuntimeRequest.model_validate({"run_id": "synthetic", "training": {"max_steps": self.num_steps}})
        facts = {"fingerprints": {"data": "5c1f" * 16, "model": HOSTILE_TEXT}, "versions": {"torch": "2.13.0"}}
        (run_folder / "run.json").write_text(json.dumps({"request": request.model_dump(mode="json"), **facts}), encoding="utf-8")
        return builder

    def _segment(self, builder: JournalBuilder, run_folder: Path, index: int, from_step: int, to_step: int) -> None:
        if index % 7 == 2:
            builder.add(_decision(index, from_step, to_step))
        if self.fault_every_segments and index % self.fault_every_segments == 1:
            self._fault(builder, index, from_step, to_step)
        builder.add(SegmentStarted(segment_index=index, from_step=from_step, until_step=to_step))
        if index % 11 == 4:
            self._memory_event(builder, from_step)
        columns = self._columns(from_step, to_step)
        write_segment_metrics(run_folder / "metrics", to_step, columns)
        duration_s = float(columns["step_s"].astype(np.float64).sum())
        outcome = SegmentCompleted(
            from_step=from_step,
            to_step=to_step,
            batch_index=to_step,
            loss_first=float(columns["loss"][0]),
            loss_last=float(columns["loss"][-1]),
            tokens=int(columns["tokens"].astype(np.int64).sum()),
            duration_s=duration_s,
            peak_bytes=int(columns["peak_bytes"].astype(np.int64).max()),
            trajectory_digest=f"{to_step:064x}",
        )
        builder.add(SegmentEnded(segment_index=index, outcome=outcome), after_s=duration_s)
        builder.add(TimeSpent(seconds={"productive": duration_s, "save_stall": 0.03}), after_s=0.03)
        self._checkpoint(builder, index, to_step)

    def _checkpoint(self, builder: JournalBuilder, index: int, step: int) -> None:
        commit = CheckpointCommitted(
            step=step,
            size_bytes=41_000_000 + step,
            duration_s=0.21,
            weights_digest=hashlib.sha256(str(step).encode()).hexdigest(),
            trajectory_digest=f"{step:064x}",
        )
        builder.add(commit)
        if index % 13 == 6:
            builder.judge(step, valid=False).add(FaultMet(kind="checkpoint_damaged", step=step - self.segment_steps, detail=HOSTILE_TEXT))
            builder.add(commit, after_s=0.3).add(Recovered(kind="checkpoint_damaged", step=step, recovered_s=0.3))
        builder.judge(step, manifest="again")
        if index >= 3:
            builder.add(CheckpointRemoved(step=step - 3 * self.segment_steps, reason="rotation: newer ones are validated"))
        if index % 4 == 3:
            builder.add(Evaluated(step=step, validation_loss=self._loss(step) + 0.05))
            builder.add(TimeSpent(seconds={"evaluation": 0.4}), after_s=0.4)

    def _fault(self, builder: JournalBuilder, index: int, from_step: int, to_step: int) -> None:
        batch_index = self.rng.randrange(from_step, to_step)
        lost_s = (batch_index - from_step) * self.step_s
        builder.add(SegmentStarted(segment_index=index, from_step=from_step, until_step=to_step))
        if self.with_kills and self.rng.random() < 0.2:
            builder.now_s += lost_s
            builder.start(resumed_step=from_step, after_s=4.0)
            builder.add(TimeSpent(seconds={"start": 6.0, "restore": 0.5}), after_s=6.5)
            builder.add(Recovered(kind="run_killed", step=from_step, recovered_s=10.5))
            return
        failure = self._failure(batch_index)
        builder.add(SegmentEnded(segment_index=index, outcome=failure), after_s=lost_s)
        builder.add(FaultMet(kind=failure.kind, step=from_step, detail=f"rank 1 in forward at batch {batch_index}"))
        recovered_s = 0.4 + self.rng.random()
        seconds = {"redone": lost_s, "restore": recovered_s}
        builder.add(
            Recovered(kind=failure.kind, step=from_step, recovered_s=recovered_s), TimeSpent(seconds=seconds), after_s=recovered_s / 2
        )

    def _failure(self, batch_index: int) -> SegmentFailure:
        evidence = Evidence(rank=1, phase="forward", batch_index=batch_index, exception=HOSTILE_TEXT, peak_bytes=_BUDGET_BYTES)
        kinds: list[SegmentFailure] = [
            WorkerLost(cause="SIGKILL", evidence=evidence),
            Hung(waited_s=3.0, evidence=evidence),
            NonFinite(what="loss", batch_index=batch_index, evidence=evidence),
            OutOfMemory(memory="host", evidence=evidence),
        ]
        return self.rng.choice(kinds)

    def _memory_event(self, builder: JournalBuilder, batch_index: int) -> None:
        rows = self.rng.choice((1, 2, 4, 8))
        change = MemoryPlanChange(
            batch_index=batch_index, plan=MemoryPlan(micro_batch_rows=rows, micro_batch_tokens=0), reason="above the high watermark"
        )
        builder.add(MemoryPlanChanged(change=change, observed_bytes=int(2.8 * 2**30), limit_bytes=_BUDGET_BYTES))
        builder.add(OomAbsorbed(batch_index=batch_index, memory="host", phase="forward"))

    def _loss(self, step: int) -> float:
        return 1.9 + 3.6 * float(np.exp(-step / (0.18 * self.num_steps)))

    def _columns(self, from_step: int, to_step: int) -> Columns:
        random_numbers = np.random.default_rng(self.seed * 1_000_003 + from_step)
        steps = np.arange(from_step + 1, to_step + 1)
        count = steps.size
        loss = 1.9 + 3.6 * np.exp(-steps / (0.18 * self.num_steps)) + random_numbers.normal(0, 0.09, count)
        loss[random_numbers.random(count) < 0.0004] += 1.8
        warm = np.minimum(steps / 400, 1.0)
        lr = 3e-4 * warm * (0.1 + 0.45 * (1 + np.cos(np.pi * steps / self.num_steps)))
        step_s = self.step_s * np.exp(random_numbers.normal(0, 0.08, count))
        step_s[random_numbers.random(count) < 0.0006] *= 9
        micro_batches = np.full(count, 2 if (from_step // self.segment_steps) % 22 < 4 else 4)
        peak = 2.1 * 2**30 + 0.25 * 2**30 * random_numbers.random(count) + (micro_batches == 2) * 0.35 * 2**30
        return {
            "batch_index": steps - 1,
            "step": steps,
            "loss": loss,
            "grad_norm": np.exp(random_numbers.normal(-0.3, 0.35, count)),
            "lr": lr,
            "tokens": np.full(count, self.tokens_per_step),
            "step_s": step_s,
            "micro_batches": micro_batches,
            "peak_bytes": peak.astype(np.int64),
        }


def _environment() -> EnvironmentReport:
    findings = (
        Finding(check="dtype", severity="notice", observed="bfloat16 is emulated on this CPU", remedy="float32 is used"),
        Finding(check="disk_free", severity="ok", observed="41.0 GiB", needed="2.1 GiB"),
        Finding(check="dev_shm", severity="warning", observed=HOSTILE_TEXT, needed="64.0 MiB", remedy="mount a larger /dev/shm"),
    )
    limits = {"host_available": 6 * 2**30, "cgroup": _BUDGET_BYTES}
    return EnvironmentReport.model_validate(
        {
            "device": "cpu",
            "device_reason": "no CUDA device",
            "dtype": "float32",
            "num_cores": 2,
            "threads_per_rank": 1,
            "versions": {"torch": "2.13.0", "deepspeed": "0.19.8"},
            "memory": (MemoryBudget(kind="host", budget_bytes=_BUDGET_BYTES, binding_limit="cgroup", limits_bytes=limits),),
            "findings": findings,
        }
    )


def _decision(index: int, from_step: int, to_step: int) -> PolicyDecided:
    refused = index % 2 == 1
    applied = Hyperparams.model_validate({} if refused else {"lr_multiplier": 0.85})
    clamp = Clamp(field="lr_multiplier", proposed=3.0, applied=0.85, bound="<= 0.85", reason="above the lane's bound")
    decision = PolicyDecision(
        allow=not refused,
        reason="unknown_key" if refused else "clamped",
        detail="unknown key 'shell'" if refused else "",
        lane="cpu_lane",
        applied_hyperparams=applied,
        clamps=() if refused else (clamp,),
    )
    plan = CandidatePlan(
        segment_index=index,
        from_step=from_step,
        until_step=to_step,
        hyperparams=applied,
        memory=MemoryPlan(micro_batch_rows=4, micro_batch_tokens=0),
    )
    text = '{"shell": "rm -rf /"} ' + HOSTILE_TEXT if refused else '{"lr_multiplier": 3.0}'
    return PolicyDecided(segment_index=index, plan=plan, directive_text=text, decision=decision)
