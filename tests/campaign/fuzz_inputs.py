"""Fuzz subjects that somebody hands to MEM: requests, policies, planner replies, model folders.

Each takes (random numbers, the subject's base folder, the case's own empty folder) and gives what is to be tried.
"""

import json
import math
import random
import struct
from collections.abc import Callable
from pathlib import Path

import yaml
from law import Broken
from mutations import ODD_VALUES, PLACES, bent_bytes, bent_document, bent_json, copy_tree, put_in_place, written

from flows.commands import policy as policy_commands
from mem_core.core.policy.directive_parser import parse_directive
from mem_core.core.policy.local_policy_engine import LocalPolicyEngine
from mem_core.core.run.reconcile import reconcile
from mem_core.domain.directive import Refusal
from mem_core.domain.environment import EnvironmentReport
from mem_core.domain.request import RuntimeRequest, shown_request
from mem_core.infrastructure.machine.store import local_path
from mem_core.infrastructure.planner.http import _content as content_of_reply
from mem_core.infrastructure.request.errors import known_fields
from mem_core.infrastructure.request.file import build_request, load_request
from mem_core.infrastructure.request.policy_file import load_policy_file
from mem_core.runtime.models.folders import tokenizer_identity
from mem_core.runtime.models.numbers import read_model_numbers

FIELDS = sorted(path for path, _ in known_fields(RuntimeRequest))

# -- requests ---------------------------------------------------------------------------------------------------------------------

REQUEST = {
    "run_id": "demo", "schema_version": 1, "store": "./runs", "device": "cpu", "model": {"source": "preset:llama-nano", "dtype": "auto"},
    "data": {"train": ["stdlib:", "data/*.jsonl"], "validation": 0.01, "sequence_length": 128, "text_field": "text"},
    "training": {"max_steps": 100, "segment_steps": 10, "global_batch_size": 8, "learning_rate": 3e-4, "betas": [0.9, 0.95], "seed": 1},
    "parallel": {"num_ranks": 2, "zero_stage": 1}, "memory": {"mode": "adaptive", "micro_batch_size": "auto", "budget": "6GiB"},
    "checkpoint": {"keep_last": 3, "mirror": "s3://bucket/runs"}, "deepspeed": {"communication_data_type": "fp32", "a": {"b": [1]}},
    "policy": {"planner": {"kind": "openai", "base_url": "http://127.0.0.1:1/v1", "model": "m"}, "approval": {"required": False}},
    "resilience": {"hang_factor": 5}, "chaos": {"seed": 1, "kinds": ["kill_rank"], "at_steps": [3, 5]},
}  # fmt: skip


def a_request(draw: random.Random, base: Path, folder: Path) -> Callable[[], str]:
    """A request file and overrides, and what is done with the request before anything is looked at."""
    path = folder / "request.yaml"
    text = yaml.safe_dump(REQUEST).encode() if draw.random() < 0.5 else json.dumps(REQUEST).encode()
    how = draw.random()
    if how < 0.45:
        path.write_bytes(written(bent_json(draw, REQUEST)))
    elif how < 0.9:
        path.write_bytes(bent_bytes(draw, text))
    else:
        put_in_place(draw, path, draw.choice(PLACES), [Path("/etc/hostname")])
    overrides = [f"{draw.choice(FIELDS)}={draw.choice(ODD_VALUES)}" for _ in range(draw.choice((0, 0, 1, 2)))]

    def run() -> str:
        request = load_request(str(path), [override.replace("\0", "") for override in overrides])
        if RuntimeRequest.model_validate_json(request.model_dump_json()) != request:
            raise Broken("the request is another after it was stored")
        shown = shown_request(request)
        reconcile(shown, request)
        local_path(request.store)
        return "taken"

    return run


POLICY = {"schema_version": 1, "lanes": {"cpu": {"lr_multiplier": {"at_least": 0.1, "at_most": 0.5}}, "cuda": {}}}


def a_policy(draw: random.Random, base: Path, folder: Path) -> Callable[[], str]:
    """A file with bounds."""
    path = folder / "policy.yaml"
    text = yaml.safe_dump(POLICY).encode()
    path.write_bytes(written(bent_json(draw, POLICY)) if draw.random() < 0.6 else bent_bytes(draw, text))

    def run() -> str:
        LocalPolicyEngine(load_policy_file(path))
        return "taken"

    return run


# -- planner replies --------------------------------------------------------------------------------------------------------------

