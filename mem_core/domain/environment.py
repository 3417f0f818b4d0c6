"""What the doctor saw. Severity decides: a `failure` stops the run before any training, with its remedy."""

from typing import Literal

from pydantic import Field, field_validator

from mem_core.domain.secrets import clean_text
from mem_core.domain.units import Value

Severity = Literal["ok", "notice", "warning", "failure"]


class Finding(Value):
    """One check: what was observed, what is needed, and what to do about it.

    `exit_code` says which ending a failure leads to (DESIGN §9); it is 0 for everything milder.
    """

    check: str
    severity: Severity
    observed: str
    needed: str = ""
    remedy: str = ""
    exit_code: int = 0

    @field_validator("observed", "needed", "remedy", mode="before")
    @classmethod
    def _printable(cls, value: object) -> object:
        """It is printed, stored and served, and names whatever was found."""
        return clean_text(value) if isinstance(value, str) else value


class MemoryBudget(Value):
    """How many bytes a run may use on one kind of memory, and which limit binds."""

    kind: Literal["host", "device"]
    budget_bytes: int
    binding_limit: str
    limits_bytes: dict[str, int] = Field(default={}, description="Every limit seen, by name.")


class EnvironmentReport(Value):
    """The machine as one run sees it."""

    device: Literal["cpu", "cuda"]
    device_reason: str
    dtype: Literal["float32", "bfloat16", "float16"]
    num_cores: int
    threads_per_rank: int
    versions: dict[str, str]
    memory: tuple[MemoryBudget, ...]
    estimates_bytes: dict[str, int] = Field(default={}, description="Predicted sizes: parameters, training peak, checkpoint, ...")
    findings: tuple[Finding, ...]
    num_ranks: int = 1
    micro_batch_rows: int = Field(default=1, description="Rows per forward pass and rank that the memory estimate was made for.")
    max_build_jobs: int = Field(default=1, description="Compilers that may run at the same time (MAX_JOBS).")
    stale_locks: tuple[str, ...] = Field(default=(), description="Op-build lock files that the prepare step removes.")
    model: "ModelNumbers | None" = Field(default=None, description="The model's sizes, as the doctor read them; None where it could not.")
    cpu: str = Field(default="", description="Name of the CPU and its vector instructions; empty in reports of older versions.")

    @property
    def failures(self) -> tuple[Finding, ...]:
        """Findings that stop the run."""
        return tuple(finding for finding in self.findings if finding.severity == "failure")


class ModelNumbers(Value):
    """The sizes of a model that the doctor calculates with."""

    num_parameters: int = Field(ge=1, description="Unique parameters; tied weights once.")
    num_trainable_parameters: int | None = Field(default=None, ge=1, description="Parameters that are trained; None means all.")
    num_layers: int = Field(ge=1)
    hidden_size: int = Field(ge=1)
    intermediate_size: int = Field(default=0, ge=0, description="Width of the MLP; 0 means 4 x hidden_size.")
    vocab_size: int = Field(ge=1, description="Rows of the embedding.")
    num_heads: int = Field(default=1, ge=1)
    num_kv_heads: int | None = Field(default=None, ge=1, description="None means num_heads.")
    max_positions: int | None = Field(
        default=None, ge=1, description="Longest sequence that the model takes; None means no limit is stated."
    )
    tokenizer_vocab_size: int | None = Field(default=None, ge=1, description="Number of tokens, added ones included; None means unknown.")
    tied: bool = False
    added_losses: tuple[str, ...] = Field(
        default=(), description="Settings of config.json by which the model adds to its loss what cannot be trained on."
    )
    router_loss: bool = Field(default=False, description="Whether it asks for a router's loss, which is trained on beside its own.")
    has_chat_template: bool | None = Field(default=None, description="None means unknown.")


class DataFile(Value):
    """One input file as a first look saw it. `problem` is empty when its first bytes could be read."""

    path: str
    size_bytes: int = Field(default=0, ge=0)
    problem: str = ""


class DataRemark(Value):
    """Something about the rows that a person should know: what was left out, cut or taken otherwise than one may think."""

    check: str
    severity: Literal["notice", "warning"]
    text: str
    remedy: str = ""


class DataRefusal(Value):
    """What data preparation will refuse, in its own words."""

    problem: str
    bound: str = ""
    remedy: str = ""
    exit_code: int


class DataNumbers(Value):
    """A first look at the data: its files, and what preparation will say of their first rows."""

    files: tuple[DataFile, ...] = ()
    problems: tuple[str, ...] = Field(default=(), description="Patterns that match nothing, stores that do not answer.")
    parquet: tuple[str, ...] = Field(default=(), description="Parquet files among them, in reports of versions that could not read them.")
    longest_row_tokens: int | None = Field(default=None, ge=1, description="Longest admissible row; None means sequence_length.")
    refusal: DataRefusal | None = None
    remarks: tuple[DataRemark, ...] = ()


