"""Every cached thing is made again where it does not prove itself, whatever stands in its place; nothing waits, nothing is believed."""

import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mem_core.domain.request import DataSection
from mem_core.infrastructure.storage.sealed import read_sealed, remove_whatever, sealed
from mem_core.runtime.data.encoding.cache import HashCache, load_prepared
from mem_core.runtime.data.encoding.prepare import prepare_data
from mem_core.runtime.data.encoding.tokenize_process import prepare_here
from mem_core.runtime.data.reading.sources import resolve_files
from mem_core.runtime.data.values import PreparedData, PrepareJob

NAME = "{name}"  # the folder of the one entry, in the paths below


class Cache:
    """One prepared file in a cache, with what every repetition has to give."""

    def __init__(self, root: Path, rules: int = 3) -> None:
        self.path = root / "a.jsonl"
        self.path.write_text("".join(json.dumps({"text": f"row {n} of some text"}) + "\n" for n in range(60)))
        self.folder = root / "cache"
        self.data = DataSection(train=(str(self.path),), validation=0.3, sequence_length=16)
        self.rules = rules
        self.first = self.prepare()
        self.content = self.rows()
        time.sleep(0.06)  # longer than a tick of the file's clock, so that its hash is remembered
        self.prepare()

    def prepare(self) -> PreparedData:
        job = PrepareJob(
            data=self.data, tokenizer_source="preset:llama-nano", vocab_size=None, cache_dir=self.folder, parent_pid=0, rules=self.rules
        )
        return prepare_here(job, lambda progress: None)

    def rows(self) -> dict[str, bytes]:
        folder = self.folder / self.first.fingerprint
        return {f"{part}/{path.name}": path.read_bytes() for part in ("train", "validation") for path in (folder / part).iterdir()}

    def place(self, name: str) -> Path:
        return self.folder / name.format(name=self.first.fingerprint)

    def assert_whole(self) -> None:
        again = self.prepare()
        assert again.model_copy(update={"from_cache": False}) == self.first
        assert self.rows() == self.content
        assert self.prepare().from_cache


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path)


def gone(path: Path) -> None:
    remove_whatever(path)


def pipe(path: Path) -> None:
    remove_whatever(path)
    os.mkfifo(path)


def folder(path: Path) -> None:
    remove_whatever(path)
    (path / "inside").mkdir(parents=True)


def link_to_itself(path: Path) -> None:
    remove_whatever(path)
    path.symlink_to(path)


def device(path: Path) -> None:
    remove_whatever(path)
    path.symlink_to("/dev/zero")


def empty(path: Path) -> None:
    remove_whatever(path)
    path.touch()


def nested(path: Path) -> None:
    remove_whatever(path)
    path.write_text("[" * 200_000)


def numbers(path: Path) -> None:
    remove_whatever(path)
    path.write_text('{"text": 5, "sha256": {}, "a": 1}')


DAMAGES = (gone, pipe, folder, link_to_itself, device, empty, nested, numbers)
PLACES = (
    f"{NAME}/data.json", f"{NAME}/train/index.json", f"{NAME}/train/lengths.i32", f"{NAME}/train/tokens-00000.bin",
    f"{NAME}/validation/index.json", f"{NAME}/validation", f"{NAME}/train", NAME, "file-hashes.json", ".lock", ".preparing-left",
)  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_whatever_stands_in_its_place_is_made_again(cache: Cache, place: str, damage: Callable[[Path], None]) -> None:
    damage(cache.place(place))
    cache.assert_whole()


@pytest.mark.parametrize("name", ["data.json", "train/index.json", "validation/index.json", "train/trained.i32", "validation/offsets.i64"])
def test_one_flipped_bit_is_seen_wherever_it_is(cache: Cache, name: str) -> None:
    """Places all over the file; a name, a number, a digest or the fingerprint itself."""
    path = cache.place(f"{NAME}/{name}")
    whole = path.read_bytes()
    rng = random.Random(name)
    for _ in range(20):
        at, bit = rng.randrange(len(whole)), 1 << rng.randrange(8)
        path.write_bytes(whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :])
        assert load_prepared(cache.folder, cache.first.fingerprint) is None
        assert not path.exists()
        cache.prepare()
        assert path.read_bytes() == whole


def test_a_flipped_bit_in_a_remembered_hash_is_never_taken_for_changed_data(cache: Cache) -> None:
    path = cache.folder / "file-hashes.json"
    whole = path.read_bytes()
    (source,) = resolve_files([str(cache.path)], cache.data, "data.train")
    digest = HashCache(cache.folder).get(source)
    assert digest is not None
    rng = random.Random(0)
    for _ in range(300):
        at, bit = rng.randrange(len(whole)), 1 << rng.randrange(8)
        path.write_bytes(whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :])
        assert HashCache(cache.folder).get(source) in (None, digest)
    path.write_bytes(json.dumps({str(cache.path): [source.stamp, "0" * 64]}).encode())
    assert HashCache(cache.folder).get(source) is None, "hashes of older versions, which prove nothing"


def test_shards_of_older_versions_are_believed_where_they_agree(tmp_path: Path) -> None:
    """Results without a seal: a run that was born with them keeps its tokens, unless a number differs between two files."""
    cache = Cache(tmp_path, rules=1)
    path = cache.place(f"{NAME}/data.json")
    text = read_sealed(path, 2**20)
    assert text is not None
    old = json.loads(text)
    for field in ("index_sha256", "encoding"):
        del old[field]
    path.write_text(json.dumps(old))
    found = load_prepared(cache.folder, cache.first.fingerprint)
    assert found is not None
    assert found.train_dir == cache.first.train_dir
    for field, value in (("num_samples", 1), ("max_token_id", 5), ("fingerprint", "0" * 64), ("num_validation_samples", 2)):
        path.write_text(json.dumps({**old, field: value}))
        assert load_prepared(cache.folder, cache.first.fingerprint) is None
        cache.prepare()


def test_the_caller_is_never_told_that_the_data_has_changed(tmp_path: Path) -> None:
    """Through the process, as a run does it: the same fingerprint after each damage, and no error."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "some text that is long enough"}\n' * 5)
    data = DataSection(train=(str(path),), validation=None)
    first = prepare_data(data, 0, "preset:llama-nano", None, tmp_path / "cache")
    for damage, name in (
        (gone, f"{first.fingerprint}/data.json"),
        (folder, "file-hashes.json"),
        (pipe, ".lock"),
        (nested, "file-hashes.json"),
    ):
        damage(tmp_path / "cache" / name)
        assert prepare_data(data, 0, "preset:llama-nano", None, tmp_path / "cache").fingerprint == first.fingerprint


def test_a_seal_holds_for_its_text_alone(tmp_path: Path) -> None:
    (tmp_path / "a").write_text(sealed("text"))
    assert read_sealed(tmp_path / "a", 1_000) == "text"
    assert read_sealed(tmp_path / "a", 10) is None
    (tmp_path / "a").write_text(sealed("text").replace('"text": "text"', '"text": "Text"'))
    assert read_sealed(tmp_path / "a", 1_000) is None
