"""Runs side by side: settings, figures, digests, curves; of other lengths, of a remote store, hostile ones; small at 1,000,000 steps."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from test_report_page import Page

from flows.commands.branches.fork import ForkWish, fork_run
from flows.commands.inspection.compare import compare_runs
from mem_core.core.results.comparison import agreement, compare, differing, read_run, unique_names
from mem_core.domain.errors import RequestError
from mem_core.domain.request import RuntimeRequest
from mem_core.domain.run import RunResult
from mem_core.infrastructure.request.file import load_request
from mem_core.infrastructure.telemetry.charts import RUN_COLOURS, run_look
from mem_core.infrastructure.telemetry.compare_page.page import DARK, LIGHT, render_comparison
from mem_core.infrastructure.telemetry.metrics import METRIC_DTYPES, write_segment_metrics
from mem_core.testing.synthetic_history import HOSTILE_TEXT, SyntheticRun
from mem_core.testing.synthetic_run import JournalBuilder

pytestmark = pytest.mark.integration
TRAINING = {"max_steps": 24, "segment_steps": 6, "warmup_steps": 4, "learning_rate": 1e-3, "global_batch_size": 4}


def synthetic(root: Path, run_id: str, *, num_steps: int = 2_000, request: dict[str, object] | None = None, seed: int = 0) -> Path:
    """A run folder with metrics, faults and evaluations, and a request of its own."""
    SyntheticRun(num_steps=num_steps, segment_steps=250, seed=seed).write(root / run_id)
    asked = RuntimeRequest.model_validate({"run_id": run_id, **(request or {})})
    facts = {"data_fingerprint": "5c1f" * 16, "versions": {"torch": "2.13.0"}}
    (root / run_id / "run.json").write_text(json.dumps({"request": asked.model_dump(mode="json"), **facts}))
    return root / run_id


def test_a_fork_is_held_against_its_origin(
    drive: Callable[..., RunResult], nano: Callable[..., RuntimeRequest], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Real runs: the same up to the step of the fork, another one after it, and a twin of the origin that is the same to its end."""
    drive(nano("origin", training=TRAINING, checkpoint={"keep_last": 9}))
    for new_id, changes in (("slower", ("training.learning_rate=1e-4",)), ("twin", ())):
        fork_run(ForkWish("origin@12", new_id, str(tmp_path), changes), as_json=False)
        drive(load_request(str(tmp_path / new_id / "request.yaml")))
    page = tmp_path / "compare.html"
    capsys.readouterr()
    assert compare_runs(["origin", "slower", "twin"], str(tmp_path), page, as_json=True) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert [(row["field"], row["values"]) for row in found["settings"]] == [("training.learning_rate", [0.001, 0.0001, 0.001])]
    slower, twin = found["digests"]
    assert (slower["weights"], slower["same_until"], slower["other_from"]) == ("other", 12, 18)
    assert (twin["weights"], twin["trajectory"], twin["other_from"]) == ("the same", "the same", None)
    assert found["runs"][0]["loss"] is not None
    assert found["runs"][0]["best_validation"] is not None
    text = Page(page).text
    for words in ("forked from origin at step 12", "training.learning_rate", "0.0001", "twin and origin: the same weights and trajectory"):
        assert words in text
        assert words in said.err
    with pytest.raises(RequestError, match="two runs"):
        compare_runs(["origin"], str(tmp_path), None, as_json=False)
    with pytest.raises(RequestError, match="no run here"):
        compare_runs(["origin", "nobody"], str(tmp_path), None, as_json=False)


