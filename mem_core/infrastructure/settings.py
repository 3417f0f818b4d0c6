"""What the environment says: the only module of MEM that reads environment variables.

Everyone else takes these values as arguments, so that a test, a notebook and a deployment differ in one place only.
"""

import hashlib
import os
import platform
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from mem_core.domain.errors import EnvironmentUnfit, RequestError

# The first variable that is set wins; the doctor prints which one it was (boto3's own order first, then fsspec's).
S3_ENDPOINT_ORDER = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "FSSPEC_S3_ENDPOINT_URL")
_S3_OPTIONS = {
    "key": ("AWS_ACCESS_KEY_ID", "FSSPEC_S3_KEY"),
    "secret": ("AWS_SECRET_ACCESS_KEY", "FSSPEC_S3_SECRET"),
    "token": ("AWS_SESSION_TOKEN", "FSSPEC_S3_TOKEN"),
}
# Left over from a launcher or a dead run, each of these sends DeepSpeed to the wrong rendezvous or asks for mpi4py.
RANK_VARIABLES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE",
    "NODE_RANK", "CROSS_RANK", "CROSS_SIZE", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip
_RANK_PREFIXES = ("TORCHELASTIC_", "MASTER_")
RUN_FOLDER_VARIABLE = "MEM_RUN_FOLDER"


