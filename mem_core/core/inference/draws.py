"""Numbers between 0 and 1 that depend on seed, row and position and on nothing else. Pure."""

import hashlib

_BITS = 52  # fewer than a double holds, so that a draw times a sum stays below the sum


def draw(seed: int, row: int, position: int) -> float:
    """Uniform in [0, 1): the same for a row's token whatever else is answered, before it or beside it."""
    digest = hashlib.blake2b(f"{seed} {row} {position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> (64 - _BITS)) / 2.0**_BITS
