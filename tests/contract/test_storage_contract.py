"""One contract, every adapter: local disk, a disk in memory, fsspec's memory, S3 over HTTP (moto's server on loopback)."""

import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

from mem_core.domain.errors import RequestError, StoreUnavailable
from mem_core.infrastructure.storage import LocalStore, RetryPolicy, Store, open_store
from mem_core.infrastructure.storage.fsspec_store import FsspecStore
from mem_core.testing.contracts.store_contract import StoreContract
from mem_core.testing.memory_disk import MemoryDisk

SECRET = "wJalr-dummy-secret-value"
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:botocore", "ignore::DeprecationWarning:moto")


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


def options(endpoint: str) -> dict[str, Any]:
    return {"key": "dummy-key", "secret": SECRET, "endpoint_url": endpoint, "client_kwargs": {"region_name": "us-east-1"}}


def client(endpoint: str) -> Any:
    return boto3.client("s3", endpoint_url=endpoint, aws_access_key_id="dummy-key", aws_secret_access_key=SECRET, region_name="us-east-1")


@pytest.fixture
def bucket(endpoint: str) -> str:
    name = f"bucket-{uuid.uuid4().hex[:12]}"
    client(endpoint).create_bucket(Bucket=name)
    return name


class TestLocalDisk(StoreContract):
    @pytest.fixture
    def store(self, tmp_path_factory: pytest.TempPathFactory) -> Store:
        return LocalStore(tmp_path_factory.mktemp("store"))

    def test_links_are_not_listed(self, tmp_path: Path) -> None:
        (tmp_path / "link").symlink_to("/etc/passwd")
        assert LocalStore(tmp_path).list("") == ()

    def test_a_place_that_cannot_be_written_is_exit_73(self, tmp_path: Path) -> None:
        with pytest.raises(StoreUnavailable, match=r"proc|store|read-only|denied|failed"):
            LocalStore(Path("/proc/none")).write("a", b"x")


class TestDiskInMemory(StoreContract):
    @pytest.fixture
    def store(self) -> Store:
        return LocalStore(Path("/store"), MemoryDisk())


class TestFsspecMemory(StoreContract):
    @pytest.fixture
    def store(self) -> Store:
        return open_store(f"memory://{uuid.uuid4().hex}/prefix")


class TestS3(StoreContract):
    @pytest.fixture
    def store(self, endpoint: str, bucket: str) -> Store:
        return open_store(f"s3://{bucket}/runs", options(endpoint), retry=RetryPolicy(attempts=3, first_delay_s=0.01))

    def test_another_client_is_seen_at_once(self, store: Store, endpoint: str, bucket: str) -> None:
        """A listing before the other client's put hides nothing."""
        assert store.list("checkpoints") == ()
        client(endpoint).put_object(Bucket=bucket, Key="runs/checkpoints/1/manifest.json", Body=b"{}")
        assert [item.key for item in store.list("checkpoints")] == ["checkpoints/1/manifest.json"]
        assert store.read("checkpoints/1/manifest.json") == b"{}"

    def test_multipart_upload_is_proven(self, store: Store, endpoint: str, bucket: str, tmp_path: Path) -> None:
        """17 MiB and a bit go up in parts of 8 MiB and the ETag of the parts is checked."""
        source = tmp_path / "big"
        source.write_bytes(b"0123456789abcdef" * (17 << 16) + b"tail")
        store.put_file(source, "big")
        etag = client(endpoint).head_object(Bucket=bucket, Key="runs/big")["ETag"]
        assert etag.strip('"').endswith("-3")
        store.get_file("big", tmp_path / "back")
        assert (tmp_path / "back").read_bytes() == source.read_bytes()

    def test_no_bucket_is_said_and_keeps_secrets(self, endpoint: str) -> None:
        store = FsspecStore("s3://key:hidden@no-such-bucket-here/x", options(endpoint), retry=RetryPolicy(attempts=2, first_delay_s=0.01))
        with pytest.raises(StoreUnavailable) as caught:
            store.write("a", b"x")
        text = str(caught.value) + repr(caught.value.__cause__)
        assert "no-such-bucket-here" in text
        assert SECRET not in text
        assert "hidden" not in text

    def test_nobody_listening_is_said_within_bounds(self, tmp_path: Path) -> None:
        pauses: list[float] = []
        store = FsspecStore("s3://bucket/x", options("http://127.0.0.1:9"), retry=RetryPolicy(attempts=3), sleep=pauses.append, seed=0)
        with pytest.raises(StoreUnavailable, match="after 3 tries"):
            store.read("a")
        assert [0.1 <= pauses[0] <= 0.2, 0.2 <= pauses[1] <= 0.4, len(pauses)] == [True, True, 2]

    def test_used_from_many_threads(self, store: Store) -> None:
        threads = [threading.Thread(target=store.write, args=(f"t/{number}", b"x" * number)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [item.size_bytes for item in store.list("t")] == list(range(8))


def test_unknown_kind_and_missing_bucket_are_the_requests_fault() -> None:
    for url in ("nosuchthing://bucket/x", "s3://"):
        with pytest.raises(RequestError):
            open_store(url)


def test_plain_paths_and_file_urls_are_local(tmp_path: Path) -> None:
    for url in (str(tmp_path), f"file://{tmp_path}"):
        assert open_store(url).url == str(tmp_path)
