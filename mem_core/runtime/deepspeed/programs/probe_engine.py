"""What building the model and the engine's configuration says, without weights and without an engine:
`python -m mem_core.runtime.deepspeed.programs.probe_engine` with an order as JSON on standard input.

Prints one line of JSON. Only what was asked for is imported, since that is where the time goes: transformers for a model folder,
DeepSpeed for raw keys.
"""

import contextlib
import json
import sys
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

from mem_core.domain.errors import EnvironmentUnfit, RequestError
from mem_core.domain.plan import Hyperparams, MemoryPlan
from mem_core.domain.request import RuntimeRequest

_MONITORS = MappingProxyType({"wandb": "wandb", "comet": "comet_ml", "tensorboard": "tensorboard"})


def main() -> int:
    """Answer the order on standard input: {"request", "dtype", "model", "config"}, the last two say what is to be probed."""
    order = json.loads(sys.stdin.read())
    request = RuntimeRequest.model_validate(order["request"])
    answer: dict[str, Any] = {"problems": []}
    with contextlib.redirect_stdout(sys.stderr):  # libraries print there what they like
        for wanted, probe in (("model", _probe_model), ("config", _probe_config)):
            if order[wanted]:
                try:
                    answer |= probe(request, order["dtype"])
                except (RequestError, EnvironmentUnfit) as exc:
                    said = f"{exc.problem} (got {exc.value})" if exc.value is not None else exc.problem
                    answer["problems"].append([exc.field, said, exc.remedy, exc.bound, exc.exit_code])
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
    return 0


def _probe_model(request: RuntimeRequest, _: str) -> dict[str, Any]:
    from mem_core.runtime.models.build import build_skeleton

    skeleton: Any = build_skeleton(request.model.source)
    answer = {"architecture": type(skeleton).__name__, "attention": getattr(skeleton.config, "_attn_implementation", "")}
    if request.model.lora is None and not request.model.freeze:
        return answer
    from mem_core.runtime.deepspeed.trainable import trainable_of

    trainable = trainable_of(request)
    left_out = trainable.left_out(skeleton)
    trainable.choose(skeleton)
    return answer | {"num_trainable_parameters": trainable.num_parameters(skeleton), "left_out": left_out}


def _probe_config(request: RuntimeRequest, dtype: Any) -> dict[str, Any]:
    """DeepSpeed reads its own configuration; what it says of a key is in the words of that library."""
    from deepspeed.runtime.config import DeepSpeedConfig

    from mem_core.runtime.deepspeed.engine_config import engine_config

    _refuse_missing_monitors(request)
    plan = MemoryPlan(micro_batch_rows=1, offload_optimizer=request.parallel.offload_optimizer)
    config = engine_config(request, dtype, plan, Hyperparams(), num_trained=1)
    config["train_batch_size"] = config["train_micro_batch_size_per_gpu"]  # no process group stands here: DeepSpeed counts one rank
    try:
        DeepSpeedConfig(config)
    except Exception as exc:
        raise RequestError(
            f"DeepSpeed cannot use its configuration: {type(exc).__name__}: {' '.join(str(exc).split())[:600]}",
            field="deepspeed",
            remedy=f"Mend or remove that key in the deepspeed section ({', '.join(sorted(request.deepspeed))}).",
        ) from exc
    return {}


def _refuse_missing_monitors(request: RuntimeRequest) -> None:
    """DeepSpeed imports a monitor's package when the engine is built, deep inside a rank.

    Raises:
        EnvironmentUnfit: one that is switched on is not installed.
    """
    for key, package in _MONITORS.items():
        section = request.deepspeed.get(key)
        if isinstance(section, dict) and section.get("enabled") is True and find_spec(package) is None:
            raise EnvironmentUnfit(
                f"the package {package} is not installed",
                field=f"deepspeed.{key}",
                remedy=f"Install {package} in this environment, or set deepspeed.{key}.enabled to false.",
            )


if __name__ == "__main__":
    sys.exit(main())
