"""The verbs on checkpoints with a manifest key: whoever lacks it, or has another, is told so and believes nothing."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from flows.checkpoint_commands import list_checkpoints, verify_checkpoints
from flows.export_command import export_checkpoint
from mem_core.domain.errors import NoValidCheckpoint, RequestError
from mem_core.domain.request import RuntimeRequest
from mem_core.domain.run import RunResult
from mem_core.infrastructure.settings import Settings

pytestmark = pytest.mark.integration
TRAINING = {"max_steps": 10, "segment_steps": 5, "global_batch_size": 4, "warmup_steps": 2}
Capture = pytest.CaptureFixture[str]


def with_key(key: str) -> Settings:
    """This machine with MEM_MANIFEST_KEY set; empty means unset."""
    return Settings.from_environment({**os.environ, "MEM_MANIFEST_KEY": key})


def test_a_signed_run_is_believed_only_with_its_key(
    nano: Callable[..., RuntimeRequest], drive: Callable[..., RunResult], tmp_path: Path, capsys: Capture
) -> None:
    """Verify and export succeed with the key; without it, and with another, they fail and say why; so does going on with the run."""
    result = drive(nano("run", training=TRAINING), settings=with_key("one"))
    folder = tmp_path / "run"
    assert verify_checkpoints(folder, as_json=False, settings=with_key("one")) == 0
    assert export_checkpoint(folder, None, None, as_json=True, settings=with_key("one")) == 0
    assert json.loads(capsys.readouterr().out)["weights_digest"] == result.weights_digest
    for key, words in (("", "MEM_MANIFEST_KEY"), ("two", "signature is missing or does not match")):
        assert verify_checkpoints(folder, as_json=True, settings=with_key(key)) == NoValidCheckpoint.exit_code
        said = capsys.readouterr()
        assert [verdict["valid"] for verdict in json.loads(said.out)] == [False, False]
        assert words in said.err
    list_checkpoints(folder, as_json=True, settings=with_key("two"))
    assert {info["state"] for info in json.loads(capsys.readouterr().out)} == {"invalid"}
    with pytest.raises(RequestError, match="MEM_MANIFEST_KEY"):
        export_checkpoint(folder, None, None, as_json=False, settings=with_key(""))
    with pytest.raises(NoValidCheckpoint):
        export_checkpoint(folder, None, None, as_json=False, settings=with_key("two"))


def test_unsigned_checkpoints_are_refused_under_a_key(
    nano: Callable[..., RuntimeRequest], drive: Callable[..., RunResult], tmp_path: Path, capsys: Capture
) -> None:
    """A key asks for signatures: what was saved without is neither verified nor resumed from, and nothing starts at 0 in silence."""
    drive(nano("run", training=TRAINING))
    assert verify_checkpoints(tmp_path / "run", as_json=False) == 0
    assert verify_checkpoints(tmp_path / "run", as_json=False, settings=with_key("one")) == NoValidCheckpoint.exit_code
    assert "signature is missing" in capsys.readouterr().err
    with pytest.raises(NoValidCheckpoint, match="signature is missing"):
        drive(nano("run", training={**TRAINING, "max_steps": 15}), settings=with_key("one"))
