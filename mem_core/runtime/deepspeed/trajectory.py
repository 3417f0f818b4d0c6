"""The running digest that shows whether two runs are the same run: one SHA-256 chained over every step."""

import hashlib
import struct

Split = tuple[tuple[tuple[int, ...], ...], ...]


def chain_step(previous_digest: str, batch_index: int, split: Split, loss: float, grad_norm: float | None) -> str:
    """Digest after one more step.

    Chains (batch index, split, bits of the loss, bits of the gradient norm where there is one). `split` is per rank, per
    micro-batch, positions in the global batch. Cutting a run into other segments does not change it.
    """
    digest = hashlib.sha256(previous_digest.encode())
    digest.update(struct.pack("<qd", batch_index, loss))
    digest.update(b"-" if grad_norm is None else struct.pack("<d", grad_norm))
    digest.update(repr(split).encode())
    return digest.hexdigest()
