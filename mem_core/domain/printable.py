"""Text of unknown origin as it may be shown: a terminal obeys control characters, and a request, a row or a reply may hold any."""

import re

# C0 but newline and tab, DEL, C1, and the marks that turn the direction of what follows.
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    r"""`text` with each control character written as `\u001b`: harmless on a terminal, and the same value inside of a JSON string."""
    return _OBEYED.sub(lambda found: f"\\u{ord(found.group()):04x}", text)
