"""The frozen request surface: every name, default and bound that users hold on to, as the design states it.

The schema snapshot is regenerated on purpose only: python tests/frozen/test_request_schema.py
"""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from mem_core.domain.request import RuntimeRequest
from mem_core.infrastructure.request.errors import known_fields

SNAPSHOT = Path(__file__).with_name("request_schema.json")
# The request of the design, with every default written out.
DOCUMENTED = """
run_id: demo
schema_version: 1
store: ./runs
device: auto
model:
  source: preset:llama-nano
  dtype: auto
  activation_checkpointing: auto
  compile: auto
  lora: null
data:
  train: ["stdlib:"]
  validation: 0.01
  format: auto
  text_field: text
  sequence_length: 128
  long_documents: chunk
  packing: true
  on_bad_row: fail
training:
  max_steps: 1000000
  segment_steps: 1000
  global_batch_size: 8
  optimizer: adamw
  learning_rate: 3.0e-4
  schedule: cosine
  warmup_steps: 100
  weight_decay: 0.1
  gradient_clip_norm: 1.0
  loss_scale_initial_power: 10
  seed: 0
parallel: {num_ranks: 1, zero_stage: 1, offload_optimizer: none}
memory: {mode: adaptive, micro_batch_size: auto, budget: null, high_watermark: 0.9, low_watermark: 0.7}
checkpoint: {keep_last: 3, keep_every_steps: null, every_s: null, validation: integrity, mirror: null}
deepspeed: {}
policy: {file: null, planner: {kind: none}}
resilience: {max_failures_without_progress: 3, segment_deadline_s: auto, hang_factor: 5}
chaos: null
"""
ALSO_NAMED = (
    "data.messages_field", "data.prompt_field", "data.completion_field", "data.max_bad_rows", "training.betas", "training.eps",
    "training.schedule_steps", "training.min_lr_ratio", "policy.planner.base_url", "policy.planner.model", "policy.planner.api_key_env",
    "policy.planner.time_limit_s", "policy.planner.every_segments", "policy.approval", "chaos.seed", "chaos.every_s", "chaos.at_steps",
    "chaos.kinds", "model.lora.rank", "model.lora.alpha", "model.lora.dropout", "model.lora.target_modules",
)  # fmt: skip


def schema() -> dict[str, Any]:
    return RuntimeRequest.model_json_schema()


def leaves(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= leaves(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {prefix + key: value}
    return found


def test_every_documented_default_is_the_real_one() -> None:
    documented = leaves(yaml.safe_load(DOCUMENTED) | {"training": yaml.safe_load(DOCUMENTED)["training"] | {"learning_rate": 3e-4}})
    real = leaves(RuntimeRequest(run_id="demo").model_dump(mode="json"))
    assert {name: real[name] for name in documented} == documented


def test_every_other_documented_name_exists() -> None:
    assert set(ALSO_NAMED) <= {path for path, _ in known_fields(RuntimeRequest)}


def test_the_documented_request_is_accepted() -> None:
    assert RuntimeRequest.model_validate(yaml.safe_load(DOCUMENTED)) == RuntimeRequest(run_id="demo")


def test_every_field_has_a_description_for_the_form() -> None:
    assert [path for path, info in known_fields(RuntimeRequest) if not info.description] == []


def test_the_schema_is_the_recorded_one() -> None:
    """Fields may be added with a default; what is recorded may not change. Record additions by running this file."""
    assert schema() == json.loads(SNAPSHOT.read_text())


@pytest.mark.parametrize("dump", ["json", "python"])
def test_a_request_survives_being_stored(dump: str) -> None:
    request = RuntimeRequest.model_validate({"run_id": "a", "memory": {"budget": "6GiB"}, "chaos": {"at_steps": [1, 2]}})
    assert RuntimeRequest.model_validate(request.model_dump(mode=dump)) == request


if __name__ == "__main__":
    SNAPSHOT.write_text(json.dumps(schema(), indent=1, sort_keys=True) + "\n")
