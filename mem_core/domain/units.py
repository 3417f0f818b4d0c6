"""Small shared vocabulary: the frozen base value, and how bytes and durations are shown to people."""

from pydantic import BaseModel, ConfigDict


class Value(BaseModel):
    """A frozen domain value: valid from birth, unknown keys refused, equal by content."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings", protected_namespaces=())


def format_bytes(size_bytes: float) -> str:
    """`1536` -> `1.5 KiB`."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError("unreachable: the last unit returns")


def format_seconds(duration_s: float) -> str:
    """`3725.2` -> `1 h 02 min`; `8.14` -> `8.1 s`."""
    if duration_s < 60:
        return f"{duration_s:.1f} s"
    minutes, seconds = divmod(round(duration_s), 60)
    if minutes < 60:
        return f"{minutes} min {seconds:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"
