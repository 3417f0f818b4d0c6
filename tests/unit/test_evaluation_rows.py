"""Which held-out rows a validation loss is the loss of, and how many stand beside it."""

import numpy as np
import pytest

from mem_core.domain.results.evaluation import rows_words
from mem_core.domain.run import RunResult
from mem_core.infrastructure.telemetry.notebook import result_facts
from mem_core.runtime.deepspeed.evaluation import spread


@pytest.mark.parametrize("num_rows", [1, 7, 128, 1_107, 2_048])
def test_every_row_counts_where_no_bound_is_reached(num_rows: int) -> None:
    """All of them, each once, in order: where nobody set a bound, and where it is not reached."""
    assert np.array_equal(spread(num_rows, None), np.arange(num_rows))
    assert np.array_equal(spread(num_rows, 2_048), np.arange(num_rows))


@pytest.mark.parametrize(("num_rows", "most"), [(1_107, 128), (2_049, 2_048), (90_000, 2_048), (10, 3), (5, 1)])
def test_where_that_is_too_much_rows_are_spread_evenly(num_rows: int, most: int) -> None:
    """As many as allowed, each once, and no part of the held-out rows is left out."""
    rows = spread(num_rows, most)
    assert len(rows) == len(set(rows.tolist())) == most
    assert rows[0] == 0
    gaps = np.diff([*rows.tolist(), num_rows])
    assert gaps.max() - gaps.min() <= 1


def test_the_count_stands_beside_the_loss() -> None:
    """Also where an older run wrote none down."""
    assert rows_words(1_107, 1_107) == "1,107 rows"
    assert rows_words(2_048, 90_000) == "2,048 of 90,000 rows, evenly spread"
    assert rows_words(None, None) == ""

    result = RunResult(status="completed", run_id="a", loss_first=2.0, loss_last=1.0, validation_loss=1.5)
    told = result.model_copy(update={"validation_rows": 9, "validation_rows_total": 9})
    assert "validation 1.5000 over 9 rows" in str(result_facts(told))
    assert "over" not in str([fact for fact in result_facts(result) if fact[0] == "loss"])
