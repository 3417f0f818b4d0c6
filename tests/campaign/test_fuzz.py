"""A share of the fuzz in every test run, the rest marked slow; and that the law it holds cases to can be broken."""

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fuzz import SUBJECTS, cases
from law import Broken, Case, time_limit, try_cases
from mutations import PLACES, SECRET, bent_bytes, bent_json, put_in_place

from mem_core.domain.errors import DataError, InternalError

SHARE = 5


@pytest.mark.parametrize("subject", SUBJECTS)
def test_a_share_of_the_fuzz_ends_in_success_or_a_documented_refusal(subject: str, tmp_path: Path) -> None:
    tally = try_cases(cases(subject, range(SUBJECTS[subject][2] // SHARE), tmp_path))
    assert tally.broken == [], tally.table()
    assert tally.cases >= 40


@pytest.mark.slow
@pytest.mark.parametrize("subject", SUBJECTS)
def test_the_rest_of_the_fuzz_does_too(subject: str, tmp_path: Path) -> None:
    whole = SUBJECTS[subject][2]
    tally = try_cases(cases(subject, range(whole // SHARE, whole), tmp_path))
    assert tally.broken == [], tally.table()


def test_the_whole_fuzz_has_two_thousand_cases() -> None:
    assert sum(number for _, _, number in SUBJECTS.values()) >= 2_000


def refuse() -> str:
    raise DataError("no", remedy="Mend it.")


def own_fault() -> str:
    raise InternalError("a bug", remedy="Report it.")


def stumble() -> str:
    raise KeyError("x")


def be_wrong() -> str:
    raise Broken("other rows")


def say_it() -> str:
    print(SECRET)
    return "taken"


def hang() -> str:
    with time_limit(0.05):
        time.sleep(5)
    return "taken"


@pytest.mark.parametrize(
    ("run", "outcome", "breaks"),
    [
        (lambda: "taken", "taken", False),
        (refuse, "refused 66", False),
        (own_fault, "refused 70", True),
        (stumble, "TRACEBACK", True),
        (be_wrong, "WRONG", True),
        (say_it, "taken", True),
        (hang, "HANG", True),
    ],
)
def test_the_law_tells_what_breaks_it(run: Callable[[], str], outcome: str, breaks: bool) -> None:
    tally = try_cases([Case("one", "kind", "again", run)])
    assert tally.ended == {("kind", outcome): 1}
    assert bool(tally.broken) is breaks
    assert ("again" in tally.table()) is breaks


@pytest.mark.parametrize("seed", range(20))
def test_the_same_seed_draws_the_same_damage(seed: int) -> None:
    content, value = bytes(range(256)) * 4, {"a": [1, 2, {"b": "c"}], "d": {}}
    first, second = ((bent_bytes(draw, content), repr(bent_json(draw, value))) for draw in (random.Random(seed), random.Random(seed)))
    assert first == second
    assert value == {"a": [1, 2, {"b": "c"}], "d": {}}, "what was given is not changed"


@pytest.mark.parametrize("kind", PLACES)
def test_what_is_put_in_a_file_s_place_is_there(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "file"
    path.write_text("x")
    put_in_place(random.Random(0), path, kind, [path])
    assert path.is_symlink() or path.exists()
    assert not (path.is_file() and not path.is_symlink() and path.stat().st_size < 10)
