"""A tracking server through MLflow's own client, which is an extra (`mem[mlflow]`) and imported in the thread that speaks to it."""

import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

from mem_core.infrastructure.telemetry.loggers.mlflow import TOKEN_TAG
from mem_core.infrastructure.telemetry.loggers.points import Point

PARAMETERS_OF_A_BATCH = 100
LONGEST_PARAMETER = 500
_TRIES, _TIMEOUT_S = "1", "10"  # MLflow's own are 7 tries over minutes: whoever asks here tries again by himself


class MlflowServer:
    """`Server` over MLflow's client. Every call may raise anything that the client does."""

    def __init__(self, uri: str) -> None:
        warnings.filterwarnings("ignore", module="mlflow")
        from mlflow.environment_variables import MLFLOW_HTTP_REQUEST_MAX_RETRIES, MLFLOW_HTTP_REQUEST_TIMEOUT  # pyright: ignore[reportMissingImports]
        from mlflow.tracking import MlflowClient  # pyright: ignore[reportMissingImports]

        for variable, value in ((MLFLOW_HTTP_REQUEST_MAX_RETRIES, _TRIES), (MLFLOW_HTTP_REQUEST_TIMEOUT, _TIMEOUT_S)):
            if not variable.is_set():
                variable.set(value)
        _keep_to_itself()
        self._client: Any = MlflowClient(tracking_uri=uri)

    def begin(self, experiment: str, name: str, token: str, texts: dict[str, str], parameters: dict[str, str]) -> tuple[str, str]:
        """Found by its token, which is a tag of it."""
        from mlflow.entities import Param  # pyright: ignore[reportMissingImports]

        found = self._client.get_experiment_by_name(experiment)
        experiment_id = found.experiment_id if found is not None else self._client.create_experiment(experiment)
        runs = self._client.search_runs([experiment_id], f"tags.`{TOKEN_TAG}` = '{token}'", max_results=1)
        if runs:
            run_id = runs[0].info.run_id
            self._client.update_run(run_id, status="RUNNING")
            return experiment_id, run_id
        run_id = self._client.create_run(experiment_id, run_name=name, tags={**texts, TOKEN_TAG: token}).info.run_id
        for part in _parts(parameters):
            self._client.log_batch(run_id, params=[Param(key, value[:LONGEST_PARAMETER]) for key, value in part.items()])
        return experiment_id, run_id

    def send(self, run_id: str, points: Sequence[Point]) -> None:
        """One request."""
        from mlflow.entities import Metric  # pyright: ignore[reportMissingImports]

        now_ms = int(time.time() * 1_000)
        metrics = [Metric(name, value, now_ms, point.step) for point in points for name, value in point.values.items()]
        self._client.log_batch(run_id, metrics=metrics)

    def last_step(self, run_id: str, metric: str) -> int:
        """By its whole history."""
        return max((point.step for point in self._client.get_metric_history(run_id, metric)), default=0)

    def set_status(self, run_id: str, status: str, texts: dict[str, str]) -> None:
        """With what else is known at the end, as tags."""
        from mlflow.entities import RunTag  # pyright: ignore[reportMissingImports]

        self._client.log_batch(run_id, tags=[RunTag(key, value) for key, value in texts.items()])
        self._client.set_terminated(run_id, status)


def _keep_to_itself() -> None:
    """MLflow reports its own use to its makers unless it is told not to; a training run talks to nobody but whom the request names."""
    with suppress(ImportError, AttributeError):
        from mlflow.environment_variables import MLFLOW_DISABLE_TELEMETRY  # pyright: ignore[reportMissingImports]
        from mlflow.telemetry import set_telemetry_client  # pyright: ignore[reportMissingImports]

        if not MLFLOW_DISABLE_TELEMETRY.is_set():
            MLFLOW_DISABLE_TELEMETRY.set("true")
            set_telemetry_client()


def _parts(parameters: Mapping[str, str]) -> Iterator[dict[str, str]]:
    items = iter(parameters.items())
    while part := dict(islice(items, PARAMETERS_OF_A_BATCH)):
        yield part
