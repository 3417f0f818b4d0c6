"""Fine-tuning with few parameters: a thin front over the same machinery as the endurance flow."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from flows.context import finetune_run_name, request_of_run
from flows.endurance_flow import drive_request
from flows.mem_flow import mem_flow
from mem_core.domain.request import RuntimeRequest
from mem_core.infrastructure.request.file import build_request


@mem_flow(name="finetune", flow_run_name=finetune_run_name, persist_result=False, validate_parameters=True)
def finetune(
    run_id: Annotated[str, Field(title="Run id", description="Name of the run; the same name again resumes it.")],
    model: Annotated[
        str, Field(description="Folder or URL of a Hugging Face causal language model, or preset:NAME.")
    ] = "preset:llama-nano",
    data: Annotated[list[str] | str, Field(description="Files, globs or URLs with text or JSONL.")] = "stdlib:",
    store: Annotated[str, Field(description="Local folder or fsspec URL that holds run folders.")] = "./runs",
    max_steps: Annotated[int, Field(description="Optimizer updates.", ge=1)] = 1_000,
    learning_rate: Annotated[float, Field(description="Peak learning rate.", gt=0)] = 2e-5,
    global_batch_size: Annotated[int, Field(description="Sequences per update.", ge=1)] = 8,
    sequence_length: Annotated[int, Field(description="Tokens per sequence.", ge=2)] = 512,
    overrides: Annotated[dict[str, Any], Field(description="Any other value of the request by dotted name.")] = {},  # noqa: B006 - never changed
) -> Any:
    """Fine-tune a model on your data; killed or stopped, the same call goes on from the newest validated checkpoint.

    Args:
        run_id: Name of the run; the same name again resumes it.
        model: Folder or URL of a Hugging Face causal language model, or preset:NAME.
        data: Files, globs or URLs with text or JSONL.
        store: Local folder or fsspec URL that holds run folders.
        max_steps: Optimizer updates.
        learning_rate: Peak learning rate.
        global_batch_size: Sequences per update.
        sequence_length: Tokens per sequence.
        overrides: Any other value of the request by dotted name, such as {"model.dtype": "bfloat16"}.
    """
    request = finetune_request(
        run_id=run_id, model=model, data=data, store=store, max_steps=max_steps, learning_rate=learning_rate,
        global_batch_size=global_batch_size, sequence_length=sequence_length,
    )  # fmt: skip
    return drive_request(request_of_run(request, overrides), as_born=derived_fields(overrides))


DERIVED = ("training.warmup_steps",)


def derived_fields(overrides: Mapping[str, Any]) -> tuple[str, ...]:
    """What `finetune_request` makes of `max_steps` and decides the weights, as far as `overrides` do not say it.

    A run that goes on with more steps keeps what it was born with; otherwise every such run would be refused.
    """
    return tuple(name for name in DERIVED if name not in overrides)


def finetune_request(
    *,
    run_id: str,
    model: str,
    data: Sequence[str] | str,
    store: str,
    max_steps: int,
    learning_rate: float,
    global_batch_size: int,
    sequence_length: int,
) -> RuntimeRequest:
    """The request behind the few parameters: ten checkpoints per run, warm-up over the first tenth.

    Raises:
        RequestError: a value is out of bounds, named by its field in the request.
    """
    tenth = max(1, max_steps // 10)
    return build_request(
        {
            "run_id": run_id,
            "store": store,
            "model": {"source": model},
            "data": {"train": data if isinstance(data, str) else list(data), "sequence_length": sequence_length},
            "training": {
                "max_steps": max_steps,
                "segment_steps": min(1_000, tenth),
                "warmup_steps": min(100, tenth),
                "learning_rate": learning_rate,
                "global_batch_size": global_batch_size,
            },
        }
    )
