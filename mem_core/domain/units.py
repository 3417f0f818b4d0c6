"""Small shared vocabulary: the frozen base value, and how bytes and durations are read and shown."""

from pydantic import BaseModel, ConfigDict


class Value(BaseModel):
    """A frozen domain value: valid from birth, unknown keys refused, equal by content."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings", protected_namespaces=())


_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}


def format_bytes(size_bytes: float) -> str:
    """`1536` -> `1.5 KiB`."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError("unreachable: the last unit returns")


def parse_bytes(text: int | str) -> int:
    """`"6GiB"` -> 6442450944.

    Raises:
        ValueError: not a positive number with an optional unit.
    """
    raw = str(text).strip().lower()
    number = raw.rstrip("kmgtib ").strip()
    unit = raw[len(number) :].strip()
    try:
        size_bytes = int(float(number) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError) as exc:
        raise ValueError(f"{text!r} is not a size; write bytes or a number with KiB, MiB, GiB, such as 6GiB") from exc
    if size_bytes <= 0:
        raise ValueError(f"{text!r} is not a positive size")
    return size_bytes


def format_short(duration_s: float) -> str:
    """As `format_seconds`, and milliseconds below a second: `0.042` -> `42 ms`."""
    return f"{duration_s * 1e3:.0f} ms" if duration_s < 1 else format_seconds(duration_s)


def format_seconds(duration_s: float) -> str:
    """`3725.2` -> `1 h 02 min`; `8.14` -> `8.1 s`."""
    if duration_s < 60:
        return f"{duration_s:.1f} s"
    minutes, seconds = divmod(round(duration_s), 60)
    if minutes < 60:
        return f"{minutes} min {seconds:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"
