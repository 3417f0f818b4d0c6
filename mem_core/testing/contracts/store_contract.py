"""What every `Store` must do, as tests: subclass `StoreContract` and give a `store` fixture."""

import threading
from pathlib import Path

import pytest

from mem_core.domain.errors import InternalError
from mem_core.infrastructure.storage.port import AlreadyExists, KeyMissing, Store


class StoreContract:
    """Needs fixtures `store` (empty) and pytest's `tmp_path`."""

    def test_write_then_read(self, store: Store) -> None:
        store.write("a/b/c.json", b"one")
        assert store.read("a/b/c.json") == b"one"

    def test_write_replaces(self, store: Store) -> None:
        store.write("a", b"long first content")
        store.write("a", b"2")
        assert store.read("a") == b"2"

    def test_read_of_nothing(self, store: Store) -> None:
        with pytest.raises(KeyMissing):
            store.read("none/at/all")

    def test_create_only_once(self, store: Store) -> None:
        store.create("m/manifest.json", b"first")
        with pytest.raises(AlreadyExists):
            store.create("m/manifest.json", b"second")
        assert store.read("m/manifest.json") == b"first"

    def test_create_has_one_winner(self, store: Store) -> None:
        outcomes: list[str] = []
        start = threading.Barrier(4)

        def race(number: int) -> None:
            start.wait()
            try:
                store.create("race", b"%d" % number)
                outcomes.append(f"won {number}")
            except AlreadyExists:
                outcomes.append("lost")

        threads = [threading.Thread(target=race, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        winners = [outcome for outcome in outcomes if outcome != "lost"]
        assert winners == [f"won {store.read('race').decode()}"]

    def test_files_come_back_the_same(self, store: Store, tmp_path: Path) -> None:
        source, target = tmp_path / "source.bin", tmp_path / "target.bin"
        for size in (0, 1, 100_000):
            source.write_bytes(bytes(range(256)) * (size // 256 + 1) if size else b"")
            stat = store.put_file(source, f"files/{size}.bin")
            assert stat.size_bytes == source.stat().st_size
            store.get_file(f"files/{size}.bin", target)
            assert target.read_bytes() == source.read_bytes()
        assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["source.bin", "target.bin"]

    def test_get_of_nothing_leaves_the_target_alone(self, store: Store, tmp_path: Path) -> None:
        target = tmp_path / "target"
        target.write_bytes(b"old")
        with pytest.raises(KeyMissing):
            store.get_file("none", target)
        assert target.read_bytes() == b"old"
        assert list(tmp_path.glob(".partial*")) == []

    def test_put_twice_is_the_same_as_once(self, store: Store, tmp_path: Path) -> None:
        """A retried upload neither nests nor leaves a second object."""
        source = tmp_path / "source"
        source.write_bytes(b"x" * 1000)
        for _ in range(2):
            store.put_file(source, "deep/er/file")
        assert [item.key for item in store.list("")] == ["deep/er/file"]

    def test_list_is_by_whole_folders_and_sorted(self, store: Store) -> None:
        for key in ("s/10/x", "s/1/z", "s/1/.hidden", "s/1/y/deep", "t/1"):
            store.write(key, key.encode())
        assert [(item.key, item.size_bytes) for item in store.list("s/1")] == [("s/1/.hidden", 11), ("s/1/y/deep", 10), ("s/1/z", 5)]
        assert [item.key for item in store.list("")] == ["s/1/.hidden", "s/1/y/deep", "s/1/z", "s/10/x", "t/1"]
        assert store.list("nothing/here") == ()

    def test_list_and_stat_are_never_stale(self, store: Store) -> None:
        """What was listed as absent appears as soon as it is there, and the other way round."""
        assert store.list("live") == ()
        assert store.stat("live/a") is None
        store.write("live/a", b"12345")
        assert [item.key for item in store.list("live")] == ["live/a"]
        stat = store.stat("live/a")
        assert stat is not None
        assert stat.size_bytes == 5
        store.delete("live/a")
        assert store.list("live") == ()
        assert store.stat("live/a") is None

    def test_stat_of_a_folder_is_none(self, store: Store) -> None:
        store.write("folder/file", b"1")
        assert store.stat("folder") is None

    def test_delete_is_tolerant(self, store: Store) -> None:
        store.write("a", b"1")
        assert [store.delete("a"), store.delete("a"), store.delete("never/was")] == [True, False, False]

    @pytest.mark.parametrize("key", ["", "/a", "a/../b", "..", "a//b", "a\\b", "./a", "a\0b"])
    def test_keys_stay_inside(self, store: Store, key: str) -> None:
        with pytest.raises(InternalError):
            store.write(key, b"x")