@dataclass(frozen=True)
class Settings:
    """The environment of this process as MEM understands it. Secrets never appear in its repr.

    `stale_rank_variables` are names from `RANK_VARIABLES` that were set; worker processes never see them.
    """

    mem_home: Path
    prefect_api_url: str | None = None
    s3_endpoint_url: str | None = None
    s3_endpoint_source: str = "AWS's own address"
    s3_options: Mapping[str, Any] = field(default_factory=dict[str, Any], repr=False)
    manifest_key: str | None = field(default=None, repr=False)
    planner_base_url: str | None = None
    stale_rank_variables: tuple[str, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    given: bool = field(default=False, repr=False)

    def read_again(self) -> "Settings":
        """The environment as it is now, for credentials that were renewed; settings made from given values stay as they are."""
        return self if self.given else Settings.from_environment()

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> "Settings":
        """Read the environment once; `environ` stands in for `os.environ` in tests.

        Raises:
            EnvironmentUnfit: neither MEM_HOME nor a home folder is known.
        """
        values = dict(os.environ if environ is None else environ)
        endpoint_source = next((name for name in S3_ENDPOINT_ORDER if values.get(name)), None)
        return cls(
            mem_home=_mem_home(values),
            prefect_api_url=values.get("PREFECT_API_URL") or None,
            s3_endpoint_url=values[endpoint_source] if endpoint_source else None,
            s3_endpoint_source=endpoint_source or "AWS's own address",
            s3_options=_s3_options(values, endpoint_source),
            manifest_key=values.get("MEM_MANIFEST_KEY") or None,
            planner_base_url=values.get("OPENAI_BASE_URL") or None,
            stale_rank_variables=tuple(sorted(name for name in values if _is_rank_variable(name))),
            environ=values,
            given=environ is not None,
        )

    @property
    def no_color(self) -> bool:
        """Whether output is asked for without colours (https://no-color.org)."""
        return bool(self.environ.get("NO_COLOR"))

    @property
    def mlflow_tracking_uri(self) -> str | None:
        """MLFLOW_TRACKING_URI; it may carry a user and a password."""
        return self.environ.get("MLFLOW_TRACKING_URI") or None

    @property
    def mlflow_secrets(self) -> tuple[str, ...]:
        """What MLflow's client signs in with, which no message may show."""
        names = ("MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN", "DATABRICKS_TOKEN")
        return tuple(value for name in names if (value := self.environ.get(name)))

    @property
    def torch_extensions_dir(self) -> Path:
        """DeepSpeed's compiled ops. One folder per torch, DeepSpeed, Python and CPU: an op built elsewhere may not load here."""
        return self.mem_home / "torch_extensions" / op_build_key()

    @property
    def compile_cache_dir(self) -> Path:
        """Code that torch.compile generated."""
        return self.mem_home / "compile_cache"

    @property
    def data_cache_dir(self) -> Path:
        """Token shards by fingerprint."""
        return self.mem_home / "data"

    @property
    def model_cache_dir(self) -> Path:
        """Models fetched from remote URLs."""
        return self.mem_home / "models"

    @property
    def prefect_template_dir(self) -> Path:
        """A migrated, empty Prefect database, copied for each embedded server."""
        return self.mem_home / "prefect"

    def storage_options(self, url: str) -> dict[str, Any]:
        """Options for fsspec: endpoint and keys for S3 URLs, nothing for others."""
        return dict(self.s3_options) if url.split("://", 1)[0] in ("s3", "s3a") else {}

    def secret(self, name: str) -> str | None:
        """A key by the name of its environment variable (`policy.planner.api_key_env`); None when unset or empty.

        Raises:
            RequestError: the name looks like a key itself, which must never be written into a request.
        """
        if not name.replace("_", "").isalnum() or not name.isascii() or name[:1].isdigit():
            raise RequestError(
                "this is not the name of an environment variable",
                remedy="Write the name of the variable that holds the key, never the key itself.",
                field="policy.planner.api_key_env",
            )
        return self.environ.get(name) or None


def child_environment(
    settings: Settings,
    *,
    device: Literal["cpu", "cuda"],
    threads_per_rank: int = 1,
    max_jobs: int = 1,
    run_folder: Path | None = None,
    extra: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """The whole environment of a worker process.

    `threads_per_rank` becomes OMP_NUM_THREADS, `max_jobs` bounds parallel compilers, `run_folder` marks the process as one of
    that run, so that the doctor finds it if it should outlive its owner. The caller adds the rank's own
    rendezvous variables through `extra`, which wins over everything else.
    """
    env = {name: value for name, value in settings.environ.items() if not _is_rank_variable(name)}
    env |= {
        # ninja of the venv and ninja of the system used in turn make DeepSpeed rebuild its ops at each start.
        "PATH": os.pathsep.join(_unique([str(Path(sys.prefix) / "bin"), *env.get("PATH", os.defpath).split(os.pathsep)])),
        "DS_ACCELERATOR": device,
        # `import deepspeed` asks torch whether CUDA is there; the NVML way of asking leaves the process able to fork.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        "TORCH_EXTENSIONS_DIR": str(settings.torch_extensions_dir),
        "TORCHINDUCTOR_CACHE_DIR": str(settings.compile_cache_dir),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "OMP_NUM_THREADS": str(threads_per_rank),
        "MKL_NUM_THREADS": str(threads_per_rank),
        "MAX_JOBS": str(max_jobs),
        "PYTHONUTF8": "1",
        "PYTHONFAULTHANDLER": "1",
    }
    # A CPU run must not open a CUDA context; on CUDA, cuBLAS needs a fixed workspace to give the same bits twice.
    env |= {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    marker = {RUN_FOLDER_VARIABLE: str(run_folder.absolute())} if run_folder is not None else {}
    return env | marker | dict(extra or {})


@lru_cache(maxsize=1)
def op_build_key() -> str:
    """Folder name for compiled ops, such as `torch2.13.0-ds0.19.8-py311-x86_64-1a2b3c4d`."""
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    return f"torch{_version('torch')}-ds{_version('deepspeed')}-{python}-{platform.machine()}-{_cpu_signature()}"


def _cpu_signature() -> str:
    """Eight hex digits of the CPU's feature flags: a shared home folder must not mix ops built with -march=native."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        text = ""
    flags = next((line for line in text.splitlines() if line.startswith(("flags", "Features"))), "")
    return hashlib.sha256(flags.encode()).hexdigest()[:8]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _mem_home(values: Mapping[str, str]) -> Path:
    if values.get("MEM_HOME"):
        return Path(os.path.expanduser(values["MEM_HOME"])).absolute()
    try:
        home = Path(values["HOME"]) if values.get("HOME") else Path.home()
    except RuntimeError as exc:
        raise EnvironmentUnfit("no home folder is known", remedy="Set MEM_HOME to a folder for MEM's caches.", field="MEM_HOME") from exc
    return home.absolute() / ".cache" / "mem"


def _s3_options(values: Mapping[str, str], endpoint_source: str | None) -> dict[str, Any]:
    """Keyword arguments of s3fs. Listings are never cached: another writer's objects would stay unseen."""
    options: dict[str, Any] = {"use_listings_cache": False}
    if endpoint_source:
        options["endpoint_url"] = values[endpoint_source]
    for option, names in _S3_OPTIONS.items():
        found = next((values[name] for name in names if values.get(name)), None)
        if found:
            options[option] = found
    region = values.get("AWS_REGION") or values.get("AWS_DEFAULT_REGION")
    if region:
        options["client_kwargs"] = {"region_name": region}
    return options


def _is_rank_variable(name: str) -> bool:
    return name in RANK_VARIABLES or name.startswith(_RANK_PREFIXES)


def _unique(values: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(value for value in values if value))
