"""Who takes a run's figures beside its own files and TensorBoard."""

from typing import Literal

from pydantic import Field

from mem_core.domain.request.section import Section

LoggerName = Literal["csv", "mlflow"]


class TelemetrySection(Section):
    """Who takes a run's figures."""

    loggers: tuple[LoggerName, ...] = Field(
        default=(),
        description="Who takes the figures beside TensorBoard: csv writes tables into metrics/; mlflow sends them to a tracking server, "
        "which needs the extra mem[mlflow].",
    )
    mlflow_tracking_uri: str | None = Field(
        default=None, min_length=1, description="Address of the MLflow server; null takes MLFLOW_TRACKING_URI from the environment."
    )
    mlflow_experiment: str = Field(default="mem", min_length=1, max_length=200, description="MLflow experiment that the run belongs to.")
