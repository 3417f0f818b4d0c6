"""The evaluating process: `python -m mem_core.runtime.inference.evaluate_process`, one EvaluateJob as a JSON line on standard input.

Rows that were prepared as for training go through the same objective and the same passes as the evaluations of a run, on one rank.
"""

from dataclasses import dataclass
from typing import Any

from mem_core.core.memory.ladder import NO_BOUND
from mem_core.core.memory.model import PeakLine
from mem_core.domain.errors import DataError, MemoryExhausted
from mem_core.domain.plan import MemoryPlan
from mem_core.runtime.data.child import Say, answer_parent
from mem_core.runtime.data.serving.dataset import TokenDataset
from mem_core.runtime.deepspeed.evaluation import Evaluation
from mem_core.runtime.deepspeed.objective import ModelOutput, objective_of, pad_token_for
from mem_core.runtime.deepspeed.passes import Passes
from mem_core.runtime.inference.evaluating import EvaluateJob
from mem_core.runtime.inference.generate_process import KEPT_FREE
from mem_core.runtime.inference.opening import OpenModel, device_kind, open_model
from mem_core.runtime.ranks.place import Meeting, RankPlace
from mem_core.runtime.ranks.worker.classify import memory_kind
from mem_core.runtime.ranks.worker.device import CpuDevice, CudaDevice, LocalDevice
from mem_core.runtime.ranks.worker.protocol import Evaluate, WorkerSpec

SET = "data"


@dataclass(frozen=True)
class _Forward:
    """A module in the place of an engine: passes that only score ask for nothing else."""

    module: Any

    def forward(self, **inputs: Any) -> ModelOutput:
        """Logits of rows."""
        return self.module(**inputs)


def _most_tokens(job: EvaluateJob, model: OpenModel, device: LocalDevice) -> int:
    """Padded tokens of a pass by the formula for answers, and for each token its logits in float32 with two copies."""
    probe = device.probe()
    room = (1 - KEPT_FREE) * probe.budget(job.budget_bytes).budget_bytes - probe.usage().used_bytes
    line = PeakLine(0.0, model.shape.estimate(1).per_token)
    return max(1, min(line.tokens_that_fit(room, 1), job.most_tokens or NO_BOUND))


def evaluated(job: EvaluateJob, say: Say) -> dict[str, Any]:
    """The figures as plain values."""
    kind = device_kind(job.device)
    device: LocalDevice = CpuDevice() if kind == "cpu" else CudaDevice(0)
    say({"phase": "loading the model"})
    model = open_model(job.model, job.dtype, kind)
    place = RankPlace(0, 1, 0, "cpu" if kind == "cpu" else "cuda:0", Meeting("", "", 0, ""), "", "")
    spec = WorkerSpec(
        request=job.request, device=kind, dtype=model.dtype, num_threads=1, data_folder=job.data_folder, validation_folder=None,
        pad_token_id=job.pad_token_id, default_plan=MemoryPlan(micro_batch_rows=0), evaluation_folders={SET: job.data_folder},
    )  # fmt: skip
    with TokenDataset.open(job.data_folder) as data:
        pad = pad_token_for(model.module, job.pad_token_id)
        objective = objective_of(job.request, pad, apart=data.index.documents_apart)
        engine: Any = _Forward(model.module)
        passes = Passes(engine, data, device.torch_device, job.request.data.sequence_length, objective)
        evaluation = Evaluation(spec, place, passes, device, _most_tokens(job, model, device))
        found = evaluation.run(Evaluate(), lambda: say({"phase": "evaluating", "peak_bytes": device.probe().usage().peak_bytes}))
    if SET not in found.figures:
        raise DataError(
            "the loss of these rows is not finite", field="DATA", remedy="Look at the rows and the weights; try --dtype float32."
        )
    return found.figures[SET].model_dump(mode="json")


def _work(line: bytes, say: Say) -> dict[str, Any]:
    job = EvaluateJob.model_validate_json(line)
    try:
        return evaluated(job, say)
    except (MemoryError, RuntimeError, OSError) as exc:
        if memory_kind(exc) is None:
            raise
        raise MemoryExhausted(
            f"one row does not fit into memory ({type(exc).__name__})", field="--memory",
            value=f"{job.request.data.sequence_length:,} tokens a row",
            remedy="Give more memory, --set data.sequence_length=..., --dtype bfloat16, or a smaller model.",
        ) from exc  # fmt: skip


def main() -> None:
    """Answer the parent."""
    answer_parent(_work)


if __name__ == "__main__":
    main()
