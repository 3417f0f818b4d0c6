"""Where the next flow of this process shows its progress: a terminal or a notebook cell says so, a deployment does not."""

from mem_core.infrastructure.telemetry.progress import Progress

_PROGRESS: list[Progress] = []


def show_progress_on(progress: Progress | None) -> None:
    """Where the next flow of this process shows its progress: the command line and notebooks set it, a deployment does not."""
    _PROGRESS[:] = [progress] if progress is not None else []


def progress_shown() -> bool:
    """Whether somebody has asked to see the next flow's progress."""
    return bool(_PROGRESS)


def shown_progress() -> Progress | None:
    """What was set last; None where nobody looks."""
    return _PROGRESS[0] if _PROGRESS else None
