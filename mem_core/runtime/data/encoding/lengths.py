"""Rows with an answer that are longer than a sequence: the prompt gives way, from its beginning. Pure."""

import numpy as np
from numpy.typing import NDArray


def cut_prompt(
    tokens: NDArray[np.uint32], mask: NDArray[np.uint8], answer_start: int, prefix: int, limit: int
) -> tuple[NDArray[np.uint32], NDArray[np.uint8]]:
    """Tokens and mask, shapes [tokens], with as much of the prompt's beginning left out as the row is too long.

    The prompt is tokens[:answer_start], of which the first `prefix` stay in any case. Where the answer alone fills a sequence, half of
    one is left to the prompt, and the answer goes over into further rows or is cut at its end.
    """
    answer = tokens.size - answer_start
    room = limit - answer if answer < limit else limit // 2
    drop = max(0, answer_start - room)
    if not drop:
        return tokens, mask
    prefix = min(prefix, room)
    return np.delete(tokens, slice(prefix, prefix + drop)), np.delete(mask, slice(prefix, prefix + drop))


def last_answer_start(mask: NDArray[np.uint8]) -> int:
    """Where the last stretch of tokens that count begins; 0 where none does."""
    counted = np.flatnonzero(mask)
    if not counted.size:
        return 0
    breaks = np.flatnonzero(np.diff(counted) > 1)
    return int(counted[breaks[-1] + 1] if breaks.size else counted[0])
