"""The first plan reserves what the first update will allocate: no limit is met while gradients and optimizer state come to be.

Short rows and three long ones under a limit that only counts once training is under way. Calibration sees neither gradients nor
moments; a plan that trusts it passes every limit at the first long row after the first update.
"""

import json
import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from control_groups import control_group

from mem_core.domain.request import RuntimeRequest
from mem_core.domain.run import RunResult
from mem_core.testing.memory_faults import limit_address_space, limit_cgroup
from mem_core.testing.ports import with_port

pytestmark = pytest.mark.integration
Drive = Callable[..., RunResult]
MIB = 2**20
WORDS = ("the", "of", "and", "to", "in", "is", "you", "that", "it", "he", "was", "for", "with", "they", "have", "from", "word", "what")
HIGH_WATERMARK = 0.9
ROWS_A_STEP = 16
# Of llama-small: gradients 99 MiB, moments 198 MiB, the update's transient 99 MiB; what is left is for activations.
HEADROOM_BYTES = 1_100 * MIB
ISSUE_HEADROOM_BYTES = 2_515 * MIB  # 3 GiB, of which a rank uses 557 MiB before its first step


def rows_file(folder: Path, seed: int, num_rows: int, long: tuple[int, ...], long_words: int) -> Path:
    """Rows of 14 words, and the long ones."""
    rng = random.Random(seed)
    texts = [" ".join(rng.choices(WORDS, k=long_words if number in long else 14)) for number in range(num_rows)]
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def request_of(folder: Path, rows: Path, sequence_length: int, steps: int, seed: int) -> RuntimeRequest:
    """Every row is met once."""
    return RuntimeRequest.model_validate(
        {
            "run_id": "first", "store": str(folder), "device": "cpu", "model": {"source": "preset:llama-small"},
            "data": {"train": [str(rows)], "validation": None, "sequence_length": sequence_length, "packing": False},
            "training": {
                "max_steps": steps, "segment_steps": steps, "global_batch_size": ROWS_A_STEP, "warmup_steps": 2, "seed": seed,
            },
        }
    )  # fmt: skip


def small(folder: Path, seed: int, steps: int = 3) -> RuntimeRequest:
    """Every third row is of 512 tokens: passes as large as the plan allows, from the first batch on. Without what is reserved for the
    first update they peak at 105 % of the limit there, with it at 95 %."""
    num_rows = steps * ROWS_A_STEP
    return request_of(folder, rows_file(folder, seed, num_rows, tuple(range(0, num_rows, 3)), 120), 512, steps, seed)


def as_reported(folder: Path, seed: int) -> RuntimeRequest:
    """400 rows of 14 words and three of 700, sequences of up to 4,096 tokens."""
    return request_of(folder, rows_file(folder, seed, 403, (150, 151, 301), 700), 4_096, 26, seed)


def own_budget(runner: Any, headroom_bytes: int) -> None:
    """A budget of one's own: what the rank uses now and some headroom."""
    runner.memory.reader = runner._local.memory_reader(runner.memory.reader.read().used_bytes + headroom_bytes)


def address_space(runner: Any, headroom_bytes: int) -> None:
    """RLIMIT_AS."""
    limit_address_space(runner, headroom_bytes)


def watched(runner: Any, limit: Callable[[Any], None], name: str, log: Path) -> None:
    """Set the limit, then write the pressure under it of every reading, a line each."""
    limit(runner)
    memory = runner.memory
    observe, seen = memory.observe, [None]

    def noted(batch_index: int, micro_batch: Any) -> Any:
        reading = observe(batch_index, micro_batch)
        if reading is not seen[0]:
            seen[0] = reading
            pressure = max(each.pressure for each in memory._limits() if name in each.name)
            with log.open("a") as file:
                file.write(json.dumps([batch_index, micro_batch.tokens, pressure]) + "\n")
        return reading

    memory.observe = noted


def assert_never_near(result: RunResult, log: Path, used_share: float = 0.6) -> None:
    """No failed allocation, never above the limit, never two readings in a row above the watermark; and the limit did bind: a plan was
    bounded, and more than `used_share` of the limit was used under it."""
    readings = [json.loads(line) for line in log.read_text().splitlines()]
    pressures = [pressure for _, _, pressure in readings]
    print(f"peak {max(pressures):.3f} of the limit;", " ".join(f"{batch}:{tokens}:{pressure:.2f}" for batch, tokens, pressure in readings))
    assert (result.status, result.restarts, result.ooms_absorbed, result.ooms_fatal) == ("completed", 0, 0, 0)
    assert max(pressures) <= 1.0
    assert not [pair for pair in pairwise(pressures) if min(pair) > HIGH_WATERMARK]
    assert result.memory.plan_changes, "no plan was ever bounded: the limit is too wide to prove anything"
    assert max(pressures) > used_share, "what was reserved was never used"


def test_the_first_update_stays_below_the_budget(drive: Drive, tmp_path: Path) -> None:
    """One step of one seed of the small shape."""
    log = tmp_path / "readings"
    port = partial(watched, limit=partial(own_budget, headroom_bytes=HEADROOM_BYTES), name="memory.budget", log=log)
    assert_never_near(drive(small(tmp_path, 0, steps=1), options=with_port(port)), log)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("kind", ["budget", "rlimit"])
def test_ten_seeds(drive: Drive, tmp_path: Path, kind: str, seed: int) -> None:
    """Under a budget of one's own and under RLIMIT_AS."""
    log = tmp_path / "readings"
    limit, name = {"budget": (own_budget, "memory.budget"), "rlimit": (address_space, "RLIMIT_AS")}[kind]
    port = partial(watched, limit=partial(limit, headroom_bytes=HEADROOM_BYTES), name=name, log=log)
    assert_never_near(drive(small(tmp_path, seed), options=with_port(port)), log)


@pytest.fixture
def group(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A control group of our own; skipped where the machine does not let us make one."""
    with control_group(f"mem-first-{request.node.callspec.params['seed']}") as folder:
        yield folder


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_ten_seeds_in_a_control_group(drive: Drive, tmp_path: Path, group: Path, seed: int) -> None:
    """The kernel kills nothing."""
    log = tmp_path / "readings"
    port = partial(watched, limit=partial(limit_cgroup, headroom_bytes=HEADROOM_BYTES, folder=group), name="cgroup", log=log)
    assert_never_near(drive(small(tmp_path, seed), options=with_port(port)), log)
    assert (group / "memory.oom_control").read_text().split()[-1] == "0"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_ten_seeds_as_reported(drive: Drive, tmp_path: Path, seed: int) -> None:
    """The shape that passed its limit by 4 to 8 %. Its largest passes are one long row and short ones padded to it, which cost less than
    the full rows that calibration measures: some 55 % of the limit are used."""
    log = tmp_path / "readings"
    port = partial(watched, limit=partial(own_budget, headroom_bytes=ISSUE_HEADROOM_BYTES), name="memory.budget", log=log)
    assert_never_near(drive(as_reported(tmp_path, seed), options=with_port(port)), log, used_share=0.5)
