"""Markdown that holds what others wrote: no text can break out of its place, load a picture or pose as a heading. Pure."""

import re

_SPECIAL = re.compile(r"([\\`*\[\]|~])")


def inline(text: str) -> str:
    """Any text as words of one line."""
    return _SPECIAL.sub(r"\\\1", " ".join(text.split())).replace("<", "&lt;")


def code(text: str) -> str:
    """Any text in the letters of a program."""
    return f"`{' '.join(text.split()).replace('`', chr(39))}`"


def table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table. Prefect never breaks a line in one: long texts belong in `bullets`."""
    lines = [heads, tuple("---" for _ in heads), *rows]
    return "\n".join("| " + " | ".join(inline(cell) for cell in line) + " |" for line in lines)


def bullets(items: list[str]) -> str:
    """A list of lines that are Markdown already; they wrap on narrow screens."""
    return "\n".join(f"- {item}" for item in items)
