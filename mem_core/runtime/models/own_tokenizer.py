"""Whether the class that transformers chose gives the ids that the model folder's own tokenizer.json stands for."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

PROBES = (
    "x 10 y 20 z 300", "Hello, world! It's 12:45.", "  two  spaces\n\nand\tlines\n", "def f(x_1):\n    return x_1 ** 2",
    "größer, naïve, Ω", "漢字仮名 and 한글 😀", "CamelCase don't WE'LL", "a" * 40,
)  # fmt: skip
_SHOWN_TOKENS = 12


def disagreement(tokenizer: Any, folder: Path, texts: Iterable[str] = PROBES) -> str:
    """The first text that the two cut differently, with both ways to cut it; empty where they agree or there is nothing to compare.

    What the class gives counts: it is what every other program that loads the folder by `AutoTokenizer` will give as well.
    """
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    if not path.is_file():
        return ""
    try:
        own = Tokenizer.from_file(str(path))
    except Exception:  # noqa: BLE001 - the library's own error has no class of its own; a file that is no tokenizer fails at loading
        return ""
    own.no_truncation()
    own.no_padding()
    for text in texts:
        by_file = own.encode(text, add_special_tokens=False)
        by_class = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        if by_file.ids != list(by_class):
            return _words(type(tokenizer).__name__, text, by_file.tokens, tokenizer.convert_ids_to_tokens(by_class))
    return ""


def _words(name: str, text: str, by_file: list[str], by_class: list[str]) -> str:
    same = next((at for at, (one, other) in enumerate(zip(by_file, by_class, strict=False)) if one != other), 0)
    shown = slice(max(0, same - 2), same + _SHOWN_TOKENS)
    cut = text if len(text) <= 40 else f"{text[:40]}..."
    return (
        f"the folder's own tokenizer.json cuts {cut!r} into {' '.join(by_file[shown])}, {name}, which transformers chooses for "
        f"this model, into {' '.join(by_class[shown])}; {name} is what counts"
    )
