"""A gigabyte of text prepared with bounded memory and killed -9 on the way: figures, and that nothing is lost or different.

    python tests/benchmarks/preparation_killed.py [--megabytes 1000] [--kills 3] [--twin] [--folder /tmp]

Makes rows of Python's own sources, in pieces drawn by seed, in a temporary folder that is removed at the end. Each attempt is a process of
its own, killed at an even share of the bytes; the last one ends. Printed: seconds of each attempt and where it went on, the peak of
resident memory of its process tree, what a kill costs, and of each attempt the ratio to `tokenizers.encode_batch` on a part of the same
rows, measured right before and right after it. With --twin the shards are held against those of a preparation that nobody disturbed.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import psutil
from measuring import parsed, spread
from preparation import PIECE_CHARS, texts, theirs, trained

from mem_core.runtime.data.values import PreparedData, PrepareJob, PrepareProgress
from mem_core.testing.tokenizer_folders import tokenizer_folder

SEED = 7
SAMPLE_MB = 20.0
LOOK_EVERY_S = 0.1
PROGRAM = """
import json, os, sys
from pathlib import Path
from mem_core.domain.request import DataSection
from mem_core.runtime.data.child import ask_child
from mem_core.runtime.data.encoding.prepare import PROGRAM
from mem_core.runtime.data.values import PrepareJob
folder, cache, mark_every_s = sys.argv[1:]
data = DataSection(train=(folder + "/rows.jsonl",), validation=None, sequence_length=512)
job = PrepareJob(data=data, tokenizer_source=folder + "/model", vocab_size=None, cache_dir=Path(cache), parent_pid=os.getpid(),
    mark_every_s=float(mark_every_s))
