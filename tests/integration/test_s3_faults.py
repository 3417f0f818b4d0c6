"""Mirroring to S3 over HTTP with one fault at every call: it completes, what is there is valid, and nothing else is there."""

import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import pytest
from faulty_s3_proxy import FAULTS, Fault, Proxy
from moto.server import ThreadedMotoServer

from mem_core.domain.checkpoint import checkpoint_name
from mem_core.domain.errors import StoreUnavailable
from mem_core.domain.request import CheckpointSection
from mem_core.infrastructure.storage.fsspec_store import FsspecStore
from mem_core.infrastructure.storage.port import Unfinished
from mem_core.infrastructure.storage.retrying import RetryPolicy
from mem_core.runtime.checkpoint_manager import Mirror, resume_point
from mem_core.runtime.session.opening.orphans import orphan_findings
from mem_core.testing.checkpoint_run import SHARDS, Run, draft, proven, stage

pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning"), pytest.mark.timeout(600)]
SECRET = "dummy-secret-for-tests"


@dataclass
class Remote:
    """A moto server with the faulty proxy before it."""

    proxy: Proxy
    endpoint: str
    direct: str

    def options(self, key: str = "dummy") -> dict[str, Any]:
        return {
            "key": key, "secret": SECRET, "endpoint_url": self.endpoint, "client_kwargs": {"region_name": "us-east-1"},
            "config_kwargs": {"read_timeout": 1, "connect_timeout": 1},
        }  # fmt: skip

    def store(self, bucket: str, **fields: Any) -> FsspecStore:
        retry = RetryPolicy(attempts=5, first_delay_s=0.01, longest_delay_s=0.05)
        return FsspecStore(f"s3://{bucket}/runs", self.options(), **{"retry": retry, **fields})

    def client(self) -> Any:
        return boto3.client(
            "s3", endpoint_url=self.direct, aws_access_key_id="dummy", aws_secret_access_key=SECRET, region_name="us-east-1"
        )

    def bucket(self) -> str:
        name = f"bucket-{uuid.uuid4().hex[:12]}"
        self.client().create_bucket(Bucket=name)
        return name

    def keys(self, bucket: str) -> list[str]:
        return [item["Key"] for item in self.client().list_objects_v2(Bucket=bucket).get("Contents", [])]


@pytest.fixture(scope="module")
def remote() -> Iterator[Remote]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    direct = f"http://{host}:{port}"
    proxy = Proxy(direct)
    with proxy.serve() as endpoint:
        yield Remote(proxy, endpoint, direct)
    server.stop()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = Run(tmp_path_factory.mktemp("source") / "demo")
    proven(run.attempt(1), 1, 2)
    return run.folder / "checkpoints"


def mirror_of(store: FsspecStore, attempt: int = 1) -> Mirror:
    section = CheckpointSection(keep_last=1)
    return Mirror(store, "demo", attempt, section, fence=lambda: None, emit=lambda event: None, lease_s=-1)


def use(remote: Remote, bucket: str, source: Path, scratch: Path) -> None:
    """Two pushes, rotation in both phases, and a restore on an empty disk."""
    mirror = mirror_of(remote.store(bucket))
    for step in (1, 2):
        mirror.push(source / checkpoint_name(step))
    mirror.rotate()
    mirror.rotate()
    shutil.rmtree(scratch, ignore_errors=True)
    run = Run(scratch)
    newest = resume_point(run.attempt(2), mirror_of(remote.store(bucket), 2), run.events.append)
    assert newest is not None
    assert newest.step == 2


def expected_keys() -> int:
    """One checkpoint, its manifest, the records of attempts 1 and 2."""
    return len(SHARDS) + 1 + 2


def meet(remote: Remote, source: Path, scratch: Path, kind: Fault, at: int) -> None:
    """Use the mirror with one fault at one call; afterwards exactly the expected objects are there."""
    bucket = remote.bucket()
    remote.proxy.reset(at, kind)
    use(remote, bucket, source, scratch)
    assert remote.proxy.fired == 1, f"{kind} at call {at} did not fire"
    keys = remote.keys(bucket)
    assert len(keys) == expected_keys(), f"{kind} at call {at}: {keys}"


def count_calls(remote: Remote, source: Path, scratch: Path) -> int:
    remote.proxy.reset(-1, "500")
    use(remote, remote.bucket(), source, scratch)
    return remote.proxy.calls