class DeviceReading(Value):
    """One accelerator."""

    name: str
    total_bytes: int = 0
    free_bytes: int = 0
    capability: str = ""
    bfloat16: bool = True


class AcceleratorObservation(Value):
    """What torch says about CUDA; `reason` is torch's own words when there is none."""

    available: bool
    reason: str = ""
    devices: tuple[DeviceReading, ...] = ()
    nccl: bool = False


class FolderObservation(Value):
    """Room on the filesystem of a folder; None where it has no such limit."""

    path: str
    total_bytes: int
    free_bytes: int
    free_inodes: int | None = None


class StoreObservation(Value):
    """The result of writing, reading and deleting a probe file. `problem` is empty when all three worked."""

    location: str
    local: bool = True
    relative: bool = Field(default=False, description="The request gave a relative path, resolved here.")
    endpoint: str = ""
    problem: str = ""


class LockObservation(Value):
    """A `lock` file of an op build."""

    path: str
    age_s: float
    stale: bool
    reason: str = ""
    owner_pid: int | None = None


class BuildObservation(Value):
    """What building and loading DeepSpeed's ops would find."""

    folder: str
    folder_writable: bool = True
    compiler: str = Field(default="", description="The C++ compiler that runs; empty when none does.")
    compiler_problem: str = ""
    ninja: str = Field(default="", description="The version that ninja printed; empty when it does not run.")
    ninja_problem: str = ""
    built_ops: tuple[str, ...] = Field(default=(), description="Ops whose compiled library is there and can be opened.")
    broken_ops: tuple[str, ...] = Field(default=(), description="Ops whose compiled library is there and cannot be opened, with why.")
    locks: tuple[LockObservation, ...] = ()


class HolderObservation(Value):
    """Who holds the run, from its lease."""

    owner: str
    attempt: int
    alive: bool
    expires_in_s: float | None = None
    since_unix_s: float | None = None


class SavedRun(Value):
    """What an earlier attempt of the same run left behind: resume has to fit it."""

    num_ranks: int
    zero_stage: int
    step: int
    checkpoint_bytes: int = 0
    router_loss: bool = Field(default=False, description="Whether it was born with what its model adds to the loss.")


class EngineProblem(Value):
    """What transformers or DeepSpeed says against a field of the request."""

    field: str
    problem: str
    remedy: str
    bound: str = ""
    exit_code: int = 64


class EngineObservation(Value):
    """What building the model without weights, and reading the engine's configuration, came to in a process of its own."""

    architecture: str = ""
    attention: str = Field(default="", description="How the model computes attention; empty where it was not built.")
    num_trainable_parameters: int | None = Field(default=None, ge=1, description="Of a request that trains a part; else None.")
    left_out: tuple[str, ...] = Field(default=(), description="Weights that adapters leave out though they are matrices: experts.")
    problems: tuple[EngineProblem, ...] = ()
    died: str = Field(default="", description="The last words of a process that could not even import or answer.")
    unknown: str = Field(default="", description="Why nothing is known: no time, no process.")


class MachineObservations(Value):
    """Everything the doctor decides on, gathered at the edge; nothing here is a judgement."""

    num_cores: int = Field(ge=1, description="Cores that this process may use: affinity and CPU quota included.")
    cpu_flags: tuple[str, ...] = ()
    cpu: str = Field(default="", description="Name of the CPU and its vector instructions.")
    versions: dict[str, str] = {}
    accelerator: AcceleratorObservation
    host_limits: dict[str, int] = Field(default={}, description="Bytes still available under each limit of resident host memory, by name.")
    address_space_limits: dict[str, int] = Field(
        default={}, description="RLIMIT_AS and RLIMIT_DATA where set: bytes of address space per process."
    )
    pids_left: int | None = Field(default=None, description="Processes and threads that may still be started; None means no limit.")
    store: StoreObservation
    mirror: StoreObservation | None = Field(default=None, description="None where no second copy is asked for.")
    store_folder: FolderObservation | None = Field(default=None, description="None for remote stores.")
    home: str = Field(default="", description="Where MEM keeps its caches (MEM_HOME).")
    home_problem: str = Field(default="", description="Why a file cannot be written, read and deleted there; empty when it can.")
    shared_memory: FolderObservation | None = Field(default=None, description="/dev/shm; None when it is missing.")
    build: BuildObservation
    holder: HolderObservation | None = None
    saved: SavedRun | None = None
    file_size_limit_bytes: int | None = Field(default=None, description="Longest file that may be written; None means no limit.")
    leftovers: tuple[str, ...] = Field(default=(), description="Processes of earlier attempts of this run that are still alive.")
    stale_rank_variables: tuple[str, ...] = ()
    has_mlflow: bool | None = Field(default=None, description="Whether the extra mem[mlflow] is installed; None where nobody looked.")
    engine: EngineObservation | None = Field(default=None, description="None where it had not to be asked.")
