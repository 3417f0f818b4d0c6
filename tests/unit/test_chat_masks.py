"""What is trained of a chat: exactly the assistant's words and its end-of-turn token, for templates of every common form."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mem_core.domain.request import DataSection
from mem_core.runtime.data.chat.conversation import ChatRefused, Conversation
from mem_core.runtime.data.encoding.huggingface import HuggingFaceEncoder
from mem_core.runtime.data.reading.rows import Document
from mem_core.testing.chat_families import FAMILIES, family_folder

CHATS = DataSection(messages_field="messages")
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}{{ m['content'] + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}"
)
TURNS = (
    ("user", "What is 2 + 2?"), ("assistant", "It is 4."), ("user", "And the fox?"),
    ("assistant", "The quick brown fox\njumps over the lazy dog."),
)  # fmt: skip


def says(*turns: tuple[str, Any], **more: Any) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} | more for role, content in turns]


def encoder(tmp_path: Path, name: str, template: str | None = None) -> HuggingFaceEncoder:
    return HuggingFaceEncoder.of_folder(str(family_folder(tmp_path / name.replace(" ", "-"), name, template)), 3)


def pieces(made: HuggingFaceEncoder, chat: Conversation) -> list[str]:
    """The text of each stretch that is trained."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], chat.mask.astype(np.int8), [0]]))).reshape(-1, 2)
    return [made._tokenizer.decode(chat.tokens[start:stop]) for start, stop in edges]


def check_whole(made: HuggingFaceEncoder, chat: Conversation, messages: list[dict[str, Any]], **options: Any) -> None:
    whole = made._tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **options)["input_ids"]
    assert chat.tokens.tolist() == whole


@pytest.mark.parametrize("name", FAMILIES)
def test_the_assistant_s_words_and_their_end_are_trained_and_nothing_else(name: str, tmp_path: Path) -> None:
    made, family = encoder(tmp_path, name), FAMILIES[name]
    for turns in (TURNS[:2], TURNS, TURNS[:3]):
        messages = says(*((("system", "Be brief."),) if family.system else ()), *turns)
        chat = made.encode_turns(Document(messages=messages), CHATS)
        check_whole(made, chat, messages)
        words = [content for role, content in turns if role == "assistant"]
        assert [piece.strip() for piece in pieces(made, chat)] == [piece.strip() for piece in (  # a Llama-2 form has a space on either side
            f"{said} {family.end}" if name == "Llama 2" else said + family.end for said in words
        )]  # fmt: skip
        assert chat.ends_answers
        assert chat.tokens[chat.mask != 0][-1] == made._tokenizer.convert_tokens_to_ids(family.end)


@pytest.mark.parametrize("name", FAMILIES)
def test_an_answer_that_is_not_to_be_trained_is_not(name: str, tmp_path: Path) -> None:
    made, family = encoder(tmp_path, name), FAMILIES[name]
    messages = says(*TURNS)
    messages[1]["train"] = False
    chat = made.encode_turns(Document(messages=messages), CHATS)
    check_whole(made, chat, says(*TURNS))
    (only,) = pieces(made, chat)
    assert only.replace(" ", "") == (TURNS[3][1] + family.end).replace(" ", "")
    messages[1].pop("train")
    messages[3]["weight"] = 0
    (only,) = pieces(made, made.encode_turns(Document(messages=messages), CHATS))
    assert only.replace(" ", "") == (TURNS[1][1] + family.end).replace(" ", "")


def test_a_template_that_marks_the_words_is_believed(tmp_path: Path) -> None:
    made = encoder(tmp_path, "ChatML", MARKED)
    messages = says(*TURNS)
    assert pieces(made, made.encode_turns(Document(messages=messages), CHATS)) == ["It is 4.<|im_end|>", f"{TURNS[3][1]}<|im_end|>"]
    messages[1]["train"] = False
    assert pieces(made, made.encode_turns(Document(messages=messages), CHATS)) == [f"{TURNS[3][1]}<|im_end|>"]


def test_words_that_end_like_a_turn_do_not_end_it(tmp_path: Path) -> None:
    made = encoder(tmp_path, "ChatML")
    messages = says(("user", "say it"), ("assistant", "It is <|im_end|>"), ("user", "x"), ("assistant", "<|im_end|>"))
    assert pieces(made, made.encode_turns(Document(messages=messages), CHATS)) == ["It is <|im_end|><|im_end|>", "<|im_end|><|im_end|>"]


