"""A `Store` that is interrupted at a chosen call: the machine dies before it, after it, or half-way through an upload; or a hook runs."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeVar

from mem_core.infrastructure.storage.port import ObjectStat, Store, Unfinished
from mem_core.testing.memory_disk import Crashed

Result = TypeVar("Result")
Moment = Literal["before", "after", "half"]
MOMENTS: tuple[Moment, ...] = ("before", "after", "half")


class InterruptedStore:
    """Counts calls; at call `point` (from 0) it does what `moment` says, or calls `hook` and goes on. Dead afterwards if it crashed."""

    def __init__(self, store: Store, point: int, moment: Moment = "before", hook: Callable[[], None] | None = None) -> None:
        self._store, self._left, self._moment, self._hook = store, point, moment, hook
        self.happened = False
        self._dead = False

    @property
    def url(self) -> str:
        return self._store.url

    def read(self, key: str) -> bytes:
        return self._around(lambda: self._store.read(key))

    def write(self, key: str, data: bytes) -> None:
        self._around(lambda: self._store.write(key, data))

    def create(self, key: str, data: bytes) -> None:
        self._around(lambda: self._store.create(key, data))

    def put_file(self, source: Path, key: str, *, sha256: str = "") -> ObjectStat:
        return self._around(
            lambda: self._store.put_file(source, key, sha256=sha256),
            half=lambda: self._store.write(key, source.read_bytes()[: source.stat().st_size // 2]),
        )

    def get_file(self, key: str, target: Path) -> None:
        self._around(lambda: self._store.get_file(key, target))

    def list(self, prefix: str) -> tuple[ObjectStat, ...]:
        return self._around(lambda: self._store.list(prefix))

    def stat(self, key: str) -> ObjectStat | None:
        return self._around(lambda: self._store.stat(key))

    def delete(self, key: str) -> bool:
        return self._around(lambda: self._store.delete(key))

    def unfinished(self, prefix: str) -> tuple[Unfinished, ...]:
        return self._around(lambda: self._store.unfinished(prefix))

    def abandon(self, unfinished: Unfinished) -> None:
        self._around(lambda: self._store.abandon(unfinished))

    def _around(self, act: Callable[[], Result], half: Callable[[], object] | None = None) -> Result:
        now = self._left == 0
        self._left -= 1
        if self._dead:
            raise Crashed
        if not now:
            return act()
        self.happened = True
        if self._hook is not None:
            self._hook()
            return act()
        self._dead = True
        if self._moment == "half" and half is not None:
            half()
        elif self._moment == "after":
            act()
        raise Crashed