print(json.dumps(ask_child(PROGRAM, job.model_dump_json(), lambda progress: print(json.dumps(progress), flush=True))), flush=True)
"""


@dataclass
class Attempt:
    """One process that prepared until it was killed or done."""

    began_s: float = field(default_factory=time.perf_counter)
    took_s: float = 0.0
    first_mb: float | None = None
    encoded_mb: float = 0.0
    encoding_s: float = 0.0
    peak_mib: float = 0.0
    prepared: PreparedData | None = None


def make_rows(path: Path, megabytes: float) -> list[str]:
    """A file of rows by seed; the first `SAMPLE_MB` of their texts."""
    pieces = list(texts(12_000_000))
    drawn, sample, sample_chars, written = random.Random(SEED), list[str](), 0, 0
    with path.open("w", encoding="utf-8") as file:
        while written < megabytes * 1e6:
            one, other = drawn.choice(pieces), drawn.choice(pieces)
            at = drawn.randrange(PIECE_CHARS)
            text = (one[at:] + other[:at]).strip() or "nothing"
            line = json.dumps({"text": text}, ensure_ascii=False) + "\n"
            file.write(line)
            written += len(line.encode())
            if sample_chars < SAMPLE_MB * 1e6:
                sample.append(text)
                sample_chars += len(text)
    return sample


def attempt(folder: Path, cache: Path, mark_every_s: float, kill_at: float | None) -> Attempt:
    """Prepare; at a share `kill_at` of the bytes the process is killed."""
    seen = Attempt()
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(folder), str(cache), str(mark_every_s)], stdout=subprocess.PIPE, text=True
    )
    watch = threading.Thread(target=_watch, args=(process.pid, seen), daemon=True)
    watch.start()
    assert process.stdout is not None
    encoding_began_s = 0.0
    for line in process.stdout:
        if '"phase"' in line[:200]:
            progress = PrepareProgress.model_validate_json(line)
            if progress.note:
                print(f"    {progress.note}")
            elif progress.phase == "tokenizing":
                if seen.first_mb is None:
                    seen.first_mb, encoding_began_s = progress.bytes_done / 1e6, time.perf_counter()
                seen.encoded_mb = progress.bytes_done / 1e6 - seen.first_mb
                seen.encoding_s = time.perf_counter() - encoding_began_s
                if kill_at is not None and progress.bytes_done >= kill_at * progress.bytes_total:
                    process.send_signal(signal.SIGKILL)
                    break
        elif line.strip():
            seen.prepared = PreparedData.model_validate_json(line)
    process.stdout.close()
    process.wait()
    watch.join()
    seen.took_s = time.perf_counter() - seen.began_s
    return seen


def _watch(pid: int, seen: Attempt) -> None:
    while psutil.pid_exists(pid):
        try:
            root = psutil.Process(pid)
            if root.status() == psutil.STATUS_ZOMBIE:
                return
            total = sum(process.memory_info().rss for process in (root, *root.children(recursive=True)))
            seen.peak_mib = max(seen.peak_mib, total / 2**20)
        except psutil.Error:
            pass
        time.sleep(LOOK_EVERY_S)


def digest(prepared: PreparedData) -> str:
    """SHA-256 over the names and bytes of the shards."""
    total = hashlib.sha256()
    for path in sorted(Path(prepared.train_dir).iterdir()):
        total.update(path.name.encode())
        with path.open("rb") as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()


def killed(folder: Path, kills: int, mark_every_s: float, alone: Callable[[], float]) -> PreparedData:
    """Attempts until one ends; prints the figures of each. `alone` measures `encode_batch`, in MB of rows a second."""
    attempts: list[Attempt] = []
    rates = [alone()]
    for number in range(kills + 1):
        share = (number + 1) / (kills + 1) if number < kills else None
        attempts.append(attempt(folder, folder / "cache", mark_every_s, share))
        one = attempts[-1]
        rates.append(alone())
        at = "not at all" if one.first_mb is None else f"at {one.first_mb:,.1f} MB"
        end = "done" if one.prepared else "killed -9"
        print(
            f"attempt {number + 1}: {one.took_s:,.1f} s, encoding began {at}, peak of the tree {one.peak_mib:,.0f} MiB, {end}", flush=True
        )
    prepared = attempts[-1].prepared
    assert prepared is not None, "the last attempt was not killed"
    assert all(one.first_mb for one in attempts[1:]), "each attempt after a kill went on from a mark"
    print(f"prepare ÷ encode_batch: {spread(ratios(attempts, rates))}; encode_batch alone {spread(rates)} MB/s")
    again_mb = sum(one.encoded_mb for one in attempts) - (folder / "rows.jsonl").stat().st_size / 1e6
    print(f"encoded again after {kills} kills: {again_mb:,.1f} MB; peak of any attempt {max(one.peak_mib for one in attempts):,.0f} MiB")
    print(f"seconds of all attempts: {sum(one.took_s for one in attempts):,.1f}")
    print(f"encoding and packing: {sum(one.encoded_mb for one in attempts) / sum(one.encoding_s for one in attempts):.3f} MB/s of rows")
    return prepared


def ratios(attempts: list[Attempt], rates: list[float]) -> list[float]:
    """Of each attempt its rate of encoding and packing ÷ the mean of `encode_batch` before and after it."""
    return [one.encoded_mb / one.encoding_s / (sum(pair) / 2) for one, pair in zip(attempts, pairwise(rates), strict=True)]


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--megabytes", type=float, default=1_000.0)
    parser.add_argument("--vocabulary", type=int, default=16_000)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--mark-every", type=float, default=PrepareJob.model_fields["mark_every_s"].default, help="seconds")
    parser.add_argument("--twin", action="store_true", help="prepare once more, undisturbed, and compare")
    parser.add_argument("--folder", default=tempfile.gettempdir())
    arguments = parsed(parser, megabytes=8.0, vocabulary=400, kills=2, mark_every=0.3, twin=True)
    needed_bytes = arguments.megabytes * 1e6 * (3.5 if arguments.twin else 2.5)
    if shutil.disk_usage(arguments.folder).free < needed_bytes + 2e9:
        raise SystemExit(f"{arguments.folder} has no room for {needed_bytes / 1e9:.1f} GB and 2 GB to spare")
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        sample = make_rows(folder / "rows.jsonl", arguments.megabytes)
        tokenizer = trained(sample, arguments.vocabulary)
        tokenizer_folder(folder / "model", tokenizer)
        size_mb = sum(len(json.dumps({"text": text}, ensure_ascii=False).encode()) + 1 for text in sample) / 1e6
        print(f"rows: {(folder / 'rows.jsonl').stat().st_size / 1e6:,.0f} MB; cores: {os.cpu_count()}", flush=True)
        alone = lambda: size_mb / theirs(tokenizer, sample)  # noqa: E731 - a measurement, taken again and again
        prepared = killed(folder, arguments.kills, arguments.mark_every, alone)
        print(f"sequences: {prepared.num_samples:,}, tokens: {prepared.num_tokens:,}")
        if arguments.twin:
            before = alone()
            twin = attempt(folder, folder / "twin", arguments.mark_every, None)
            assert twin.prepared is not None, "an undisturbed preparation ends"
            same = digest(twin.prepared) == digest(prepared)
            print(f"undisturbed: {twin.took_s:,.1f} s, {twin.encoded_mb / twin.encoding_s:.3f} MB/s, peak {twin.peak_mib:,.0f} MiB")
            print(f"undisturbed ÷ encode_batch: {spread(ratios([twin], [before, alone()]))}")
            print(f"the same shards to the bit: {'yes' if same else 'NO'}")
            assert same, "killed and undisturbed differ"


if __name__ == "__main__":
    main()
