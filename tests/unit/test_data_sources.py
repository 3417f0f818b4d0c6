"""Which files a data list means, what they are read as, and that each real one counts once."""

import glob
import os
import random
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mem_core.domain.errors import DataError, MemError, RequestError
from mem_core.domain.request import DataSection
from mem_core.infrastructure.storage.reading import NotPlain, open_regular, read_regular
from mem_core.runtime.data.encoding.prepare import prepare_data
from mem_core.runtime.data.encoding.tokenize_process import resolve_job
from mem_core.runtime.data.reading.globbing import matching_files
from mem_core.runtime.data.reading.sources import STDLIB_CAP_BYTES, SourceFile, resolve_files

PAIR = {"prompt_field": "p", "completion_field": "c"}


def resolve(*sources: object, rules: int = 2, **settings: Any) -> tuple[SourceFile, ...]:
    data = DataSection.model_validate({"train": [str(source) for source in sources], **settings})
    return resolve_files(data.train, data, "data.train", rules)


def test_the_standard_library_is_a_bounded_stable_source() -> None:
    files = resolve("stdlib:")
    assert len(files) > 100
    assert 1_000_000 < sum(file.size_bytes for file in files) <= STDLIB_CAP_BYTES
    assert not any(part in file.path for file in files for part in ("/site-packages/", "/test/", "/tests/"))
    assert files == resolve("stdlib:")


@pytest.mark.parametrize(
    ("name", "settings", "kind"),
    [
        ("a.jsonl", {}, "jsonl"),
        ("a.txt", {}, "text"),
        ("pcx.jsonlines", PAIR, "jsonl"),
        ("rows.txt", PAIR, "jsonl"),
        ("rows", {"messages_field": "messages"}, "jsonl"),
        ("rows.jsonlines", {"text_field": "body"}, "jsonl"),
        ("prose.txt", {"text_field": "body"}, "text"),
        ("prose.txt", {"format": "jsonl"}, "jsonl"),
        ("a.jsonl", {"format": "text"}, "text"),
    ],
)
def test_what_is_asked_for_decides_and_then_the_name(tmp_path: Path, name: str, settings: dict[str, Any], kind: str) -> None:
    (tmp_path / name).write_text("Once upon a time {" if name.startswith("prose") else '\ufeff\n {"p": "a", "c": "b", "body": "c"}\n')
    assert [file.kind for file in resolve(tmp_path / name, **settings)] == [kind]


def test_fields_with_what_has_none_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    for source, settings in ((tmp_path / "a.txt", {"format": "text", **PAIR}), ("stdlib:", {"messages_field": "messages"})):
        with pytest.raises(RequestError, match=r"ask for rows with fields, and (data.format: text|stdlib:) has none"):
            resolve(source, **settings)


