"""What a failure says about the batch that it came at, and about what may help. Pure."""

from mem_core.domain.errors import MemError, NoProgress
from mem_core.domain.segment import NonFinite, SegmentFailure


def failed_batch(failure: SegmentFailure) -> int | None:
    """The batch that was being done, where the failure is one of doing a batch."""
    if isinstance(failure, NonFinite):
        return None if failure.what in ("weights", "loss_scale") else failure.batch_index
    return failure.evidence.batch_index if failure.evidence.phase in ("forward", "backward", "step", "first_step") else None


def rate_may_help(failure: SegmentFailure) -> bool:
    """A lower rate changes nothing about weights that are bad already, nor about a gradient that overflows at any loss scale."""
    return isinstance(failure, NonFinite) and failure.what not in ("weights", "loss_scale")


def scale_at_floor(text: str) -> MemError:
    return NoProgress(
        text,
        remedy="Train in bfloat16 (model.dtype: bfloat16), which needs no loss scale, or lower training.learning_rate; if it comes at the "
        "same batch with any rate, look for rows that are no text.",
    )
