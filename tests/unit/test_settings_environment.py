"""Settings: what MEM takes from the environment, in which order, and what worker processes get to see."""

import sys
from pathlib import Path

import pytest

from mem_core.domain.errors import RequestError
from mem_core.infrastructure.settings import RUN_FOLDER_VARIABLE, S3_ENDPOINT_ORDER, Settings, child_environment, op_build_key


def settings(**environ: str) -> Settings:
    return Settings.from_environment({"HOME": "/home/ada", **environ})


def test_home_comes_from_mem_home_then_from_the_home_folder() -> None:
    assert settings().mem_home == Path("/home/ada/.cache/mem")
    assert settings(MEM_HOME="/data/mem").mem_home == Path("/data/mem")
    assert settings(MEM_HOME="rel").mem_home.is_absolute()


def test_without_home_variable_the_user_database_answers() -> None:
    """HOME unset (cron, systemd) must not crash."""
    assert Settings.from_environment({}).mem_home.is_absolute()


@pytest.mark.parametrize("first", range(len(S3_ENDPOINT_ORDER)))
def test_the_first_endpoint_variable_in_the_documented_order_wins(first: int) -> None:
    environ = {name: f"http://{name.lower()}" for name in S3_ENDPOINT_ORDER[first:]}
    found = settings(**environ)
    assert found.s3_endpoint_source == S3_ENDPOINT_ORDER[first]
    assert found.s3_endpoint_url == environ[S3_ENDPOINT_ORDER[first]]
    assert found.storage_options("s3://b/p")["endpoint_url"] == found.s3_endpoint_url


def test_empty_endpoint_variable_counts_as_unset() -> None:
    found = settings(AWS_ENDPOINT_URL_S3="", FSSPEC_S3_ENDPOINT_URL="http://minio:9000")
    assert found.s3_endpoint_url == "http://minio:9000"


def test_storage_options_hold_keys_and_region_for_s3_only() -> None:
    found = settings(AWS_ACCESS_KEY_ID="id", AWS_SECRET_ACCESS_KEY="hush", AWS_DEFAULT_REGION="eu-west-1")
    assert found.storage_options("s3://b") == {
        "use_listings_cache": False,
        "key": "id",
        "secret": "hush",
        "client_kwargs": {"region_name": "eu-west-1"},
    }
    assert found.storage_options("/tmp/x") == {}
    assert found.storage_options("gs://b") == {}


def test_secrets_are_not_in_the_repr() -> None:
    found = settings(AWS_SECRET_ACCESS_KEY="hush", MEM_MANIFEST_KEY="sign-me", OPENAI_API_KEY="sk-1")
    assert not any(secret in repr(found) for secret in ("hush", "sign-me", "sk-1"))
    assert found.manifest_key == "sign-me"
    assert found.secret("OPENAI_API_KEY") == "sk-1"
    assert found.secret("NOT_SET") is None


@pytest.mark.parametrize("name", ["sk-live-abc", "", "1ABC", "ключ", "A B"])
def test_a_key_written_in_place_of_its_name_is_refused_without_echo(name: str) -> None:
    with pytest.raises(RequestError) as caught:
        settings().secret(name)
    assert caught.value.exit_code == 64
    assert not name or name not in str(caught.value)


def test_children_never_see_rank_variables_of_a_dead_run() -> None:
    stale = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_PORT": "29500", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "x", "MASTER_ADDR": "h"}
    found = settings(**stale)
    assert set(found.stale_rank_variables) == set(stale)
    assert not set(stale) & child_environment(found, device="cpu").keys()


def test_the_callers_own_rank_variables_win() -> None:
    env = child_environment(settings(RANK="7"), device="cpu", extra={"RANK": "1"})
    assert env["RANK"] == "1"


def test_the_venvs_bin_is_first_on_path_and_listed_once() -> None:
    own = str(Path(sys.prefix) / "bin")
    for path in ("/usr/bin:/bin", f"/usr/bin:{own}:/bin", f"{own}:/usr/bin:/bin"):
        assert child_environment(settings(PATH=path), device="cpu")["PATH"].split(":") == [own, "/usr/bin", "/bin"]
    assert child_environment(settings(), device="cpu")["PATH"].split(":")[0] == own


def test_child_environment_fixes_threads_caches_and_offline_mode() -> None:
    env = child_environment(settings(OMP_NUM_THREADS="64", DS_ACCELERATOR="cuda"), device="cpu", threads_per_rank=2, max_jobs=3)
    assert {name: env[name] for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "MAX_JOBS", "DS_ACCELERATOR")} == {
        "OMP_NUM_THREADS": "2",
        "MKL_NUM_THREADS": "2",
        "MAX_JOBS": "3",
        "DS_ACCELERATOR": "cpu",
    }
    assert env["TORCH_EXTENSIONS_DIR"] == f"/home/ada/.cache/mem/torch_extensions/{op_build_key()}"
    assert env["TORCHINDUCTOR_CACHE_DIR"].startswith("/home/ada/.cache/mem/")
    assert env["TOKENIZERS_PARALLELISM"] == "false"
    assert env["HF_HUB_OFFLINE"] == "1"
    assert env["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1"
    assert env["CUDA_VISIBLE_DEVICES"] == ""


def test_cuda_children_keep_their_devices_and_get_a_fixed_cublas_workspace() -> None:
    env = child_environment(settings(CUDA_VISIBLE_DEVICES="3"), device="cuda")
    assert env["CUDA_VISIBLE_DEVICES"] == "3"
    assert env["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_op_folder_names_both_versions() -> None:
    """An op built for another torch or DeepSpeed must never be loaded."""
    key = op_build_key()
    assert key.startswith("torch2.")
    assert "-ds0." in key


def test_workers_are_marked_with_their_run_folder() -> None:
    """So that one that outlives its owner can be found."""
    assert child_environment(settings(), device="cpu", run_folder=Path("/runs/demo"))[RUN_FOLDER_VARIABLE] == "/runs/demo"
    assert RUN_FOLDER_VARIABLE not in child_environment(settings(), device="cpu")