def test_the_first_rules_go_by_the_name_alone(tmp_path: Path) -> None:
    (tmp_path / "pcx.jsonlines").write_text('{"p": "a", "c": "b"}\n')
    assert [file.kind for file in resolve(tmp_path / "pcx.jsonlines", rules=1, **PAIR)] == ["text"]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Two files, a link back up, two of them below (which multiply), a hidden folder."""
    for name in ("tree/b.jsonl", "tree/sub/a.jsonl", "tree/.hidden/c.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f'{{"text": "{name}"}}\n')
    for link in ("tree/loop", "tree/sub/up", "tree/sub/again"):
        (tmp_path / link).symlink_to(tmp_path / "tree")
    return tmp_path / "tree"


def test_links_that_lead_back_up_are_gone_through_once(tree: Path) -> None:
    files = resolve(f"{tree}/**/*.jsonl")
    assert [file.path for file in files] == [f"{tree}/b.jsonl", f"{tree}/sub/a.jsonl"]


@pytest.mark.parametrize(
    "pattern", ["**", "**/*", "**/*.txt", "a/**", "*/**/b*", "**/a/**/b.txt", "./**/[ab].txt", ".h/**", "**/.h/*", "*"]
)
def test_patterns_mean_what_glob_takes_them_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str) -> None:
    rng = random.Random(pattern)
    for _ in range(60):
        path = tmp_path.joinpath(*rng.choices(("a", "b", ".h", "c"), k=rng.randint(0, 3)), rng.choice(("a.txt", "b.txt", "b.md", ".x")))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    monkeypatch.chdir(tmp_path)
    for prefix in ("", f"{tmp_path}/"):
        expected = {os.path.normpath(name) for name in glob.glob(prefix + pattern, recursive=True) if not os.path.isdir(name)}
        found = matching_files(prefix + pattern)
        assert [os.path.normpath(name) for name in found] == sorted(expected)


def test_a_pattern_of_a_thousand_parts_is_refused_at_once(tmp_path: Path) -> None:
    assert matching_files(f"{tmp_path}/" + "**/" * 1_000 + "x") == []
    with pytest.raises(DataError, match="the pattern has 2001 parts"):
        resolve("**/a/" * 1_000 + "x")


def test_each_real_file_counts_once_however_often_it_is_named(tmp_path: Path, tree: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"text": "a"}\n')
    os.link(path, tmp_path / "t-hard.jsonl")
    (tmp_path / "t-soft.jsonl").symlink_to(path)
    data = DataSection(train=(str(path), f"{tmp_path}/t*.jsonl", f"{tree}/../t.jsonl"), validation=None)
    train, _, (note,) = resolve_job(data, 2)
    assert [file.path for file in train] == [str(path)]
    assert note.startswith(f"files that are named several times count once: {tmp_path}/t-hard.jsonl is {path}; ")
    assert note.endswith(" and 1 more")
    assert len(resolve_job(data, 1)[0]) == 5, "runs that were born with every row twice go on with them"
    own = DataSection(train=(str(path),), validation=(str(path), str(path)))
    assert [len(files) for files in resolve_job(own, 2)[:2]] == [1, 1], "each list by itself"


def test_the_note_goes_with_the_names_and_not_with_the_cache(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"text": "some text that is long enough"}\n')
    once, twice = ((str(path),), (str(path), f"{tmp_path}/t*.jsonl"))
    first = prepare_data(DataSection(train=once, validation=None), 0, "preset:llama-nano", None, tmp_path / "cache")
    again = prepare_data(DataSection(train=twice, validation=None), 0, "preset:llama-nano", None, tmp_path / "cache")
    assert (first.notes, again.from_cache, again.fingerprint) == ((), True, first.fingerprint)
    assert "count once" in again.notes[0]


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


def a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize(
    ("make", "what"), [(a_pipe, "a named pipe"), (a_socket, "a socket"), (a_device, "a device"), (Path.mkdir, "folder")]
)
@pytest.mark.parametrize("suffix", ["jsonl", "txt"])
def test_what_is_no_file_is_refused_without_waiting(tmp_path: Path, make: Callable[[Path], None], what: str, suffix: str) -> None:
    path = tmp_path / f"x.{suffix}"
    make(path)
    with pytest.raises(DataError, match=rf"{what}"):
        resolve(path)
    if what != "folder":
        with pytest.raises(DataError, match=what):
            resolve(f"{tmp_path}/*.{suffix}")
        with pytest.raises(OSError, match=what):
            open_regular(path)


@pytest.mark.parametrize(
    "source", ["\0", "a\0.jsonl", "memory://\0", "file://\0", "x" * 5_000, "/" + "x" * 5_000, "x" * 5_000 + "*", "memory://" + "x" * 5_000]
)
def test_sources_that_are_no_paths_are_refused_by_the_right_error(source: str) -> None:
    """What no request can hold is refused when it is parsed (64), what no file system takes when it is looked for (66)."""
    for rules in (1, 2):
        with pytest.raises(MemError) as caught:
            resolve(source, rules=rules)
        assert caught.value.exit_code == (64 if "\0" in source else 66)


def test_a_bound_on_size_is_kept(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    assert read_regular(tmp_path / "a", 5) == b"12345"
    with pytest.raises(NotPlain):
        read_regular(tmp_path / "a", 4)
