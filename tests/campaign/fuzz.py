"""A fuzz of all that others write and MEM reads: requests, policies, model folders, planner replies, run records and caches.

    python tests/campaign/fuzz.py --subject request --seed 17 --cases 500

Each case is drawn from its subject and its own number, so that one replays with its number as the seed and `--cases 1`.
"""

import argparse
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from fuzz_inputs import a_model, a_policy, a_reply, a_request, model_base
from fuzz_stores import a_cache, a_record, cache_base, record_base
from law import Case, try_cases

Draw = Callable[[random.Random, Path, Path], Callable[[], str]]

SUBJECTS: dict[str, tuple[Draw, Callable[[Path], None], int]] = {
    "request": (a_request, lambda folder: None, 900),
    "policy": (a_policy, lambda folder: None, 200),
    "reply": (a_reply, lambda folder: None, 900),
    "model": (a_model, model_base, 600),
    "record": (a_record, record_base, 300),
    "cache": (a_cache, cache_base, 300),
}
"""Name -> what is drawn, what it is drawn from, how many cases the whole fuzz has."""


def cases(subject: str, seeds: range, folder: Path) -> Iterator[Case]:
    """One for each seed. `folder` is made, used and left behind."""
    draw_case, make_base, _ = SUBJECTS[subject]
    base = folder / f"{subject}-base"
    base.mkdir(parents=True)
    make_base(base)
    for seed in seeds:
        again = f"python tests/campaign/fuzz.py --subject {subject} --seed {seed} --cases 1"
        yield Case(f"{subject} {seed}", subject, again, partial(_one, draw_case, f"{subject}-{seed}", base, folder / f"{subject}-case"))


def _one(draw_case: Draw, seed: str, base: Path, folder: Path) -> str:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return draw_case(random.Random(seed), base, folder)()


def main() -> int:
    """Run, print the table; 1 where any case broke the law."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--subject", choices=[*SUBJECTS, "all"], default="all")
    parser.add_argument("--seed", type=int, default=0, help="number of the first case")
    parser.add_argument("--cases", type=int, default=None, help="cases of each subject; default the whole fuzz")
    arguments = parser.parse_args()
    chosen = list(SUBJECTS) if arguments.subject == "all" else [arguments.subject]
    with tempfile.TemporaryDirectory() as folder:
        tally = try_cases(
            case
            for subject in chosen
            for case in cases(subject, range(arguments.seed, arguments.seed + (arguments.cases or SUBJECTS[subject][2])), Path(folder))
        )
    print(tally.table())
    return 1 if tally.broken else 0


if __name__ == "__main__":
    sys.exit(main())
