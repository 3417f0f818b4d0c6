"""The trajectory digest changes with every bit that makes two runs different, and with nothing else."""

from mem_core.runtime.deepspeed.trajectory import chain_step

SPLIT = (((0, 1), (2, 3)), ((4, 5), (6, 7)))


def digest(*steps: tuple[int, object, float, float | None], start: str = "") -> str:
    for index, split, loss, norm in steps:
        start = chain_step(start, index, split, loss, norm)  # type: ignore[arg-type]
    return start


def test_cutting_a_run_into_segments_changes_nothing() -> None:
    steps = [(index, SPLIT, 5.0 - index / 7, 1.0 + index) for index in range(6)]
    assert digest(*steps[3:], start=digest(*steps[:3])) == digest(*steps)


def test_each_part_of_a_step_counts_to_the_last_bit() -> None:
    step = (3, SPLIT, 2.5, 1.25)
    others = [
        (4, SPLIT, 2.5, 1.25),
        (3, (((0,), (1, 2, 3)), ((4, 5), (6, 7))), 2.5, 1.25),
        (3, (((4, 5), (6, 7)), ((0, 1), (2, 3))), 2.5, 1.25),
        (3, SPLIT, 2.5 + 2**-51, 1.25),
        (3, SPLIT, 2.5, 1.25 + 2**-52),
        (3, SPLIT, 2.5, None),
    ]
    found = {digest(step), *(digest(other) for other in others)}
    assert len(found) == len(others) + 1


def test_zero_minus_zero_and_no_gradient_norm_are_three_things() -> None:
    assert len({digest((0, SPLIT, 0.0, 0.0)), digest((0, SPLIT, -0.0, 0.0)), digest((0, SPLIT, 0.0, None))}) == 3


def test_the_order_of_steps_counts() -> None:
    first, second = (0, SPLIT, 2.0, 1.0), (1, SPLIT, 2.0, 1.0)
    assert digest(first, second) != digest(second, first)
