"""Preparation as it really runs: a child process, killed at any time, cached, bounded in memory."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from mem_core.domain.errors import DataError, EnvironmentUnfit, RequestError, StoreUnavailable
from mem_core.domain.request import DataSection
from mem_core.runtime.data.child import ask_child
from mem_core.runtime.data.encoding.prepare import PROGRAM, prepare_data
from mem_core.runtime.data.serving.dataset import TokenDataset
from mem_core.runtime.data.values import PreparedData, PrepareJob, PrepareProgress

NANO = "preset:llama-nano"
WAIT_S = 30

SCRIPT = """
import sys
from pathlib import Path
from mem_core.domain.request import DataSection
from mem_core.runtime.data.child import ask_child
from mem_core.runtime.data.encoding.prepare import PROGRAM, prepare_data

data = DataSection.model_validate_json(sys.argv[1])
prepared = prepare_data(data, 0, "preset:llama-nano", 384, Path(sys.argv[2]), lambda p: print(p.model_dump_json(), flush=True))
print(prepared.model_dump_json(), flush=True)
"""


@pytest.fixture
def many_rows(tmp_path: Path) -> DataSection:
    """A file that takes a second or two, so that there is a middle to kill in."""
    path = tmp_path / "many.jsonl"
    row = json.dumps({"text": "some words to be tokenised " * 40})
    path.write_text(f"{row}\n" * 12_000)
    return DataSection(train=(str(path),), validation=None)


def start(data: DataSection, cache_dir: Path, **environment: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", SCRIPT, data.model_dump_json(), str(cache_dir)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment})


def shards(prepared: PreparedData) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(Path(prepared.train_dir).iterdir()))


def visible_folders(cache_dir: Path) -> list[str]:
    return [entry.name for entry in cache_dir.iterdir() if entry.is_dir() and not entry.name.startswith(".")]


def staging_folders(cache_dir: Path) -> list[Path]:
    return list(cache_dir.glob(".preparing-*"))


def children() -> set[psutil.Process]:
    """This process's children now: other tests' shared fork server or dead helpers may be among them, so only differences count."""
    return set(psutil.Process().children())


def test_prepared_once_then_found_at_once(tmp_path: Path, many_rows: DataSection) -> None:
    """Progress is told and ends at all bytes; the second call starts no process and reads no file."""
    told: list[PrepareProgress] = []
    first = prepare_data(many_rows, 0, NANO, 384, tmp_path / "cache", told.append)
    assert not first.from_cache
    assert list(dict.fromkeys(progress.phase for progress in told)) == ["hashing", "tokenizing", "writing"]
    encoded = [progress for progress in told if progress.phase == "tokenizing"][-1]
    assert encoded.bytes_done == encoded.bytes_total == Path(many_rows.train_paths[0]).stat().st_size
    assert encoded.rows == first.num_documents == 12_000
    assert told[-1].bytes_total == sum(path.stat().st_size for path in Path(first.train_dir).iterdir() if path.name != "index.json")
    fractions = [progress.bytes_done for progress in told if progress.phase == "tokenizing"]
    assert fractions == sorted(fractions)
    told.clear()
    again = prepare_data(many_rows, 1, NANO, 384, tmp_path / "cache", told.append)
    assert again == first.model_copy(update={"from_cache": True})
    assert told == []
    assert len(TokenDataset.open(again.train_dir)) == again.num_samples
    assert staging_folders(tmp_path / "cache") == []


def test_a_killed_flow_takes_the_tokenising_process_along_and_leaves_nothing_trusted(tmp_path: Path, many_rows: DataSection) -> None:
    cache_dir = tmp_path / "cache"
    flow = start(many_rows, cache_dir)
    assert flow.stdout is not None
    assert flow.stderr is not None
    for line in flow.stdout:
        if '"tokenizing"' in line:
            break
    (worker,) = psutil.Process(flow.pid).children()
    assert len(staging_folders(cache_dir)) == 1
    flow.kill()
    flow.wait()
    flow.stdout.close()
    flow.stderr.close()
    worker.wait(WAIT_S)
    assert visible_folders(cache_dir) == []
    again = prepare_data(many_rows, 0, NANO, 384, cache_dir)
    assert not again.from_cache
    assert staging_folders(cache_dir) == [], "the dead process's leftovers are gone"
    assert shards(again) == shards(prepare_data(many_rows, 0, NANO, 384, tmp_path / "other"))


def test_killed_again_and_again_it_goes_on_to_the_same_shards(tmp_path: Path, many_rows: DataSection) -> None:
    """Three kills at moments of its work, each later than a mark; the marks of one are where the next begins."""
    cache_dir = tmp_path / "cache"
    job = PrepareJob(data=many_rows, tokenizer_source=NANO, vocab_size=384, cache_dir=cache_dir, parent_pid=os.getpid(), mark_every_s=0.05)
    others = children()
    kills: list[int] = []
    notes: list[str] = []

    def kill(progress: PrepareProgress) -> None:
        notes.extend([progress.note] if progress.note else [])
        if progress.phase == "tokenizing" and progress.bytes_done > (len(kills) + 1) * progress.bytes_total // 5:
            kills.append(progress.bytes_done)
            for child in children() - others:
                child.send_signal(signal.SIGKILL)

    for number in range(3):
        with pytest.raises(EnvironmentUnfit, match="killed by SIGKILL"):
            ask_child(PROGRAM, job.model_dump_json(), lambda raw: kill(PrepareProgress.model_validate(raw)))
        assert len(kills) >= number + 1
        assert len(staging_folders(cache_dir)) == 1
        assert visible_folders(cache_dir) == []
    again = prepare_data(many_rows, 0, NANO, 384, cache_dir, lambda progress: notes.extend([progress.note] if progress.note else []))
    assert len(notes) == 3
    assert all("goes on after" in note for note in notes)
    assert shards(again) == shards(prepare_data(many_rows, 0, NANO, 384, tmp_path / "other"))
    assert staging_folders(cache_dir) == []


def test_a_killed_tokenising_process_is_an_error_with_a_remedy(tmp_path: Path, many_rows: DataSection) -> None:
    others = children()

    def kill(progress: PrepareProgress) -> None:
        if progress.phase == "tokenizing":
            for child in children() - others:
                child.send_signal(signal.SIGKILL)

    with pytest.raises(EnvironmentUnfit, match="killed by SIGKILL"):
        prepare_data(many_rows, 0, NANO, 384, tmp_path / "cache", kill)
    assert visible_folders(tmp_path / "cache") == []


def test_a_live_preparation_is_not_swept_away_by_another(tmp_path: Path, many_rows: DataSection) -> None:
    """Two at once on one cache: both end well with the same data, one folder stays."""
    cache_dir = tmp_path / "cache"
    both = [start(many_rows, cache_dir) for _ in range(2)]
    answers = [process.communicate(timeout=WAIT_S * 4) for process in both]
    assert [process.returncode for process in both] == [0, 0], answers[0][1] + answers[1][1]
    ends = [PreparedData.model_validate_json(out.splitlines()[-1]) for out, _ in answers]
    assert ends[0].fingerprint == ends[1].fingerprint
    assert visible_folders(cache_dir) == [ends[0].fingerprint]
    assert staging_folders(cache_dir) == []


def test_interrupting_the_caller_ends_the_child(tmp_path: Path, many_rows: DataSection) -> None:
    others = children()
    started: set[psutil.Process] = set()

    def interrupt(progress: PrepareProgress) -> None:
        started.update(children() - others)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_data(many_rows, 0, NANO, 384, tmp_path / "cache", interrupt)
    assert len(started) == 1, "the interruption came while the child was at work"
    assert not children() & started


def test_errors_cross_the_process_border_whole(tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_bytes(b'{"text": "fine"}\n' * 89 + b'{"text": "it\x92s"}\n' + b'{"text": "fine"}\n' * 10)
    with pytest.raises(DataError) as caught:
        prepare_data(DataSection(train=(str(bad),)), 0, NANO, 384, tmp_path / "cache")
    assert f"{bad}:90: not UTF-8: byte 0x92 at byte offset {17 * 89 + 12} of the file" in str(caught.value)
    assert caught.value.exit_code == 66
    with pytest.raises(RequestError, match="unknown preset"):
        prepare_data(DataSection(train=(str(bad),)), 0, "preset:llama-huge", 384, tmp_path / "cache")


def test_the_locale_does_not_matter(tmp_path: Path) -> None:
    """Report 128 with LC_ALL=C and PYTHONUTF8=0: text beyond ASCII is read, the bad byte is found."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "größer und 漢字 und mehr davon"}\n', encoding="utf-8")
    data = DataSection(train=(str(path),), validation=None, sequence_length=16)
    out, err = start(data, tmp_path / "cache", LC_ALL="C", PYTHONUTF8="0").communicate(timeout=WAIT_S)
    here = prepare_data(data, 0, NANO, 384, tmp_path / "other")
    assert err == ""
    assert PreparedData.model_validate_json(out.splitlines()[-1]).num_tokens == here.num_tokens
    path.write_bytes(path.read_bytes() + b'{"text": "\x92"}\n')
    _, err = start(data, tmp_path / "cache", LC_ALL="C", PYTHONUTF8="0").communicate(timeout=WAIT_S)
    assert "2: not UTF-8: byte 0x92" in err


