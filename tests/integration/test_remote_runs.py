"""Whole runs with a remote store over HTTP: a new machine with an empty disk goes on, and a store that misbehaves never stops training."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from faulty_s3_proxy import Proxy
from moto.server import ThreadedMotoServer

from flows.commands.inspection.finished import result_if_finished
from flows.commands.report import run_status_text
from mem_core.core.run.state_manager import read_journal
from mem_core.domain.errors import StoreUnavailable
from mem_core.domain.events import Evaluated, Noted, PolicyDecided, SegmentStarted
from mem_core.domain.request import RuntimeRequest
from mem_core.domain.run import RunResult
from mem_core.infrastructure.settings import Settings
from mem_core.testing.ports import Console

pytestmark = pytest.mark.integration
TRAINING = {"max_steps": 40, "segment_steps": 10, "global_batch_size": 4, "warmup_steps": 5}
Drive = Callable[..., RunResult]


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    """An S3 server on loopback with a bucket named `runs`."""
    import boto3

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    client = boto3.client(
        "s3", endpoint_url=f"http://{host}:{port}", aws_access_key_id="test", aws_secret_access_key="test", region_name="us-east-1"
    )
    client.create_bucket(Bucket="runs")
    yield f"http://{host}:{port}"
    server.stop()


def machine(home: Path, endpoint: str) -> Settings:
    """A machine of its own: its home folder, the endpoint and dummy keys from its environment; token shards are shared."""
    real = Settings.from_environment()
    home.mkdir(exist_ok=True)
    if not (home / "data").exists():
        real.data_cache_dir.mkdir(parents=True, exist_ok=True)
        (home / "data").symlink_to(real.data_cache_dir)
    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_ENDPOINT_URL": endpoint}
    return Settings.from_environment({**os.environ, **keys, "MEM_HOME": str(home), "AWS_DEFAULT_REGION": "us-east-1"})


def notes(folder: Path) -> str:
    """Every note of a run's journal."""
    return "\n".join(line.event.text for line in read_journal(folder / "journal") if isinstance(line.event, Noted))


def live_folder(home: Path) -> Path:
    """The one live run folder of a machine whose store is remote."""
    (folder,) = [path.parent for path in (home / "live").rglob("run.json")]
    return folder


def digests(result: RunResult) -> tuple[str, str]:
    """What makes two runs the same run."""
    return result.trajectory_digest, result.weights_digest


class PullThePlug(Exception):
    """Ends a drive as a machine that is lost: nothing of ours runs after it in the flow."""


def lose_machine_at(segment_index: int) -> Callable[[Any, Any], None]:
    """Raise before this segment, once everything before it is mirrored."""

    def hook(session: Any, segment: Any) -> None:
        if segment.segment_index == segment_index:
            assert session.ending.remote._background.drain(60)
            raise PullThePlug

    return hook


def test_a_new_machine_with_an_empty_disk_goes_on_to_the_same_weights(
    tmp_path: Path, moto: str, drive: Drive, nano: Callable[..., RuntimeRequest]
) -> None:
    """run.json, journal and checkpoints come from the store; decisions are replayed; the run does not start at 0."""
    plain = drive(nano("plain", training=TRAINING))
    request = nano("moved", training=TRAINING).model_copy(update={"store": "s3://runs/moved-prefix"})
    with pytest.raises(PullThePlug):
        drive(request, settings=machine(tmp_path / "first", moto), before_segment=lose_machine_at(2))
    first = live_folder(tmp_path / "first")
    shutil.rmtree(tmp_path / "first")
    resumed = drive(request, settings=machine(tmp_path / "second", moto))
    second = live_folder(tmp_path / "second")
    assert digests(resumed) == digests(plain)
    assert second.name == first.name
    assert "step 20 restored from s3://runs/moved-prefix" in notes(second)
    events = [line.event for line in read_journal(second / "journal")]
    assert len([event for event in events if isinstance(event, PolicyDecided)]) == 1
    again = drive(request, settings=machine(tmp_path / "third", moto))
    assert digests(again) == digests(plain)


@pytest.mark.parametrize(
    "fault", ["expired", *(pytest.param(fault, marks=pytest.mark.slow) for fault in ("500", "reset", "timeout", "short write"))]
)
def test_a_mirror_that_misbehaves_never_stops_training(
    fault: str, tmp_path: Path, moto: str, drive: Drive, nano: Callable[..., RuntimeRequest]
) -> None:
    """Faults in the middle of the run: it completes, and what the mirror then holds is enough for a new machine."""
    request = nano("run", training=TRAINING, checkpoint={"mirror": f"s3://runs/mirror-{fault.replace(' ', '-')}"})
    proxy = Proxy(moto)
    with proxy.serve() as endpoint:
        result = drive(
            request,
            settings=machine(tmp_path / "home", endpoint),
            before_segment=lambda session, segment: proxy.reset(2, fault, repeat=3) if segment.segment_index == 1 else None,  # type: ignore[arg-type]
        )
        assert result.status == "completed"
        assert proxy.fired >= 1
    shutil.rmtree(tmp_path / "run")
    again = drive(request, settings=machine(tmp_path / "other", moto))
    assert digests(again) == digests(result)
    assert "step 40 restored" in notes(tmp_path / "run")


