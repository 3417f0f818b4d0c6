"""Data and models straight from an S3 store, spoken to over HTTP as in production."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from mem_core.domain.errors import DataError, StoreUnavailable
from mem_core.domain.request import DataSection
from mem_core.runtime.data.encoding.prepare import prepare_data
from mem_core.runtime.data.serving.dataset import TokenDataset
from mem_core.runtime.models.facts import describe_model

NANO = "preset:llama-nano"


@pytest.fixture(scope="module")
def s3_endpoint() -> Iterator[str]:
    """A moto server on a free port of this machine."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A bucket, with endpoint and keys where S3 clients look for them: in the environment, which the child inherits."""
    import s3fs

    for name, value in (
        ("AWS_ENDPOINT_URL", s3_endpoint),
        ("AWS_ACCESS_KEY_ID", "k"),
        ("AWS_SECRET_ACCESS_KEY", "s"),
        ("AWS_DEFAULT_REGION", "us-east-1"),
    ):
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    s3fs.S3FileSystem().mkdir("mem-data")
    yield "mem-data"
    s3fs.S3FileSystem().rm("mem-data", recursive=True)
    s3fs.S3FileSystem.clear_instance_cache()


def test_data_from_s3_is_prepared_cached_and_noticed_when_changed(tmp_path: Path, bucket: str) -> None:
    import s3fs

    fs = s3fs.S3FileSystem()
    row = json.dumps({"text": "a remote row"})
    fs.pipe({f"{bucket}/d/{name}.jsonl": f"{row}\n".encode() for name in "ab"})
    data = DataSection(train=(f"s3://{bucket}/d/*.jsonl",), validation=None, packing=False)
    first = prepare_data(data, 0, NANO, 384, tmp_path / "cache")
    assert (first.num_samples, first.num_files, first.from_cache) == (2, 2, False)
    assert prepare_data(data, 0, NANO, 384, tmp_path / "cache") == first.model_copy(update={"from_cache": True})
    with TokenDataset.open(first.train_dir) as dataset:
        assert [bytes((tokens[:-1] - 3).tolist()) for tokens, _ in dataset.rows(range(2))] == [b"a remote row"] * 2
    fs.pipe(f"{bucket}/d/b.jsonl", f"{row}\n[]\n".encode())
    with pytest.raises(DataError, match=rf"s3://{bucket}/d/b\.jsonl:2: a list where an object is due"):
        prepare_data(data, 0, NANO, 384, tmp_path / "cache")


def test_a_store_that_is_away_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing listens on port 9 (discard)."""
    import s3fs

    away = {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s", "AWS_MAX_ATTEMPTS": "1"}
    for name, value in away.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(DataError, match="cannot be read"):
        prepare_data(DataSection(train=("s3://away/x.jsonl",)), 0, NANO, 384, tmp_path / "cache")
    with pytest.raises(StoreUnavailable, match="the model cannot be"):
        describe_model("s3://away/model", tmp_path / "models")
    s3fs.S3FileSystem.clear_instance_cache()
