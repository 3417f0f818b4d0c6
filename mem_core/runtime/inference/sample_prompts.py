"""The prompts that a run answers while it trains: read, encoded and checked before anything starts, in a process of their own.

The owner's side imports nothing heavy. What is wrong with a prompt is said with the request's own field.
"""

import json
import os
import time
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

from mem_core.domain.errors import DataError, EnvironmentUnfit, MemError, RequestError
from mem_core.domain.request import RuntimeRequest
from mem_core.domain.results.samples import MOST_PROMPTS, EncodedPrompt, SampleOrder
from mem_core.domain.units import Value
from mem_core.infrastructure.storage.reading import local_name
from mem_core.runtime.data.child import NoAnswer, ask_child
from mem_core.runtime.data.encoding.joining import Tokens
from mem_core.runtime.data.reading.messages import standard_messages
from mem_core.runtime.data.reading.refused import FileRefused, RowRefused
from mem_core.runtime.inference.prompt_rows import Prompt, PromptRows, chat_prompt
from mem_core.runtime.models.encoding import encoding_of
from mem_core.runtime.models.facts import describe_model
from mem_core.runtime.models.folders import at_hand

FIELD = "evaluation.prompts"
PROGRAM = "mem_core.runtime.inference.sample_prompts_process"
LIMIT_S = 120.0
REMEMBERED_S = 300.0
REMEDY = "Give texts, chats whose last message is not the assistant's, or a JSONL file with text, prompt or messages in each row."
Ask = Callable[..., Any]
Asked = tuple[str | tuple[dict[str, Any], ...], ...] | str
"""As `evaluation.prompts` holds them."""


class SampleJob(Value):
    """What the encoding process is asked: `source` is a preset or a local folder."""

    source: str
    prompts: Asked
    new_tokens: int
    max_positions: int | None
    vocab_size: int
    parent_pid: int


def sample_order(request: RuntimeRequest, cache_dir: Path, ask: Ask = ask_child) -> SampleOrder | None:
    """What is answered at each of its steps; None where the request has no prompts. Changes nothing.

    Raises:
        RequestError, DataError: the prompts cannot be answered, by row, value and bound. EnvironmentUnfit: nobody could tell.
    """
    section = request.evaluation
    if section.prompts is None:
        return None
    source, facts = at_hand(request.model.source, cache_dir), describe_model(request.model.source, cache_dir)
    job = SampleJob(
        source=source, prompts=section.prompts, new_tokens=section.sample_tokens, max_positions=facts.max_positions,
        vocab_size=facts.vocab_size, parent_pid=os.getpid(),
    )  # fmt: skip
    found = json.loads(_told(ask, job.model_dump_json(), _stamp(job), int(time.monotonic() // REMEMBERED_S)))
    return SampleOrder(
        source=source, prompts=tuple(EncodedPrompt.model_validate(each) for each in found), max_new_tokens=section.sample_tokens,
        temperature=section.sample_temperature, seed=request.training.seed,
    )  # fmt: skip


def prompt_problems(request: RuntimeRequest, cache_dir: Path) -> tuple[MemError, ...]:
    """Why the prompts could not be answered, for the doctor. A model that is not there is for others to say."""
    try:
        sample_order(request, cache_dir)
    except MemError as exc:
        return (exc,) if exc.field == FIELD else ()
    return ()


def asked_prompts(prompts: Asked) -> Iterable[Prompt]:
    """Each prompt in order, however the request names them.

    Raises:
        DataError, RequestError: there is no such file, a row asks nothing, or a chat is none.
    """
    if not isinstance(prompts, str):
        return [_inline(prompt, number) for number, prompt in enumerate(prompts, start=1)]
    return PromptRows(Path(local_name(prompts)), adds=False).prompts()


def _inline(prompt: str | tuple[dict[str, Any], ...], number: int) -> Prompt:
    if isinstance(prompt, str):
        return Prompt(prompt)
    try:
        return chat_prompt(standard_messages(list(prompt)), {}, "the chat", number)
    except (RowRefused, FileRefused) as exc:
        raise DataError(f"prompt {number}: {exc}", field=FIELD, remedy=REMEDY) from exc


def shown(prompt: Prompt) -> str:
    """As people see it: the text, or the chat with who says what."""
    if not prompt.messages:
        return prompt.text
    return "\n".join(f"{message['role']}: {_words(message.get('content'))}" for message in prompt.messages)


def _words(content: Any) -> str:
    if isinstance(content, list):
        return "".join(part if isinstance(part, str) else str(part.get("text", "")) for part in content)
    return "" if content is None else str(content)


def encoded(prompts: list[Prompt], tokens: Iterable[Tokens]) -> list[EncodedPrompt]:
    """Prompts with their ids."""
    return [EncodedPrompt(shown=shown(prompt), tokens=tuple(ids.tolist())) for prompt, ids in zip(prompts, tokens, strict=True)]


def of_the_request(exc: MemError, job: SampleJob) -> MemError:
    """The same error with the request's field in the place of a flag of `mem generate`."""
    long = "more than" in exc.problem
    remedy = "Shorten these rows or leave them out, or lower evaluation.sample_tokens." if long else REMEDY
    where = job.prompts if isinstance(job.prompts, str) else exc.value
    kind = type(exc) if isinstance(exc, DataError | RequestError) else DataError
    return kind(exc.problem, field=FIELD, value=where, bound=exc.bound, remedy=remedy)


def refuse_too_many(prompts: list[Prompt], job: SampleJob) -> None:
    """Raises DataError: none, or more than are answered at each evaluation."""
    if not 0 < len(prompts) <= MOST_PROMPTS:
        raise DataError(
            f"the file has {len(prompts):,} prompts", field=FIELD, value=job.prompts, bound=f"1 to {MOST_PROMPTS}",
            remedy="Leave some out: mem generate answers files of any length.",
        )  # fmt: skip


def _stamp(job: SampleJob) -> str:
    """What beside the job decides the ids: the tokenizer's files and the file of prompts."""
    identity: list[Any] = [encoding_of(job.source, chat=True)]
    if isinstance(job.prompts, str):
        try:
            found = os.stat(local_name(job.prompts))
        except OSError as exc:
            raise DataError(
                f"the prompts cannot be read: {exc.strerror}", field=FIELD, value=job.prompts,
                remedy="A text alone is the path of a file of prompt rows; give prompts themselves as a list: [\"...\"].",
            ) from exc  # fmt: skip
        identity += [found.st_mtime_ns, found.st_size]
    return json.dumps(identity)


@lru_cache(maxsize=4)
def _told(ask: Ask, job: str, stamp: str, period: int) -> str:
    """A start asks twice within seconds, before and inside the flow, and a run once more."""
    del stamp, period
    try:
        return json.dumps(ask(PROGRAM, job, limit_s=LIMIT_S))
    except NoAnswer as exc:
        raise EnvironmentUnfit(
            f"the tokenizer did not answer within {LIMIT_S:.0f} s, so that no prompt could be encoded", field=FIELD,
            remedy="See whether the machine is overloaded, or leave evaluation.prompts out.",
        ) from exc  # fmt: skip
