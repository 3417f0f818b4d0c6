"""Fine-tuning with few parameters: a thin front over the same machinery as the endurance flow."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from flows.context import finetune_run_name, request_of_run
from flows.endurance_flow import drive_request, finished_run
from flows.mem_flow import mem_flow
from mem_core.domain.request import RuntimeRequest
from mem_core.domain.run import RunResult
from mem_core.infrastructure.request.file import build_request

Method = Literal["full", "lora"]
EPOCHS = 3.0  # as people know it from other trainers
WARMUP_RATIO = 0.1
LEARNING_RATES: Mapping[Method, float] = {"full": 2e-5, "lora": 1e-4}
SEGMENT_STEPS = 100  # where steps are not known yet; evaluations have checkpoints of their own
STEPS, WARMUP = ("training.max_steps", "training.epochs"), ("training.warmup_steps", "training.warmup_ratio")


def finished_fine_tuning(parameters: Mapping[str, Any]) -> RunResult | None:
    """The result of a run that has already done what the parameters of `finetune` ask. Raises MemError: it cannot go on with them."""
    overrides = parameters["overrides"]
    asked = FineTuning(**{name: value for name, value in parameters.items() if name != "overrides"})
    return finished_run(request_of_run(finetune_request(asked, overrides), overrides), as_born=derived_fields(overrides))


@mem_flow(name="finetune", flow_run_name=finetune_run_name, persist_result=False, validate_parameters=True, answer=finished_fine_tuning)
def finetune(
    run_id: Annotated[
        str, Field(title="Run id", description="Name of the run; the same name again resumes it.", pattern=r"^[a-z0-9][a-z0-9-]{0,63}$")
    ],
    model: Annotated[str, Field(description="Folder or URL of a Hugging Face causal language model, or preset:NAME.", min_length=1)],
    data: Annotated[list[str] | str, Field(description="Files, folders, globs or URLs of text or rows.")] = "stdlib:",
    store: Annotated[str, Field(description="Local folder or fsspec URL that holds run folders.", min_length=1)] = "./runs",
    method: Annotated[Method, Field(description="full trains every weight; lora trains low-rank adapters.")] = "full",
    epochs: Annotated[
        float | None, Field(description="How often every row is seen; 3 where max_steps is not given either.", gt=0, le=100_000)
    ] = None,
    max_steps: Annotated[int | None, Field(description="Optimizer updates, instead of epochs.", ge=1)] = None,
    learning_rate: Annotated[float | None, Field(description="Peak learning rate; else 2e-5 (full), 1e-4 (lora).", gt=0, le=10)] = None,
    global_batch_size: Annotated[int, Field(description="Sequences per update.", ge=1, le=1_048_576)] = 8,
    sequence_length: Annotated[int, Field(description="Tokens per sequence.", ge=2, le=1_048_576)] = 512,
    text_field: Annotated[str | None, Field(description="Field of the rows that holds the text, where it has a name of its own.")] = None,
    messages_field: Annotated[str | None, Field(description="Field of the rows with chat messages.")] = None,
    prompt_field: Annotated[str | None, Field(description="Field of the rows with the prompt, which is not trained on.")] = None,
    completion_field: Annotated[str | None, Field(description="Field of the rows with the completion.")] = None,
    evaluate_every_steps: Annotated[
        int | None, Field(description="Look at held-out rows after every so many steps and keep the best checkpoint.", ge=1)
    ] = None,
    patience: Annotated[int | None, Field(description="Stop after so many evaluations without a lower loss.", ge=1)] = None,
    overrides: Annotated[dict[str, Any], Field(description="Any other value of the request by dotted name.")] = {},  # noqa: B006 - never changed
) -> Any:
    """Fine-tune a model on your data; killed or stopped, the same call goes on from the newest validated checkpoint.

    Args:
        run_id: Name of the run; the same name again resumes it.
        model: Folder or URL of a Hugging Face causal language model, or preset:NAME.
        data: Files, folders, globs or URLs of text or rows (JSONL, JSON, CSV, parquet, ...); stdlib: is Python's own library.
        store: Local folder or fsspec URL that holds run folders.
        method: full trains every weight; lora trains low-rank adapters.
        epochs: How often every row is seen; 3 where max steps are not given either.
        max_steps: Optimizer updates, instead of epochs.
        learning_rate: Peak learning rate; where it is empty 2e-5 (full) or 1e-4 (lora).
        global_batch_size: Sequences per update.
        sequence_length: Tokens per sequence.
        text_field: Field of the rows that holds the text, where it has a name of its own.
        messages_field: Field of the rows with chat messages; the assistant's words are trained.
        prompt_field: Field of the rows with the prompt, which is not trained on.
        completion_field: Field of the rows with the completion.
        evaluate_every_steps: Look at held-out rows after every so many steps and keep the best checkpoint.
        patience: Evaluations without a lower loss after which training stops.
        overrides: Any other value of the request by dotted name, such as {"model.dtype": "bfloat16"}.
    """
    asked = FineTuning(
        run_id, model, data, store, method, epochs, max_steps, learning_rate, global_batch_size, sequence_length,
        text_field=text_field, messages_field=messages_field, prompt_field=prompt_field, completion_field=completion_field,
        evaluate_every_steps=evaluate_every_steps, patience=patience,
    )  # fmt: skip
    return drive_request(request_of_run(finetune_request(asked, overrides), overrides), as_born=derived_fields(overrides))


def derived_fields(overrides: Mapping[str, Any]) -> tuple[str, ...]:
    """What `finetune_request` makes of the length of a run and decides the weights, as far as `overrides` do not say it.

    A run that goes on with more steps keeps what it was born with; otherwise every such run would be refused.
    """
    return () if any(name in overrides for name in WARMUP) else ("training.warmup_steps",)


@dataclass(frozen=True)
class FineTuning:
    """The few parameters, as the flow takes them."""

    run_id: str
    model: str
    data: Sequence[str] | str = "stdlib:"
    store: str = "./runs"
    method: Method = "full"
    epochs: float | None = None
    max_steps: int | None = None
    learning_rate: float | None = None
    global_batch_size: int = 8
    sequence_length: int = 512
    text_field: str | None = None
    messages_field: str | None = None
    prompt_field: str | None = None
    completion_field: str | None = None
    evaluate_every_steps: int | None = None
    patience: int | None = None


def finetune_request(asked: FineTuning, overrides: Collection[str] = ()) -> RuntimeRequest:
    """The request behind the few parameters. `overrides` are names of values that follow: nothing is derived beside them.

    Raises:
        RequestError: a value is out of bounds, named by its field in the request.
    """
    fields = {name: getattr(asked, name) for name in ("text_field", "messages_field", "prompt_field", "completion_field")}
    data = {"train": asked.data if isinstance(asked.data, str) else list(asked.data), "sequence_length": asked.sequence_length}
    training = {
        "learning_rate": LEARNING_RATES[asked.method] if asked.learning_rate is None else asked.learning_rate,
        "global_batch_size": asked.global_batch_size,
        **_length(asked, overrides),
    }
    every_steps = asked.evaluate_every_steps
    return build_request(
        {
            "run_id": asked.run_id,
            "store": asked.store,
            "model": {"source": asked.model, **({"lora": {}} if asked.method == "lora" else {})},
            "data": data | {name: value for name, value in fields.items() if value is not None},
            "training": training,
            "evaluation": {"every_steps": every_steps, "keep_best": every_steps is not None, "patience": asked.patience},
        }
    )


def _length(asked: FineTuning, overrides: Collection[str]) -> dict[str, Any]:
    """Steps or epochs, the checkpoints on the way (ten of them where steps are given) and the warm-up (the first tenth)."""
    length: dict[str, Any] = {}
    if asked.max_steps is not None:
        tenth = max(1, asked.max_steps // 10)
        length = {"max_steps": asked.max_steps, "segment_steps": min(1_000, tenth), "warmup_steps": min(100, tenth)}
    else:
        length = {"segment_steps": SEGMENT_STEPS, "warmup_ratio": WARMUP_RATIO}
    if asked.epochs is not None or (asked.max_steps is None and not any(name in overrides for name in STEPS)):
        length["epochs"] = EPOCHS if asked.epochs is None else asked.epochs
    if any(name in overrides for name in WARMUP):
        length = {name: value for name, value in length.items() if f"training.{name}" not in WARMUP}
    return length
