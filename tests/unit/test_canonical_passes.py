"""The closed set of passes to compile for: one version for every pass that a rank can meet, and never two."""

import pytest

from mem_core.runtime.compiled.canonical import canonical_passes


def test_one_row_and_several_padded_and_full() -> None:
    found = canonical_passes(8, 512, apart=False)
    assert {(each.rows > 1, each.padded, each.apart) for each in found} == {(a, b, False) for a in (True, False) for b in (True, False)}
    assert len(found) == 4


def test_documents_that_do_not_see_each_other_come_with_places_and_no_mask() -> None:
    found = canonical_passes(8, 512, apart=True)
    assert [(each.padded, each.apart) for each in found] == [(False, True)] * 2


def test_a_rank_with_one_row_compiles_nothing_for_several() -> None:
    assert {each.rows for each in canonical_passes(1, 512, apart=False)} == {1}


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 16, 48, 4096])
def test_no_two_sizes_are_equal_since_torch_would_take_that_for_a_rule(length: int) -> None:
    for each in canonical_passes(8, length, apart=False):
        assert each.length <= length
        assert each.rows != each.length or each.rows == 1
