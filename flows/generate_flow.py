"""Answers to a file of prompts as a deployment: each row once; a flow run that is retried goes on where the last one was killed."""

from typing import Annotated, Any

from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger
from pydantic import Field

from flows.commands.inference.generate import answered, first_answers
from flows.context import is_deployed
from flows.flow_request import refuse_relative_store
from flows.mem_flow import mem_flow
from flows.prefect_view.counted import shown_counted
from flows.prefect_view.markdown import inline, table
from mem_core.domain.errors import RequestError
from mem_core.domain.printable import printable
from mem_core.domain.results.generation import GenerationResult, InferenceDevice
from mem_core.infrastructure.machine.process_facts import refuse_lost_working_folder
from mem_core.infrastructure.settings import Settings

SHOWN_ROWS = 10


@mem_flow(name="generate", flow_run_name="generate-{output}", persist_result=False, validate_parameters=True)
def generate(
    model: Annotated[str, Field(min_length=1)],
    prompts: Annotated[str, Field(min_length=1)],
    output: Annotated[str, Field(min_length=1)],
    store: str = "./runs",
    max_new_tokens: Annotated[int, Field(ge=1, le=1_048_576)] = 128,
    temperature: Annotated[float, Field(ge=0, le=100)] = 0.0,
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0,
    seed: Annotated[int, Field(ge=0)] = 0,
    batch_rows: Annotated[int, Field(ge=1, le=4096)] = 64,
    device: InferenceDevice = "auto",
) -> Any:
    """Answer every row of a file of prompts exactly once; the same parameters again go on, or find the finished file.

    Args:
        model: Model or adapter folder, URL, or preset:NAME; or RUN, RUN@best, RUN@STEP of the store.
        prompts: JSONL with a prompt or chat messages a row.
        output: JSONL that gets each row with its answer, in the same order. It appears whole.
        store: Local folder that holds run folders.
        max_new_tokens: Tokens of an answer at most.
        temperature: 0 takes the likeliest token.
        top_p: Draw among the likeliest tokens that together have this share.
        seed: What the draws are made from, with row and position.
        batch_rows: Rows that are answered together, at most.
        device: auto takes a CUDA device where there is one.
    """
    refuse_lost_working_folder()
    if is_deployed():
        refuse_relative_store(store)
        refuse_relative(prompts=prompts, output=output)
    options = {
        "prompts": prompts, "output": output, "max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p, "seed": seed,
        "batch_rows": batch_rows, "device": device,
    }  # fmt: skip
    result = GenerationResult.model_validate(answer_prompts(model, store, options))
    get_run_logger().info(printable(result.words()))
    create_markdown_artifact(page(result), key="mem-generate", description=f"{result.rows:,} answers")
    return result.model_dump(mode="json")


@task(name="answer-prompts", cache_policy=NO_CACHE, persist_result=False, retries=0)
def answer_prompts(model: str, store: str, options: dict[str, Any]) -> dict[str, Any]:
    """The result as plain values. Safe to be done again: what is answered stays, and deaths of its process are bounded.

    Raises:
        MemError: see `mem_core.runtime.inference.supervise.generate`.
    """
    with shown_counted("generate") as progress:
        return answered(model, store, options, Settings.from_environment(), progress).model_dump(mode="json")


def page(result: GenerationResult) -> str:
    """What the artifact shows: the counts, and the first rows with their answers."""
    shown = [(f"{number:,}", prompt, answer, ended) for number, prompt, answer, ended in first_answers(result, SHOWN_ROWS)]
    return f"# Answers\n\n{inline(result.words())}\n\n{table(('row', 'prompt', 'answer', 'ended'), shown)}\n"


def refuse_relative(**paths: str) -> None:
    """Raises RequestError: one of them is neither absolute nor below the home folder."""
    for field, path in paths.items():
        if not path.removeprefix("file://").startswith(("/", "~")):
            raise RequestError(
                "a relative path means another file on each worker, so a deployment refuses it", field=field, value=path,
                bound="an absolute path or ~/...", remedy="Give the whole path.",
            )  # fmt: skip
