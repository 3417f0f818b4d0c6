"""Encoders: bytes like ByT5, Hugging Face tokenizers cut into pieces without a seam, chat masks."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mem_core.domain.errors import RequestError
from mem_core.domain.request import DataSection
from mem_core.runtime.data.chat.conversation import ChatRefused
from mem_core.runtime.data.encoding.encoders import ByteEncoder, make_encoder
from mem_core.runtime.data.encoding.huggingface import HuggingFaceEncoder
from mem_core.runtime.data.encoding.tokenize_process import prepare_here
from mem_core.runtime.data.reading.pieces import pieces
from mem_core.runtime.data.reading.rows import Document
from mem_core.runtime.data.serving.dataset import TokenDataset
from mem_core.runtime.data.values import PrepareJob

MARKED = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<end>' }}{% endgeneration %}"
    "{% elif m['role'] == 'user' %}{{ m['content'] + ' ' }}{% else %}{{ raise_exception('unknown role') }}{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real byte-level BPE tokenizer with an end token and no pad token, trained on this file."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([Path(__file__).read_text()], trainer)
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", chat_template=MARKED).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def encoder(tokenizer_folder: Path) -> HuggingFaceEncoder:
    made = make_encoder(str(tokenizer_folder))
    assert isinstance(made, HuggingFaceEncoder)
    return made


@settings(deadline=None)
@given(st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="<"), max_size=40))
def test_bytes_are_what_byt5_gives(text: str) -> None:
    from transformers import ByT5Tokenizer

    (tokens,) = ByteEncoder().encode([text])
    assert tokens.tolist() == ByT5Tokenizer()(text, add_special_tokens=False).input_ids


def test_text_that_looks_like_a_special_token_stays_text() -> None:
    (tokens,) = ByteEncoder().encode(["</s>"])
    assert tokens.tolist() == [63, 50, 118, 65]


@settings(deadline=None)
@given(st.text(alphabet=st.sampled_from("ab \n\té"), max_size=200), st.integers(4, 50))
def test_pieces_joined_are_the_text(text: str, limit_chars: int) -> None:
    cut = list(pieces(text, limit_chars))
    assert "".join(cut) == text
    assert all(0 < len(piece) <= limit_chars for piece in cut)


def test_cutting_into_pieces_does_not_change_the_tokens(encoder: HuggingFaceEncoder) -> None:
    text = Path(__file__).read_text()
    (whole,) = encoder.encode([text])
    cut = np.concatenate(encoder.encode(list(pieces(text, 500))))
    assert len(list(pieces(text, 500))) > 10
    assert cut.tolist() == whole.tolist()


def test_a_missing_pad_token_is_no_obstacle(encoder: HuggingFaceEncoder) -> None:
    assert encoder.pad_token_id == encoder.eos_token_id
    assert encoder.prefix == ()


def test_chat_loss_covers_the_assistants_words_only(encoder: HuggingFaceEncoder) -> None:
    messages = [{"role": "user", "content": "two words"}, {"role": "assistant", "content": "yes"}]
    tokens, mask = encoder.encode_chat(Document(messages=messages))
    (prompt,), (answer,) = encoder.encode(["two words "]), encoder.encode(["yes<end>"])
    assert tokens.tolist() == [*prompt, *answer]
    assert mask.tolist() == [0] * prompt.size + [1] * answer.size


def test_messages_that_the_template_refuses_are_told(encoder: HuggingFaceEncoder) -> None:
    with pytest.raises(ChatRefused, match="unknown role"):
        encoder.encode_chat(Document(messages=[{"role": "wizard", "content": "hi"}]))


def test_bytes_have_no_chat_template() -> None:
    with pytest.raises(RequestError, match="no chat template"):
        ByteEncoder().encode_chat(Document(messages=[{"role": "user", "content": "hi"}]))


def test_chats_are_prepared_with_masks_and_refused_rows_named(tmp_path: Path, tokenizer_folder: Path) -> None:
    path = tmp_path / "chat.jsonl"
    good = {"messages": [{"role": "user", "content": "two words"}, {"role": "assistant", "content": "yes"}]}
    bad = {"messages": [{"role": "wizard", "content": "hi"}]}
    path.write_text(f"{json.dumps(good)}\n{json.dumps(bad)}\n")
    data = DataSection(train=(str(path),), validation=None, messages_field="messages", packing=False, on_bad_row="skip")
    job = PrepareJob(data=data, tokenizer_source=str(tokenizer_folder), vocab_size=None, cache_dir=tmp_path / "cache", parent_pid=0)
    prepared = prepare_here(job, lambda progress: None)
    assert prepared.bad_rows == (f"{path}:2: the chat template refuses the messages: unknown role",)
    assert prepared.notes[0] == f"1 bad row was skipped, first {prepared.bad_rows[0]}"
    dataset = TokenDataset.open(prepared.train_dir)
    ((tokens, mask),) = dataset.rows([0])
    assert mask is not None
    assert (tokens[-1], mask[-1]) == (prepared.eos_token_id, 1), "the end is there once and is learnt"
    assert prepared.trained_tokens == mask.sum() < tokens.size
    dataset.close()


def test_another_tokenizer_gives_another_fingerprint(tmp_path: Path, tokenizer_folder: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "some text that is long enough for a row"}\n')
    data = DataSection(train=(str(path),), validation=None)
    jobs = [
        PrepareJob(data=data, tokenizer_source=source, vocab_size=None, cache_dir=tmp_path / "cache", parent_pid=0)
        for source in ("preset:llama-nano", "preset:llama-tiny", str(tokenizer_folder))
    ]
    nano, tiny, folder = (prepare_here(job, lambda progress: None).fingerprint for job in jobs)
    assert nano == tiny != folder