def test_the_page_stands_alone_whatever_lies_in_the_folders(tmp_path: Path) -> None:
    """Runs of other lengths, hostile text in every value, a folder with nothing but a journal."""
    synthetic(tmp_path, "long", request={"training": {"learning_rate": 1e-3}})
    hostile = synthetic(tmp_path, "short", num_steps=500, request={"model": {"source": HOSTILE_TEXT}})
    stored = json.loads((hostile / "run.json").read_text())
    stored["request"]["run_id"] = f"$x_1$ {HOSTILE_TEXT}"
    stored["request"][HOSTILE_TEXT] = HOSTILE_TEXT
    (hostile / "run.json").write_text(json.dumps(stored))
    JournalBuilder().start().write(tmp_path / "bare" / "journal")
    path = tmp_path / "page.html"
    assert compare_runs(["long", "short", "bare", str(tmp_path / "long")], str(tmp_path), path, as_json=False) == 0
    page, raw = Page(path), path.read_text()
    assert HOSTILE_TEXT in page.text
    assert "script" not in page.tags
    assert "img" not in page.tags
    assert all(link.startswith("#") for link in page.links)
    assert "default-src 'none'" in raw
    assert "prefers-color-scheme: dark" in raw
    assert "at-narrow" in raw
    assert "long (2)" in page.text
    assert "2,000" in page.text
    assert "500" in page.text


def test_a_run_of_a_remote_store_is_compared_by_its_journal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A store holds no steps: a point of the curve is the last loss of a segment, and the page says so."""
    synthetic(tmp_path / "here", "a")
    synthetic(tmp_path / "here", "b", seed=1)
    for run_id in ("a", "b"):
        source, target = tmp_path / "here" / run_id, tmp_path / "bucket" / run_id
        for path in (source / "journal").iterdir():
            copy = target / "journal" / path.stem / "000001.jsonl"
            copy.parent.mkdir(parents=True)
            copy.write_bytes(path.read_bytes())
        (target / "run.json").write_bytes((source / "run.json").read_bytes())
    url = f"local://{tmp_path}/bucket"
    compare_runs(["a", f"{url}/b", str(tmp_path / "here" / "a")], url, tmp_path / "page.html", as_json=True)
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [run["steps"] for run in runs] == [2_000] * 3
    assert runs[0]["loss"] is not None
    assert "no recorded steps here" in Page(tmp_path / "page.html").text
    with pytest.raises(RequestError, match="no such run"):
        compare_runs(["a", "c"], url, None, as_json=False)


def test_runs_of_1_000_000_steps_make_a_small_page(tmp_path: Path) -> None:
    num = 1_000_000
    steps = np.arange(1, num + 1)
    columns = {name: np.ones(num, dtype) for name, dtype in METRIC_DTYPES.items()} | {"step": steps, "batch_index": steps - 1}
    read = []
    for run_id in ("a", "b", "c"):
        JournalBuilder().start().segment(0, 0, num).write(tmp_path / run_id / "journal")
        columns["loss"] = 5 / np.sqrt(steps) + np.random.default_rng(len(read)).normal(0, 0.1, num)
        write_segment_metrics(tmp_path / run_id / "metrics", num, columns)
        read.append(read_run(tmp_path / run_id, run_id))
    page = render_comparison(compare(read), [run.curves for run in read])
    assert max(run.curves.loss.steps.size for run in read) <= 600
    assert len(page) < 400_000


def test_values_and_names_are_held_against_each_other() -> None:
    first = {"training.seed": 0, "same": [1], "run_id": "a"}
    rows = differing([first, {**first, "training.seed": 1, "run_id": "b"}, {**first, "extra": None}])
    assert [(row.field, row.values) for row in rows] == [("training.seed", (0, 1, 0))]
    assert unique_names(["a", "b", "a", "a"]) == ["a", "b", "a (2)", "a (3)"]


def test_how_long_two_runs_were_the_same(tmp_path: Path) -> None:
    JournalBuilder().start().segment(0, 0, 10).segment(1, 10, 20).write(tmp_path / "a" / "journal")
    JournalBuilder().start().segment(0, 0, 20).commit(30).write(tmp_path / "b" / "journal")
    a, b = (read_run(tmp_path / name, name) for name in ("a", "b"))
    assert agreement(a, a) == (20, None)
    assert agreement(a, b) == (20, None), "step 30 is one's alone"


def test_runs_have_a_colour_each_and_then_another_line() -> None:
    assert len(LIGHT) == len(DARK) == len(RUN_COLOURS) == 8
    looks = [run_look(number) for number in range(16)]
    assert len(set(looks)) == 16
    assert all(re.fullmatch("#[0-9a-f]{6}", colour) for colour in LIGHT + DARK)
