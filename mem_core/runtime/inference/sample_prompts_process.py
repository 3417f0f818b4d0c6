"""The encoding process: `python -m mem_core.runtime.inference.sample_prompts_process`, one SampleJob as a JSON line on standard input.

Tokenizers need transformers, which the caller's process must not import.
"""

from typing import Any

from mem_core.domain.errors import MemError
from mem_core.runtime.data.child import Say, answer_parent
from mem_core.runtime.data.encoding.huggingface import usable
from mem_core.runtime.inference.prompt_encoder import PromptEncoder, checked
from mem_core.runtime.inference.sample_prompts import SampleJob, asked_prompts, encoded, of_the_request, refuse_too_many
from mem_core.runtime.models.build import load_tokenizer


def work(line: bytes, say: Say) -> list[dict[str, Any]]:
    """The prompts of a SampleJob with their ids, as plain values.

    Raises:
        MemError: they cannot be answered, in the request's own words.
    """
    del say
    job = SampleJob.model_validate_json(line)
    tokenizer = load_tokenizer(job.source)
    with usable():
        encoder = PromptEncoder(tokenizer)
    try:
        prompts = list(asked_prompts(job.prompts))
        refuse_too_many(prompts, job)
        tokens = list(encoder.prompts(prompts))
        checked(tokens, job.new_tokens, job.max_positions, job.vocab_size)
    except MemError as exc:
        raise exc if exc.field == "evaluation.prompts" else of_the_request(exc, job) from exc
    return [prompt.model_dump(mode="json") for prompt in encoded(prompts, tokens)]


def main() -> None:
    """Answer the parent."""
    answer_parent(work)


if __name__ == "__main__":
    main()