def test_every_kind_of_fault_once_over_the_whole_sequence(remote: Remote, source: Path, tmp_path: Path) -> None:
    total = count_calls(remote, source, tmp_path / "new")
    assert total > 30
    for number, kind in enumerate(FAULTS):
        meet(remote, source, tmp_path / "new", kind, (2 + number * total // len(FAULTS)) % total)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_fault_at_every_call(remote: Remote, source: Path, tmp_path: Path) -> None:
    for at in range(count_calls(remote, source, tmp_path / "new")):
        for kind in FAULTS:
            meet(remote, source, tmp_path / "new", kind, at)


def test_expired_credentials_are_replaced(remote: Remote, source: Path) -> None:
    """An instance keeps what it was born with: a new one is built from fresh options, each time the store says that they expired."""
    bucket, asked = remote.bucket(), []

    def refresh() -> dict[str, Any]:
        asked.append(1)
        return remote.options("fresh")

    store = remote.store(bucket, refresh_options=refresh)
    remote.proxy.reset(2, "expired", repeat=3)
    mirror_of(store).push(source / checkpoint_name(1))
    assert (remote.proxy.fired, len(asked)) == (3, 3)


def test_a_store_that_stays_away_is_exit_73_without_secrets(remote: Remote, source: Path) -> None:
    """Bounded: gives up, keeps the local copy, and a later push of the same checkpoint goes through and leaves nothing double."""
    bucket = remote.bucket()
    mirror = mirror_of(remote.store(bucket))
    remote.proxy.reset(6, "500", repeat=10_000)
    with pytest.raises(StoreUnavailable) as caught:
        mirror.push(source / checkpoint_name(1))
    assert caught.value.exit_code == 73
    assert SECRET not in str(caught.value)
    assert sorted(path.name for path in (source / checkpoint_name(1)).iterdir()) == sorted([*SHARDS, "manifest.json", "verdict.json"])
    remote.proxy.reset(-1, "500")
    mirror.push(source / checkpoint_name(1))
    assert len(remote.keys(bucket)) == len(SHARDS) + 2
    assert mirror.orphans() == ()


def test_what_a_killed_upload_left_is_listed_and_removed_by_the_next_attempt(remote: Remote, source: Path) -> None:
    """Parts of a multipart upload whose writer died: in no listing, but in the doctor's; an attempt removes older ones, never its own."""
    bucket = remote.bucket()
    remote.proxy.reset(-1, "500")
    store, old, own = remote.store(bucket), "attempt-1-0a0a0a0a", "attempt-2-0b0b0b0b"
    second = mirror_of(store, 2)
    second.push(source / checkpoint_name(1))
    for upload in (old, own):
        key = f"runs/demo/checkpoints/step-000000002/{upload}/model.pt"
        begun = remote.client().create_multipart_upload(Bucket=bucket, Key=key)
        remote.client().upload_part(Bucket=bucket, Key=key, UploadId=begun["UploadId"], PartNumber=1, Body=b"x" * 100)
    assert not any("model.pt" in key and "step-000000002" in key for key in remote.keys(bucket))
    (finding,) = orphan_findings(store, "demo")
    assert "2 unfinished objects" in finding.observed
    assert [item.key.split("/")[-2] for item in store.unfinished("demo")] == [old, own]
    second.rotate()
    assert [item.key.split("/")[-2] for item in store.unfinished("demo")] == [own]
    third = mirror_of(store, 3)
    third.begin()
    third.rotate()
    assert store.unfinished("demo") == ()
    store.abandon(Unfinished("demo/never", "was-never-there"))


def test_multipart_upload_with_faults_is_proven(remote: Remote, tmp_path: Path) -> None:
    """17 MiB in three parts; a part that fails, a reply that is lost: the object is right in the end and no part is left behind."""
    big = tmp_path / "big"
    big.write_bytes(bytes(range(256)) * (17 << 12))
    kinds: tuple[Fault, ...] = ("500", "lost reply", "short write")
    for kind in kinds:
        for at in (1, 4):
            bucket = remote.bucket()
            store = remote.store(bucket)
            remote.proxy.reset(at, kind)
            store.put_file(big, "big")
            assert remote.proxy.fired == 1, f"{kind} at {at}"
            store.get_file("big", tmp_path / "back")
            assert (tmp_path / "back").read_bytes() == big.read_bytes()
            assert len(remote.client().list_multipart_uploads(Bucket=bucket).get("Uploads", [])) <= 1, f"{kind} at {at}"


def test_an_upload_whose_first_reply_was_lost_is_not_left_behind_by_the_last_attempt(remote: Remote, tmp_path: Path) -> None:
    """The store began a multipart upload that nobody here knows of: it is billed for ever unless this attempt removes it at its end."""
    run = Run(tmp_path / "demo")
    manager = run.attempt(1)
    staging = stage(manager, 1)
    (staging / SHARDS[0]).write_bytes(bytes(range(256)) * (17 << 12))
    manager.commit(1, staging, draft(1))
    bucket = remote.bucket()
    mirror = mirror_of(remote.store(bucket))
    remote.proxy.reset(0, "lost reply", only=("?uploads",))
    mirror.push(manager.path_of(1))
    assert remote.proxy.fired == 1
    remote.proxy.reset(-1, "500")
    assert len(remote.client().list_multipart_uploads(Bucket=bucket).get("Uploads", [])) == 1
    assert mirror_of(remote.store(bucket)).abandon_unfinished() == 0, "an attempt that never began here owns nothing"
    assert mirror.abandon_unfinished() == 1
    assert remote.client().list_multipart_uploads(Bucket=bucket).get("Uploads", []) == []
    assert mirror.available()[0].step == 1