def keep_pace(session: Any, segment: Any) -> None:
    """A mirror that is slower than training sends the newest only: here each is sent before the next one can be due."""
    if segment.from_step >= 20:
        assert session.ending.remote._background.drain(60)


def test_a_mirror_that_is_behind_is_said_and_caught_up(
    tmp_path: Path, moto: str, drive: Drive, nano: Callable[..., RuntimeRequest]
) -> None:
    """Uploads of steps 30 and 40 fail: exit 0 with a message; a lost disk resumes at 20 and names them."""
    request = nano("run", training=TRAINING, checkpoint={"mirror": "s3://runs/behind"})
    folder, proxy, console = tmp_path / "run", Proxy(moto), Console()
    proxy.reset(0, "500", repeat=10_000, only=("step-000000030", "step-000000040"))
    with proxy.serve() as endpoint:
        result = drive(request, settings=machine(tmp_path / "home", endpoint), progress=console, before_segment=keep_pace)
    assert (result.status, result.exit_code, result.applied_steps) == ("completed", 0, 40)
    assert result.mirror is not None
    assert (result.mirror.at_step, result.mirror.of_step, result.mirror.missing_steps) == (20, 40, (30, 40))
    for said in (result.message, console.text, run_status_text(folder), (folder / "report.html").read_text()):
        assert "mirror at 20 of 40" in said
    assert result_if_finished(folder, request) is None, "there is something left to do"
    shutil.copytree(folder, tmp_path / "kept")
    shutil.rmtree(folder)
    elsewhere = Console()
    again = drive(request, settings=machine(tmp_path / "other", moto), progress=elsewhere)
    assert digests(again) == digests(result)
    assert "steps 30, 40 had been proven, and no copy of that was found: going on from step 20" in elsewhere.text
    assert (again.message, again.mirror and again.mirror.behind) == ("", False)


def test_the_same_command_sends_what_the_mirror_lacks(tmp_path: Path, moto: str, drive: Drive, nano: Callable[..., RuntimeRequest]) -> None:
    """No step is done again, and the engine is not even loaded."""
    request = nano("run", training=TRAINING | {"max_steps": 20}, checkpoint={"mirror": "s3://runs/catch-up"})
    proxy = Proxy(moto)
    proxy.reset(0, "500", repeat=10_000, only=("step-000000020",))
    with proxy.serve() as endpoint:
        result = drive(request, settings=machine(tmp_path / "home", endpoint))
    assert "mirror at 10 of 20" in result.message
    caught_up = drive(request, settings=machine(tmp_path / "home", moto))
    assert (caught_up.status, caught_up.message) == ("completed", "")
    assert caught_up.mirror is not None
    assert (caught_up.mirror.at_step, caught_up.mirror.behind) == (20, False)
    assert digests(caught_up) == digests(result)
    assert caught_up.validation_loss == result.validation_loss
    starts = [line.attempt for line in read_journal(tmp_path / "run" / "journal") if isinstance(line.event, SegmentStarted | Evaluated)]
    assert set(starts) == {1}
    assert result_if_finished(tmp_path / "run", request) is not None


def test_a_remote_store_that_is_away_is_said_at_once(tmp_path: Path, drive: Drive, nano: Callable[..., RuntimeRequest]) -> None:
    """Nobody listens: exit 73 with the field, nothing is made."""
    request = nano("away", training=TRAINING).model_copy(update={"store": "s3://runs/away"})
    with pytest.raises(StoreUnavailable, match="store"):
        drive(request, settings=machine(tmp_path / "home", "http://127.0.0.1:9"))
    assert not list((tmp_path / "home").rglob("run.json"))


@pytest.mark.slow
def test_a_disk_whose_every_checkpoint_rotted_goes_on_from_the_mirror(
    tmp_path: Path, drive: Drive, nano: Callable[..., RuntimeRequest]
) -> None:
    """Verdicts still say valid and the bytes do not hold: found bad one by one, then the mirror's copy is brought, in one start."""
    request = nano("run", training=TRAINING, checkpoint={"mirror": str(tmp_path / "mirror")})
    plain = drive(request)
    for manifest in (tmp_path / "run" / "checkpoints").glob("*/manifest.json"):
        largest = max(manifest.parent.iterdir(), key=lambda path: path.stat().st_size)
        largest.write_bytes(bytes(largest.stat().st_size))
    longer = request.model_copy(update={"training": request.training.model_copy(update={"max_steps": 60})})
    resumed = drive(longer)
    assert "going on from the mirror's copy" in notes(tmp_path / "run")
    assert "step 40 restored" in notes(tmp_path / "run")
    assert (resumed.applied_steps, plain.applied_steps) == (60, 40)
