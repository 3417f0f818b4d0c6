"""Long text cut before white space, by itself: nothing here knows tokens."""

import re
from collections.abc import Iterator

PIECE_CHARS = 8_192
_GAP = re.compile(r"(?<=\S)(?=\s)")


def pieces(text: str, limit_chars: int = PIECE_CHARS) -> Iterator[str]:
    """Cut text into pieces of at most `limit_chars`, before white space where the last quarter of a piece has some. Linear in the text."""
    if len(text) <= limit_chars:  # the usual case, kept quick
        if text:
            yield text
        return
    start = 0
    while len(text) - start > limit_chars:
        stop = start + limit_chars
        gaps = [gap.start() for gap in _GAP.finditer(text, stop - limit_chars // 4, stop)]
        stop = gaps[-1] if gaps and gaps[-1] > start else stop
        yield text[start:stop]
        start = stop
    if start < len(text):
        yield text[start:]
