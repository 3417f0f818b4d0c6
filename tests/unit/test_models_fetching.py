"""A model behind a URL is fetched once, and again where what lies in the cache is not what was fetched."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mem_core.domain.errors import RequestError, StoreUnavailable
from mem_core.infrastructure.storage.sealed import remove_whatever
from mem_core.runtime.models.build import load_tokenizer
from mem_core.runtime.models.fetching import fetch_folder
from mem_core.runtime.models.folders import local_model_folder


@pytest.fixture
def published(tmp_path: Path) -> Path:
    folder = tmp_path / "published"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "notes.md").write_text("not fetched")
    return folder


def flipped(folder: Path) -> None:
    content = (folder / "config.json").read_bytes()
    (folder / "config.json").write_bytes(content.replace(b"llama", b"llamb"))


def short(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def gone(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def piped(folder: Path) -> None:
    gone(folder)
    os.mkfifo(folder / "tokenizer.json")


def unproven(folder: Path) -> None:
    folder.with_name(f"{folder.name}.fetched").unlink()


def no_folder(folder: Path) -> None:
    remove_whatever(folder)
    folder.touch()


@pytest.mark.parametrize("damage", [flipped, short, gone, piped, unproven, no_folder])
def test_a_damaged_copy_is_fetched_again(tmp_path: Path, published: Path, damage: Callable[[Path], None]) -> None:
    url, cache = f"local://{published}", tmp_path / "cache"
    copy = fetch_folder(url, cache)
    assert sorted(path.name for path in copy.iterdir()) == ["config.json", "tokenizer.json"]
    before = copy.stat().st_ino
    assert fetch_folder(url, cache).stat().st_ino == before, "what is whole is not fetched again"
    damage(copy)
    assert fetch_folder(url, cache) == copy
    assert (copy / "config.json").read_text() == '{"model_type": "llama"}'
    assert (copy / "tokenizer.json").read_text() == "{}"
    assert sorted(path.name for path in cache.iterdir()) == [copy.name, f"{copy.name}.fetched"], "nothing is left behind"


def test_a_store_that_is_away_and_a_cache_that_cannot_be_written_are_told(tmp_path: Path, published: Path) -> None:
    with pytest.raises(StoreUnavailable, match="the model cannot be listed"):
        fetch_folder(f"local://{tmp_path}/none", tmp_path / "cache")
    (tmp_path / "file").touch()
    with pytest.raises(StoreUnavailable, match="the model cannot be fetched"):
        fetch_folder(f"local://{published}", tmp_path / "file" / "cache")


@pytest.mark.parametrize("source", ["x" * 5_000, "/" + "x" * 5_000, "a\0b"])
def test_a_model_source_that_is_no_path_is_refused(source: str) -> None:
    with pytest.raises(RequestError, match="no such folder"):
        local_model_folder(source)


@pytest.mark.parametrize("content", ["{", "{}", '{"model": {"type": "BPE"}}', "[" * 10_000])
def test_a_tokenizer_file_that_is_none_is_refused(tmp_path: Path, content: str) -> None:
    """The library beneath raises bare exceptions for it, and some classes fall back on files that are not there."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(RequestError, match="the tokenizer cannot be loaded"):
        load_tokenizer(str(tmp_path))
