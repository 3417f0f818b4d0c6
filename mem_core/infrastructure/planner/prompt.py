"""The words an outside planner gets. They ask; nothing here is trusted to make it obey."""

import json
from typing import Any

from mem_core.domain.advice import TelemetrySummary

SYSTEM_PROMPT = """You watch the training of a language model and may suggest hyper-parameters for its next segment.
Reply with exactly one JSON object and nothing else. Known keys, all optional:
  lr_multiplier             number: multiplies the base learning-rate schedule (it does not add up over segments)
  gradient_clip_norm        number: global gradient norm above which gradients are scaled down
  loss_scale_initial_power  integer: log2 of the first loss scale, float16 only; no effect once training has begun
An absent key keeps the request's own value; {} changes nothing. Values outside the bounds are clamped.
Any other key, text in place of a number, or more than one object makes the whole reply void."""


def chat_request(model: str, summary: TelemetrySummary) -> dict[str, Any]:
    """The body of a chat completion request, the same for the same summary."""
    seen = json.dumps(summary.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
    return {
        "model": model,
        "messages": [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": f"Telemetry, one number per segment, oldest first:\n{seen}"},
        ],
        "temperature": 0,
        "max_tokens": 200,
        "stream": False,
    }
