"""A share of the damage campaign in every test run, the rest marked slow."""

from dataclasses import replace

import pytest
from damage import DAMAGES, GROUPS, Site, cases, drawn, make_site, only_sound_ones_are_good
from law import Broken, try_cases
from mutations import copy_tree

from mem_core.runtime.ranks.local.processes import ForkServer

LOOKED_AT, LOOKED_AT_SHARE = 2_400, 272
TRAINED, TRAINED_SHARE = 408, 12

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def site(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Site:
    """The run that all cases damage copies of."""
    return make_site(tmp_path_factory.mktemp("damage"), fork_server)


def test_every_file_of_a_run_and_its_caches_is_among_what_is_damaged(site: Site) -> None:
    files = site.files()
    assert set(files) == {label for label, _ in GROUPS}
    known = {name for names in files.values() for name in names}
    every = {path.relative_to(site.base).as_posix() for path in site.base.rglob("*") if path.is_file()}
    rest = {name for name in every - known if not name.endswith(".lock") and "/live/" not in name}
    assert rest == set(), "a file of a kind that nobody thought of"


def test_every_kind_of_file_meets_every_kind_of_damage(site: Site) -> None:
    files = site.files()
    pairs = {drawn(files, seed)[:2] for seed in range(LOOKED_AT_SHARE)}
    assert len(pairs) == min(LOOKED_AT_SHARE, len(files) * len(DAMAGES))


def test_a_share_of_damaged_runs_is_told_as_it_is(site: Site) -> None:
    tally = try_cases(cases(site, range(LOOKED_AT_SHARE)))
    assert tally.broken == [], tally.table()
    assert tally.cases == LOOKED_AT_SHARE


def test_a_share_of_damaged_runs_ends_with_the_same_weights_or_a_refusal(site: Site) -> None:
    tally = try_cases(cases(site, range(TRAINED_SHARE), train=True))
    assert tally.broken == [], tally.table()


def test_the_campaign_sees_other_weights_and_bytes_that_are_called_good(site: Site) -> None:
    """It would not be worth its time otherwise."""
    seed = next(seed for seed in range(LOOKED_AT) if drawn(site.files(), seed)[0] == "logs")
    assert try_cases(cases(site, range(seed, seed + 1), train=True)).broken == []
    other = try_cases(cases(replace(site, weights_digest="0" * 64), range(seed, seed + 1), train=True))
    assert [outcome for _, outcome in other.ended] == ["WRONG"]
    name = next(name for name in site.files()["model states"])
    step = int(name.split("/step-")[1].split("/")[0])
    copy = site.folder / "one"
    copy_tree(site.base, copy)
    only_sound_ones_are_good(site, copy / "store" / "run", [{"step": step, "valid": True}])
    (copy / name).write_bytes((copy / name).read_bytes()[:-1] + b"!")
    only_sound_ones_are_good(site, copy / "store" / "run", [{"step": step, "valid": False}])
    with pytest.raises(Broken, match="model_states"):
        only_sound_ones_are_good(site, copy / "store" / "run", [{"step": step, "valid": True}])


@pytest.mark.slow
@pytest.mark.timeout(3_000)
def test_two_thousand_damaged_runs_are_told_as_they_are(site: Site) -> None:
    tally = try_cases(cases(site, range(LOOKED_AT_SHARE, LOOKED_AT)))
    assert tally.broken == [], tally.table()


@pytest.mark.slow
@pytest.mark.timeout(3_000)
def test_each_kind_of_damage_to_each_kind_of_file_ends_with_the_same_weights_or_a_refusal(site: Site) -> None:
    tally = try_cases(cases(site, range(TRAINED_SHARE, TRAINED), train=True))
    assert tally.broken == [], tally.table()
