"""The learning rate as a pure function of the batch index (I2): the same in one segment or a thousand, after any resume."""

import math

from mem_core.domain.request import TrainingSection


def learning_rate(training: TrainingSection, batch_index: int) -> float:
    """Base learning rate of batch `batch_index` (0-based), before the policy's multiplier.

    Linear warm-up over `warmup_steps`, then constant, linear or cosine decay to `min_lr_ratio` at `schedule_steps`
    (cosine: Loshchilov & Hutter 2017, eq. 5, without restarts). Past the horizon it stays at the floor.
    """
    peak = training.learning_rate
    if batch_index < training.warmup_steps:
        return peak * (batch_index + 1) / training.warmup_steps
    horizon = training.schedule_steps or training.max_steps
    decay_steps = max(1, horizon - training.warmup_steps)
    progress = min(1.0, (batch_index - training.warmup_steps) / decay_steps)
    match training.schedule:
        case "constant":
            factor = 1.0
        case "linear":
            factor = 1.0 - progress
        case "cosine":
            factor = 0.5 * (1.0 + math.cos(math.pi * progress))
    return peak * (training.min_lr_ratio + (1.0 - training.min_lr_ratio) * factor)
