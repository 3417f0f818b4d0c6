"""The wish to stop: set from a signal handler or another thread, read by the supervising loop a few times a second."""


class StopFlag:
    """Who asked first for the end of an attempt; nobody so far where it is false."""

    def __init__(self) -> None:
        self._by = ""

    @property
    def by(self) -> str:
        """Who asked first, in words; empty while nobody has."""
        return self._by

    def ask(self, by: str) -> None:
        """Ask for the end. The first who asks is remembered; an empty name asks for nothing."""
        self._by = self._by or by

    def __bool__(self) -> bool:
        return bool(self._by)
