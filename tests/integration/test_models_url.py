"""A model behind a URL is fetched once, by the process that prepares; ranks and the tokeniser find it on the disk."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mem_core.domain.request import ModelSection, RuntimeRequest
from mem_core.domain.run import RunResult
from mem_core.infrastructure.settings import Settings
from mem_core.runtime.models.build import build_model, save_pretrained_folder
from mem_core.runtime.models.folders import at_hand

NANO = ModelSection(source="preset:llama-nano")


@pytest.mark.integration
def test_ranks_need_no_network_for_a_model_behind_a_url(
    nano: Callable[..., RuntimeRequest], drive: Callable[..., RunResult], tmp_path: Path
) -> None:
    """The URL (fsspec's `local://`) is gone before the first rank is built: the run trains all the same, and the record keeps the URL."""
    folder = tmp_path / "published"
    save_pretrained_folder(NANO, dict(build_model(NANO, 128, 0, "float32", False).named_parameters()), folder)
    url = f"local://{folder}"
    request = nano("run", model={"source": url}, training={"max_steps": 10, "warmup_steps": 2}, parallel={"num_ranks": 2})

    def unplug(prepared: Any) -> None:
        shutil.rmtree(folder)
        assert prepared.session.segments.ranks.setup.spec.request.model.source == at_hand_before
        assert prepared.held.state.record().request.model.source == url

    at_hand_before = at_hand(url, Settings.from_environment().model_cache_dir)
    result = drive(request, prepared=unplug)
    assert (result.status, result.applied_steps) == ("completed", 10)
    shutil.rmtree(at_hand_before)


def test_presets_and_folders_stay_what_they_are(tmp_path: Path) -> None:
    """Only a URL is fetched."""
    assert at_hand("preset:llama-tiny", tmp_path / "cache") == "preset:llama-tiny"
    assert at_hand(f"file://{tmp_path}", tmp_path / "cache") == at_hand(str(tmp_path), tmp_path / "cache") == str(tmp_path)
    assert not (tmp_path / "cache").exists()
