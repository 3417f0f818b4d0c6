"""README.md of an exported model: where its weights come from, in words and numbers that can be checked. Pure."""

import json

from mem_core.core.run.record import RunRecord
from mem_core.domain.results.evaluation import rows_words
from mem_core.domain.run import RunResult


def model_card(record: RunRecord, result: RunResult, step: int, dtype: str, weights_digest: str) -> str:
    """Markdown with the header that model hubs read. `result` is the run as it stood; the weights are those of `step`."""
    training = record.request.training
    rows = [
        ("base model", f"`{record.request.model.source}` (fingerprint `{record.model_fingerprint[:16]}`)"),
        ("data", f"{', '.join(f'`{source}`' for source in record.request.data.train)} (fingerprint `{record.data_fingerprint[:16]}`)"),
        ("weights of step", f"{step:,}{f', {_epochs(record, step):.3g} epochs' if record.length.num_rows else ''}"),
        ("number format", f"{dtype}; trained in {record.dtype}"),
        ("training loss", f"{_number(result.loss_first)} → {_number(result.loss_last)} per token" if result.loss_last is not None else ""),
        *((f"held out: {name}", figures.words()) for name, figures in result.evaluation.items()),
        ("held out", _older(result) if not result.evaluation else ""),
        ("best step", f"{result.best.step:,}: {result.best.metric} {result.best.value:.4f}" if result.best is not None else ""),
        ("batch", f"{training.global_batch_size} sequences of at most {record.request.data.sequence_length} tokens"),
        ("learning rate", f"{training.learning_rate:g}, {training.schedule}, {training.warmup_steps:,} steps of warm-up"),
        ("faults survived", f"{len(result.faults):,}, with {result.restarts:,} restarts and {result.ooms_absorbed:,} OOMs absorbed"),
        ("weights digest", f"`{weights_digest}`"),
        ("trajectory digest", f"`{result.trajectory_digest}`" if result.applied_steps == step else ""),
    ]
    table = "\n".join(f"| {name} | {value} |" for name, value in rows if value)
    request = json.dumps(record.request.model_dump(mode="json"), indent=1)
    return (
        "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags: [mem, deepspeed]\n---\n\n"
        f"# {record.run_id}\n\nTrained by MEM. The weights digest is a SHA-256 over the trained parameters as float32, in name order.\n\n"
        f"| | |\n|---|---|\n{table}\n\n## Request\n\n```json\n{request}\n```\n"
    )


def _epochs(record: RunRecord, step: int) -> float:
    return step * record.request.training.global_batch_size / (record.length.num_rows or 1)


def _older(result: RunResult) -> str:
    if result.validation_loss is None:
        return ""
    return f"loss {result.validation_loss:.4f} over {rows_words(result.validation_rows, result.validation_rows_total)}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"
