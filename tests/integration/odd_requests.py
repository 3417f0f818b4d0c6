"""Odd requests, each with the one answer that the doctor and training must both give: a table of data.

A case makes its own files below a folder and returns the request's values. `code` is the exit code (0: trains), `words` stand in both
answers, in the doctor's findings where it trains.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Values = dict[str, Any]
Make = Callable[[Path], Values]
Edit = Callable[[Path], object]
PAIRS = {"prompt_field": "prompt", "completion_field": "completion"}
TINY: Values = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "head_dim": 16, "vocab_size": 384, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


@dataclass(frozen=True)
class Odd:
    """One odd request. `environ` is what the environment says beside the usual. `spoil` is given the folder of a run of the same id
    that was trained before, with a learning rate of its own; None where there was no such run."""

    name: str
    make: Make
    code: int
    words: str = ""
    environ: Callable[[Path], dict[str, str]] = lambda folder: {}
    spoil: Edit | None = None


def of(**sections: Any) -> Make:
    """The same values wherever it is tried."""
    return lambda folder: dict(sections)


def jsonl(*values: object) -> str:
    """JSON lines."""
    return "".join(json.dumps(value) + "\n" for value in values)


EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
GOOD = jsonl(*[{"text": "some text to train on " * 4}] * 12)
LONG_PROMPTS = jsonl(*[{"prompt": "p" * 500, "completion": "c"}] * 8)
NO_ANSWERS = jsonl(*[{"prompt": "p", "completion": ""}] * 8)


def rows(text: str | bytes, name: str = "a.jsonl", **data: Any) -> Make:
    """A data file of this content."""

    def make(folder: Path) -> Values:
        (folder / name).write_bytes(text.encode() if isinstance(text, str) else text)
        return {"data": {"train": [str(folder / name)], **data}}

    return make


def with_file(name: str, text: str, values: Callable[[str], Values]) -> Make:
    """A file beside the request, whose path stands in it."""

    def make(folder: Path) -> Values:
        (folder / name).write_text(text)
        return values(str(folder / name))

    return make


def policy(text: str) -> Make:
    """A policy file."""
    return with_file("policy.yaml", text, lambda path: {"policy": {"file": path}})


def planner(**section: Any) -> Make:
    """An endpoint as planner."""
    return of(policy={"planner": {"kind": "openai", "model": "m", **section}})


def model_folder(edit: Edit = lambda folder: None, architecture: str = "Llama", tokenizer: str = "byte_level_bpe", **config: Any) -> Make:
    """A tiny model folder of real files, changed by `edit`. `tokenizer`: one of `tokenizer_folders`, empty for none."""

    def make(folder: Path) -> Values:
        import torch
        import transformers

        from mem_core.testing import tokenizer_folders

        made = folder / "model"
        if tokenizer:
            tokenizer_folders.tokenizer_folder(made, getattr(tokenizer_folders, tokenizer)())
        torch.manual_seed(0)
        settings = getattr(transformers, f"{architecture}Config")(**{**TINY, **config})
        transformers.AutoModelForCausalLM.from_config(settings).save_pretrained(made)
        edit(made)
        (folder / "a.jsonl").write_text(GOOD)
        return {"model": {"source": str(made)}, "data": {"train": [str(folder / "a.jsonl")]}}

    return make


def settings(**changes: Any) -> Edit:
    """Other values in config.json."""

    def edit(folder: Path) -> None:
        content = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(content | changes))

    return edit


def cut(name: str) -> Edit:
    """The beginning of a file."""
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:1_000])


def without(name: str) -> Edit:
    """A file less."""
    return lambda folder: (folder / name).unlink()


def nan_weight(folder: Path) -> None:
    """One weight that is no number."""
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    weights[min(weights)][0] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def below_a_file(folder: Path) -> dict[str, str]:
    """MEM_HOME where no folder can be made."""
    (folder / "file").write_text("")
    return {"MEM_HOME": str(folder / "file" / "home")}


def dead_store(_: Path) -> dict[str, str]:
    """An S3 endpoint where nobody listens."""
    return {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}


def only_checkpoints(folder: Path) -> None:
    """Journal and record are lost."""
    for path in folder.iterdir():
        if path.name != "checkpoints":
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def damaged_record(folder: Path) -> None:
    """Neither the record nor its copy can be read."""
    for path in folder.glob("run*.json"):
        path.write_text("{")


QUICK = (
    Odd("nobody can approve", of(policy={"approval": {"required": True}}), 64, "nobody can be asked"),
    Odd("offload at stage 0", of(parallel={"zero_stage": 0, "offload_optimizer": "cpu"}), 64, "cannot be kept in host memory"),
    Odd("policy out of bounds", policy("lanes: {cpu: {lr_multiplier: {at_least: 5}}}"), 64, "not a valid policy"),
    Odd("planner without URL", planner(), 64, "kind openai needs it"),
    Odd("home below a file", of(), 69, "MEM's caches", below_a_file),
    Odd("mirror is a file", with_file("file", "", lambda path: {"checkpoint": {"mirror": path}}), 73, "not a folder"),
    Odd("a bad row", rows(GOOD + "[]\n"), 66, "a list where an object is due"),
    Odd("warm-up beyond the run", of(training={"warmup_steps": 50}), 0, "it ends at 2% of training.learning_rate"),
)
REQUESTS = (
    Odd("batch that cannot be divided", of(training={"global_batch_size": 3}, parallel={"num_ranks": 2}), 64, "cannot be divided"),
    Odd("micro-batch that does not divide", of(memory={"micro_batch_size": 3}), 64, "does not divide"),
    Odd("unknown key", of(trainning={}), 64, "Did you mean training?"),
    Odd("run id", of(run_id="A B"), 64, "does not have the right form"),
    Odd("too many steps", of(training={"max_steps": 2_000_000}), 64, "max_steps_limit"),
    Odd("fault kinds", of(chaos={"kinds": ["nonsense"]}), 64, "no such kind of fault"),
    Odd("faults in training", of(chaos={"kinds": ["kill_rank"]}), 0, "left out: training never hurts a run"),
    Odd("a key that MEM owns", of(deepspeed={"optimizer": {}}), 64, "belong to MEM"),
    Odd("half a pair", rows(GOOD, prompt_field="prompt"), 64, "go together"),
    Odd("validation as too large a part", of(data={"validation": 0.9}), 64, "at most 0.5"),
    Odd("budget in words", of(memory={"budget": "lots"}), 64, "is not a size"),
    Odd("sequence beyond the positions", of(data={"sequence_length": 4_096}), 64, "at most 2048"),
    Odd("unknown preset", of(model={"source": "preset:nope"}), 64, "unknown preset"),
    Odd("hub name", of(model={"source": "someone/some-model"}), 64, "no such folder"),
    Odd("messages and no template", rows(jsonl({"messages": []}), messages_field="messages"), 64, "no chat template"),
    Odd("mirror of a remote store", of(store="s3://b/x", checkpoint={"mirror": "/copies"}), 64, "makes no second copy"),
    Odd("policy file missing", of(policy={"file": "/nowhere.yaml"}), 64, "cannot be read"),
    Odd("policy that is no YAML", policy("lanes: [unclosed"), 64, "not readable YAML"),
    Odd("planner's URL", planner(base_url="not a url"), 64, "no URL of an endpoint"),
    Odd("planner's key itself", planner(base_url="http://127.0.0.1:9/v1", api_key_env="sk-a/b"), 64, "not the name of an environment"),
    Odd("planner out of reach", planner(base_url="http://127.0.0.1:9/v1"), 0),
    Odd("a prompt that is too long", of(evaluation={"prompts": ["p" * 3_000]}), 66, "row 1 has 3,000 tokens"),
    Odd("no file of prompts", of(evaluation={"prompts": "/nowhere.jsonl"}), 66, "the prompts cannot be read"),
    Odd("prompts that are chats", of(evaluation={"prompts": [[{"role": "user", "content": "a"}]]}), 64, "no chat template"),
    Odd("offload on a CPU", of(parallel={"zero_stage": 1, "offload_optimizer": "cpu"}), 0, "frees nothing on a CPU"),
)
MACHINES = (
    Odd("no CUDA device", of(device="cuda"), 80, "cuda_unavailable"),
    Odd("half precision on a CPU", of(model={"dtype": "float16"}), 69, "float16 asked for on a CPU"),
    Odd("no compiler", of(model={"compile": "on"}), 69, "no C++ compiler", lambda folder: {"CXX": "/nowhere/g++"}),
    Odd("store is a file", with_file("file", "", lambda path: {"store": path}), 73, "is not a folder"),
    Odd("unknown store scheme", of(store="nosuch://x/y"), 73, "Protocol not known"),
    Odd("unknown mirror scheme", of(checkpoint={"mirror": "nosuch://x/y"}), 73, "Protocol not known"),
    Odd("mirror out of reach", of(checkpoint={"mirror": "s3://bucket/x"}), 73, "Could not connect", dead_store),
    Odd("too little disk", of(model={"source": "preset:llama-small"}, checkpoint={"keep_last": 1_000}), 73, "1002 checkpoints of"),
    Odd("too small a budget", of(memory={"budget": "10MiB"}), 69, "10.0 MiB under memory.budget"),
    Odd(
        "too large a batch",
        of(
            data={"sequence_length": 2_048},
            training={"global_batch_size": 512},
            memory={"mode": "fixed", "micro_batch_size": 512, "budget": "1GiB"},
        ),
        69,
        "512 x 2048 tokens",
    ),
)  # fmt: skip
ROWS = (
    Odd("glob without a file", of(data={"train": ["/nowhere/*.jsonl"]}), 66, "the glob matches no file"),
    Odd("a folder as data", lambda folder: {"data": {"train": [str(folder)]}}, 66, "this is a folder"),
    Odd("unknown scheme of data", of(data={"train": ["nosuch://a/a.jsonl"]}), 66, "Protocol not known"),
    Odd("no validation file", of(data={"validation": ["/nowhere"]}), 66, "no such file"),
    Odd("empty file", rows(""), 66, "is empty"),
    Odd("UTF-16", rows(GOOD.encode("utf-16")), 66, "UTF-16"),
    Odd("one JSON array", rows(json.dumps([{"text": "a"}] * 3, indent=2)), 66, "one JSON array"),
    Odd("bad rows that are skipped", rows("[]\n" + GOOD, on_bad_row="skip"), 0, "1 bad row was skipped"),
    Odd("nothing but bad rows", rows("[]\n" * 20, on_bad_row="skip"), 66, "no row to train on"),
    Odd("another field", rows(jsonl({"body": "x"})), 66, "field 'text' is missing"),
    Odd("prompts that fill the sequence", rows(LONG_PROMPTS, **PAIRS), 0, "the beginning of the prompt gave way"),
    Odd("prompts that are refused", rows(LONG_PROMPTS, **PAIRS, long_documents="refuse"), 66, "longer than data.sequence_length"),
    Odd("no answers", rows(NO_ANSWERS, **PAIRS), 66, "8 bad rows"),
    Odd("one row", rows(jsonl({"text": "a"}), validation=0.1), 0, "no row was held out"),
)
DEEPSPEED = (
    Odd("a switch that is none", of(deepspeed={"tensorboard": {"enabled": "maybe"}}), 64, "tensorboard.enabled"),
    Odd("a monitor without its package", of(deepspeed={"wandb": {"enabled": True}}), 69, "wandb is not installed"),
    Odd("something that was removed", of(deepspeed={"progressive_layer_drop": {"enabled": True}}), 64, "has been removed"),
    Odd("sizes of its own", of(deepspeed={"autotuning": {"enabled": True}}), 69, "changes the batch by itself"),
    Odd("offload to a disk", of(deepspeed={"aio": {"block_size": 1}}), 69, "serves offload to NVMe only"),
)
MODELS = (
    Odd("no fused attention", model_folder(architecture="Gemma2", tokenizer="llama_2_form", vocab_size=512), 0, "plain operations"),
    Odd("an unknown token that is not there", model_folder(architecture="Gemma2"), 64, "the tokenizer cannot encode text"),
    Odd("a folder as it should be", model_folder(architecture="GPTNeoX"), 0),
    Odd("a loss of its own", model_folder(architecture="Mixtral", **EXPERTS, output_router_logits=True), 64, "adds a part of its own"),
    Odd("a weight that is no number", model_folder(nan_weight), 64, "no finite number"),
    Odd("quantised weights", model_folder(settings(quantization_config={"quant_method": "gptq", "bits": 4})), 64, "quantised"),
    Odd("code of its own", model_folder(settings(model_type="nosuch", auto_map={"AutoModelForCausalLM": "x.Y"})), 64, "never runs"),
    Odd("no language model", model_folder(settings(model_type="bert", architectures=["BertModel"])), 64, "not a causal language model"),
    Odd("weights cut short", model_folder(cut("model.safetensors")), 64, "not a safetensors file"),
    Odd("weights of another shape", model_folder(settings(hidden_size=64, head_dim=32)), 64, "cannot be loaded"),
    Odd("no weights", model_folder(without("model.safetensors")), 64, "the folder has no weights"),
    Odd("no tokenizer", model_folder(tokenizer=""), 64, "no tokenizer files"),
    Odd("tokenizer cut short", model_folder(cut("tokenizer.json")), 64, "the tokenizer cannot be loaded"),
    Odd("tokenizer larger than the embedding", model_folder(settings(vocab_size=100)), 64, "different tokens"),
)  # fmt: skip
RUNS = (
    Odd("born with another rate", of(), 64, "was born with", spoil=lambda folder: None),
    Odd("checkpoints of another life", of(), 74, "checkpoints of another life", spoil=only_checkpoints),
    Odd("a record that cannot be read", of(), 74, "is damaged", spoil=damaged_record),
)
ALL = (*QUICK, *REQUESTS, *MACHINES, *ROWS, *DEEPSPEED, *MODELS, *RUNS)