ASKED = build_request({"run_id": "demo", "device": "cpu"})
MACHINE = EnvironmentReport(
    device="cpu", device_reason="", dtype="float32", num_cores=1, threads_per_rank=1, versions={}, memory=(), findings=()
)
DIRECTIVE = {"lr_multiplier": 0.5, "gradient_clip_norm": 1.0, "loss_scale_initial_power": 9}


def a_reply(draw: random.Random, base: Path, folder: Path) -> Callable[[], str]:
    """What a planner may answer, bare and inside of a chat completion."""
    reply = written(bent_json(draw, DIRECTIVE)) if draw.random() < 0.6 else bent_bytes(draw, json.dumps(DIRECTIVE).encode())
    if draw.random() < 0.3:
        reply = draw.choice((b"```json\n%b\n```", b"I think %b is best", b"%b%b")).replace(b"%b", reply)
    envelope = {"choices": [{"message": {"content": reply.decode("utf-8", "replace")}}], "usage": {}}
    body = written(bent_json(draw, envelope)) if draw.random() < 0.5 else bent_bytes(draw, json.dumps(envelope).encode())

    def run() -> str:
        content_of_reply(body, ())
        advice = parse_directive(reply)
        decision = LocalPolicyEngine().evaluate(ASKED, policy_commands.first_plan(ASKED), MACHINE, advice)
        values = decision.applied_hyperparams.model_dump()
        if not all(isinstance(value, int | float) and math.isfinite(value) for value in values.values() if value is not None):
            raise Broken(f"{values} would reach the engine")
        if not 0 < decision.applied_hyperparams.lr_multiplier <= 1:
            raise Broken(f"a rate of {decision.applied_hyperparams.lr_multiplier} would reach the engine")
        json.loads(decision.model_dump_json())
        return "refused as a whole" if isinstance(advice, Refusal) else "taken"

    return run


# -- model folders ----------------------------------------------------------------------------------------------------------------

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 10, "hidden_size": 4, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 8, "max_position_embeddings": 64, "tie_word_embeddings": True,
    "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}, "eos_token_id": [1, 2],
}  # fmt: skip
TENSOR = {"dtype": "F32", "shape": [10, 4], "data_offsets": [0, 160]}
INDEX = {"metadata": {"total_size": 160}, "weight_map": {"model.embed_tokens.weight": "model-1.safetensors"}}
TOKENIZER = {"model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 2, "content": "c"}]}


def model_base(folder: Path) -> None:
    """Two small models: one file, and shards named by an index."""
    header = json.dumps({"__metadata__": {"format": "pt"}, "model.embed_tokens.weight": TENSOR}).encode()
    weights = struct.pack("<Q", len(header)) + header + bytes(160)
    for name, files in (("single", {"model.safetensors": weights}), ("sharded", {"model-1.safetensors": weights})):
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(json.dumps(CONFIG))
        (folder / name / "tokenizer.json").write_text(json.dumps(TOKENIZER))
        (folder / name / "tokenizer_config.json").write_text('{"chat_template": "x"}')
        for file, content in files.items():
            (folder / name / file).write_bytes(content)
    (folder / "sharded" / "model.safetensors.index.json").write_text(json.dumps(INDEX))


def a_model(draw: random.Random, base: Path, folder: Path) -> Callable[[], str]:
    """One or two files of a model folder, damaged."""
    model = folder / "model"
    copy_tree(base / draw.choice(("single", "sharded")), model)
    for path in draw.sample(sorted(model.iterdir()), draw.choice((1, 1, 2))):
        damage(draw, path, folder)

    def run() -> str:
        tokenizer_identity(str(model))
        read_model_numbers(str(model)).model_dump_json()
        return "taken"

    return run


def damage(draw: random.Random, path: Path, folder: Path) -> None:
    """Bend a file, put something else in its place, or take it away. Links lead to files below `folder`."""
    content = path.read_bytes()
    if draw.random() < 0.1:
        put_in_place(draw, path, draw.choice(PLACES), [item for item in folder.rglob("*") if item.is_file()])
    elif path.suffix == ".safetensors" and draw.random() < 0.6:
        length = int.from_bytes(content[:8], "little")
        header = bent_document(draw, content[8 : 8 + length])
        path.write_bytes(struct.pack("<Q", len(header)) + header + content[8 + length :])
    elif draw.random() < 0.05:
        path.unlink()
    else:
        path.write_bytes(bent_document(draw, content) if path.suffix == ".json" else bent_bytes(draw, content))
