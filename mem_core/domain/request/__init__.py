"""What a user may ask for: `RuntimeRequest`, the frozen surface shared by YAML, Prefect's form and notebooks.

Field names, meanings and defaults never change; optional fields may be added. Bounds live here, so that a value is valid
from birth; checks that need the machine, the data or the model belong to the doctor.
"""

from mem_core.domain.request.checkpoint import CheckpointSection
from mem_core.domain.request.data import DataSection
from mem_core.domain.request.evaluation import VALIDATION, EvaluationSection
from mem_core.domain.request.memory import MemorySection
from mem_core.domain.request.model import LoraSection, ModelSection
from mem_core.domain.request.parallel import ParallelSection
from mem_core.domain.request.policy import ApprovalSection, PlannerSection, PolicySection
from mem_core.domain.request.resilience import ChaosSection, ResilienceSection
from mem_core.domain.request.runtime_request import MAX_SEGMENTS, OWNED_DEEPSPEED_KEYS, RuntimeRequest
from mem_core.domain.request.section import PositiveInt, Section
from mem_core.domain.request.shown import shown_request
from mem_core.domain.request.sources import WeightedSource
from mem_core.domain.request.telemetry import TelemetrySection
from mem_core.domain.request.training import STEPS_LIMIT, TrainingSection

__all__ = [
    "MAX_SEGMENTS",
    "OWNED_DEEPSPEED_KEYS",
    "STEPS_LIMIT",
    "VALIDATION",
    "ApprovalSection",
    "ChaosSection",
    "CheckpointSection",
    "DataSection",
    "EvaluationSection",
    "LoraSection",
    "MemorySection",
    "ModelSection",
    "ParallelSection",
    "PlannerSection",
    "PolicySection",
    "PositiveInt",
    "ResilienceSection",
    "RuntimeRequest",
    "Section",
    "TelemetrySection",
    "TrainingSection",
    "WeightedSource",
    "shown_request",
]
