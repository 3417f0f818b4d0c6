"""What the measurements share: `--smoke`, which shows in seconds that one still runs, and the spread beside every median."""

import argparse
import statistics
from collections.abc import Sequence


def parsed(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None, **smoke: object) -> argparse.Namespace:
    """The arguments; `smoke` stands in for those that decide how long it takes. Its figures mean nothing."""
    parser.add_argument("--smoke", action="store_true", help="as short as possible: shows that it runs, measures nothing")
    arguments = parser.parse_args(argv)
    if arguments.smoke:
        vars(arguments).update(smoke)
    return arguments


def spread(values: Sequence[float], digits: int = 3) -> str:
    """`0.970 (0.880 to 1.001, 9 values)`."""
    if not values:
        return "no value"
    low, high = min(values), max(values)
    return f"{statistics.median(values):,.{digits}f} ({low:,.{digits}f} to {high:,.{digits}f}, {len(values)} values)"
