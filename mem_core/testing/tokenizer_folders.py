"""Real tokenizers of every common form, trained on a few lines in milliseconds, and model folders around them."""

import json
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

TEXT = (
    "The quick brown fox jumps over the lazy dog. x 10 y 20 z 30\n",
    "  Two spaces, a tab\tand a line.\n\ndef f(x_1):\n    return x_1 ** 2 - 12345\n",
    "größer, naïve; 漢字仮名 and 한글. Don't, WE'LL, CamelCase aaaaaaaa\n",
)
END = "<end>"


def byte_level_bpe() -> Any:
    """As GPT-2: words by a regular expression, then byte-level BPE."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        TEXT * 20, trainers.BpeTrainer(vocab_size=380, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    )
    return made


def llama_2_form() -> Any:
    """As Llama-2: a mark in front of the text and for every space, no words at all, bytes where a character is unknown."""
    from tokenizers import Tokenizer, decoders, models, normalizers, trainers

    marked = [text.replace(" ", "▁") for text in TEXT]
    learned = Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=200, limit_alphabet=60, max_token_length=12, show_progress=False)
    learned.train_from_iterator(marked * 20, trainer)
    model = json.loads(learned.to_str())["model"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = [word for word in model["vocab"] if word not in names]
    vocabulary = {word: number for number, word in enumerate([*names, *words])}
    merges = [tuple(merge) if isinstance(merge, list) else tuple(merge.split(" ")) for merge in model["merges"]]
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    return made


def word_piece() -> Any:
    """Words by white space, then WordPiece: a word of over a hundred characters is one unknown token, however long it is."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))  # type: ignore[call-arg]
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.train_from_iterator(TEXT * 20, trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]", END], show_progress=False))
    return made


def unigram() -> Any:
    """As T5: a mark in front of every word, then the likeliest pieces."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    made = Tokenizer(models.Unigram())
    made.normalizer = normalizers.NFKC()
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=200, special_tokens=["<unk>", END], unk_token="<unk>", show_progress=False)
    made.train_from_iterator(TEXT * 20, trainer)
    return made


def unigram_without_words() -> Any:
    """The likeliest pieces of the whole text, which no white space divides."""
    from tokenizers import Tokenizer, models, trainers

    made = Tokenizer(models.Unigram())
    trainer = trainers.UnigramTrainer(vocab_size=200, special_tokens=["<unk>", END], unk_token="<unk>", show_progress=False)
    made.train_from_iterator(TEXT * 20, trainer)
    return made


TOKENIZERS: MappingProxyType[str, Callable[[], Any]] = MappingProxyType(
    {
        "byte-level BPE": byte_level_bpe,
        "Llama-2 form": llama_2_form,
        "WordPiece": word_piece,
        "Unigram": unigram,
        "Unigram without words": unigram_without_words,
    }
)


def tokenizer_folder(folder: Path, tokenizer: Any, model_type: str = "llama", **settings: Any) -> Path:
    """A model folder without weights around a tokenizer; `settings` go into tokenizer_config.json, an end token unless they say so."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    end = next((name for name in (END, "</s>") if tokenizer.token_to_id(name) is not None), None)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": end, **settings}))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, "vocab_size": tokenizer.get_vocab_size()}))
    return folder