def test_calls_and_tools_are_part_of_the_conversation(tmp_path: Path) -> None:
    made = encoder(tmp_path, "ChatML")
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    messages = [
        *says(("user", "2 + 2?")),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        *says(("tool", "4"), ("assistant", "4.")),
    ]
    chat = made.encode_turns(Document(messages=messages, tools=tools), CHATS)
    check_whole(made, chat, messages, tools=tools)
    assert pieces(made, chat) == ['<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call><|im_end|>', "4.<|im_end|>"]
    written = {"type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    messages[1] = {"role": "assistant", "content": None, "tool_calls": [written]}
    again = made.encode_turns(Document(messages=messages, tools=tools), CHATS)
    assert again.tokens.tolist() == chat.tokens.tolist(), "arguments as text are not escaped a second time"


def test_what_a_template_leaves_out_is_refused(tmp_path: Path) -> None:
    """Trained without them, the model would learn other things than the row says."""
    made = encoder(tmp_path, "Zephyr")
    with pytest.raises(ChatRefused, match="leaves out the tools"):
        made.encode_turns(Document(messages=says(*TURNS), tools=[{"name": "add"}]), CHATS)
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
    with pytest.raises(ChatRefused, match="leaves out the call of 'add' in message 1"):
        made.encode_turns(Document(messages=[*says(("user", "x")), call]), CHATS)
    thinking = says(("user", "x"), ("assistant", "<think>hm</think>It is 4."))
    with pytest.raises(ChatRefused, match="message 1: the template leaves out or changes some of its words"):
        encoder(tmp_path, "DeepSeek").encode_turns(Document(messages=thinking), CHATS)


OLD_THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' and loop.last %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MOVED_SYSTEM = (
    "{% set system = messages[0]['content'] %}{% for m in messages[1:] %}{% if m['role'] == 'user' %}{{ '[INST] ' }}"
    "{% if loop.index0 >= (messages | length) - 3 %}{{ system + '\n' }}{% endif %}{{ m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(("name", "template"), [("ChatML", OLD_THINKING), ("Mistral", MOVED_SYSTEM)])
def test_a_turn_that_is_rendered_otherwise_within_the_whole_is_refused_with_the_way_out(name: str, template: str, tmp_path: Path) -> None:
    made = encoder(tmp_path, name, template)
    messages = says(("system", "Be brief."), *TURNS)
    with pytest.raises(ChatRefused, match="cannot be told apart in message 2") as caught:
        made.encode_turns(Document(messages=messages), CHATS)
    assert "data.assistant_only to false" in caught.value.hint
    messages[2]["train"] = False
    chat = made.encode_turns(Document(messages=messages), CHATS)
    assert pieces(made, chat)[0].strip().endswith(TURNS[3][1] + FAMILIES[name].end)
    everything = made.encode_turns(
        Document(messages=says(("system", "Be brief."), *TURNS)), CHATS.model_copy(update={"assistant_only": False})
    )
    assert everything.mask.all()


def test_prompts_and_completions_as_messages(tmp_path: Path) -> None:
    made = encoder(tmp_path, "Llama 3")
    document = Document(messages=says(*TURNS), num_prompt_messages=3)
    pairs = DataSection(prompt_field="prompt", completion_field="completion")
    assert pieces(made, made.encode_turns(document, pairs)) == [f"{TURNS[3][1]}<|eot_id|>"]
    both = pairs.model_copy(update={"completion_only": False})
    assert len(pieces(made, made.encode_turns(document, both))) == 2
    all_of_it = pairs.model_copy(update={"assistant_only": False})
    assert pieces(made, made.encode_turns(document, all_of_it)) == [f"{TURNS[3][1]}<|eot_id|>"]
    assert made.encode_turns(document, all_of_it.model_copy(update={"completion_only": False})).mask.all()


def test_parts_of_text_are_one_text(tmp_path: Path) -> None:
    made = encoder(tmp_path, "ChatML")
    parts = says(("user", [{"type": "text", "text": "What is "}, {"type": "text", "text": "2 + 2?"}]), TURNS[1])
    assert made.encode_turns(Document(messages=parts), CHATS).tokens.tolist() == made.encode_turns(
        Document(messages=says(*TURNS[:2])), CHATS
    ).tokens.tolist()  # fmt: skip


def test_a_template_without_a_prompt_of_its_own_keeps_its_headers_untrained(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + eos_token + '\n' }}{% endfor %}"
    made = encoder(tmp_path, "Zephyr", template)
    messages = says(*TURNS)
    assert [piece.strip() for piece in pieces(made, made.encode_turns(Document(messages=messages), CHATS))] == [
        "It is 4.</s>", f"{TURNS[3][1]}</s>",
    ]  # fmt: skip
    assert pieces(made, made.encode_turns(Document(messages=says(("assistant", "Hi."))), CHATS))[0].strip() == "Hi.</s>"


def test_an_answer_without_an_end_is_told(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m['role'] | upper + ': ' + m['content'] + '\n' }}{% endfor %}"
    chat = encoder(tmp_path, "Zephyr", template).encode_turns(Document(messages=says(*TURNS)), CHATS)
    assert not chat.ends_answers