def test_a_cache_that_cannot_be_written_is_the_stores_fault(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "some text"}\n')
    (tmp_path / "file").touch()
    with pytest.raises(StoreUnavailable, match="prepared data cannot be written"):
        prepare_data(DataSection(train=(str(path),)), 0, NANO, 384, tmp_path / "file" / "cache")


@pytest.mark.parametrize("space", [" ", ""])
def test_one_line_of_20_megabytes_takes_bounded_memory(tmp_path: Path, space: str) -> None:
    """Report 130: below 500 MB for 100 short rows and one of 20 MB, with and without spaces."""
    path = tmp_path / "long.jsonl"
    short = '{"text": "short"}\n' * 50
    path.write_text(short + json.dumps({"text": f"words{space}" * (20_000_000 // (5 + len(space)))}) + "\n" + short)
    data = DataSection(train=(str(path),), validation=None)
    measured = SCRIPT + "import resource; print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", measured, data.model_dump_json(), str(tmp_path / "cache")], capture_output=True, text=True, timeout=120
    )
    *_, prepared, peak_kib = done.stdout.splitlines()
    print(f"{time.monotonic() - begin:.1f} s, peak {int(peak_kib) / 1024:.0f} MiB")
    assert json.loads(prepared)["num_tokens"] > 19_900_000
    assert int(peak_kib) * 1024 < 500e6


def test_the_callers_process_stays_light() -> None:
    """The flow and the command import preparation: none of the heavy libraries may come along."""
    heavy = "('torch', 'transformers', 'tokenizers', 'fsspec')"
    code = f"import sys, mem_core.runtime.data.encoding.prepare; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_S, check=True)
    assert done.stdout.strip() == "[]"
