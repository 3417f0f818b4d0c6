"""Every page in a real browser, light and dark, wide and narrow, and printed: it fits, its letters can be read, its pictures are there.

Without Chromium nothing is photographed, and each test says so. To judge the pictures: pytest tests/e2e/test_pictures.py --pictures DIR
"""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browser, Look, browser, installed
from prefect_site import Site

from flows.commands.inspection.compare import compare_runs
from flows.commands.inspection.runs import RunRow
from flows.prefect_view.served import page_path
from flows.server.shown.runs_page import render_runs
from mem_core.core.run.run_report import write_report
from mem_core.testing.synthetic_history import SyntheticRun

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(installed() is None, reason="no Chromium is installed here: no page was looked at, no picture was made"),
]
LOOKS = {
    "wide-light": Look(1280, "light"),
    "wide-dark": Look(1280, "dark"),
    "narrow-light": Look(420, "light"),
    "narrow-dark": Look(420, "dark"),
    "print": Look(720, "dark", media="print"),
}
BACKGROUNDS = {"light": "rgb(246, 247, 248)", "dark": "rgb(18, 21, 24)"}
# The width of the widest thing that is seen outside of a part that scrolls by itself, and the smallest letters of a chart, in pixels.
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
LETTERS = (
    """Math.min(...[...document.querySelectorAll('svg text')].map(text => text.getBoundingClientRect().height).filter(height => height))"""
)
PICTURES = "[...document.querySelectorAll('.markdown-renderer img')].map(image => image.complete && image.naturalWidth > 0)"
CUT = """[...document.querySelectorAll('.markdown-renderer li')].filter(item => item.scrollWidth > item.clientWidth + 1).length"""
READY = "document.querySelectorAll('.markdown-renderer table').length > 0"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """One browser for all pages."""
    with browser() as opened:
        yield opened


@pytest.mark.parametrize("name", LOOKS)
def test_the_report_fits_and_can_be_read(chromium: Browser, name: str, tmp_path: Path, picture_folder: Path) -> None:
    SyntheticRun(num_steps=6_000, segment_steps=250, seed=3).write(tmp_path / "run")
    look = LOOKS[name]
    chromium.open(write_report(tmp_path / "run").as_uri(), look)
    assert chromium.ask(OVERFLOW) == 0
    assert chromium.ask(LETTERS) >= 9
    shown = "rgb(255, 255, 255)" if look.media == "print" else BACKGROUNDS[look.scheme]
    assert chromium.ask("getComputedStyle(document.body).backgroundColor") == shown, "paper is white whatever the screen is"
    width = {False: "at-wide", True: "at-narrow"}[name.startswith("narrow")]
    assert chromium.ask("[...document.querySelectorAll('.chart.wide [role=img] > div')].find(e => e.clientWidth).className") == width
    chromium.picture(picture_folder / f"report-{name}.png", look.width)


@pytest.mark.parametrize("name", LOOKS)
def test_the_comparison_fits_and_can_be_read(chromium: Browser, name: str, tmp_path: Path, picture_folder: Path) -> None:
    for seed, run_id in enumerate(("baseline", "lower-rate", "other-data-and-a-long-name")):
        SyntheticRun(num_steps=3_000 + 1_500 * seed, segment_steps=250, seed=seed).write(tmp_path / run_id)
        stored = json.loads((tmp_path / run_id / "run.json").read_text())
        stored["request"] |= {"run_id": run_id, "store": f"/a/folder/that/has/a/long/name/{run_id}"}
        (tmp_path / run_id / "run.json").write_text(json.dumps(stored))
    compare_runs(["baseline", "lower-rate", "other-data-and-a-long-name"], str(tmp_path), tmp_path / "page.html", as_json=False)
    look = LOOKS[name]
    chromium.open((tmp_path / "page.html").as_uri(), look)
    assert chromium.ask(OVERFLOW) == 0
    assert chromium.ask(LETTERS) >= 9
    width = {False: "at-wide", True: "at-narrow"}[name.startswith("narrow")]
    assert chromium.ask("[...document.querySelectorAll('.chart.wide [role=img] > div')].find(e => e.clientWidth).className") == width
    chromium.picture(picture_folder / f"compare-{name}.png", look.width)


@pytest.mark.parametrize("name", ["wide-light", "narrow-dark"])
def test_the_list_of_all_runs_fits(chromium: Browser, name: str, tmp_path: Path, picture_folder: Path) -> None:
    rows = [
        RunRow(run_id=f"run-{number}", state=state, step=1_000 * number, loss=2.5, validation_loss=2.6, goodput=0.9, faults=number)
        for number, state in enumerate(("completed", "running", "failed", "stopped"), start=1)
    ]
    (tmp_path / "runs.html").write_text(render_runs({Path("/data/runs"): rows}, 2e9), encoding="utf-8")
    chromium.open((tmp_path / "runs.html").as_uri(), LOOKS[name])
    assert chromium.ask(OVERFLOW) == 0
    assert chromium.ask("document.querySelectorAll('tbody tr').length") == 4
    chromium.picture(picture_folder / f"all-runs-{name}.png", LOOKS[name].width)


def test_the_pages_of_a_run_in_prefect_show_their_curves_and_cut_nothing_off(site: Site, chromium: Browser, picture_folder: Path) -> None:
    """Live page and summary; the report behind the link of both is served."""
    flow_run = site.train("pictured", **{"training.max_steps": 100, "training.segment_steps": 25, "evaluation.every_steps": 25})
    assert site.wait_end(flow_run)["state_name"] == "Completed"
    artifacts, address = site.artifacts(flow_run), site.url.removesuffix("/api")
    report = page_path(site.store / "pictured")
    for key in ("mem-pictured", "mem-pictured-result"):
        assert f"]({report})" in artifacts[key]["data"]
        for name in ("wide-light", "wide-dark", "narrow-dark"):
            look = LOOKS[name]
            kept = Look(look.width, look.scheme, storage=(("color-scheme", f'"{look.scheme}"'),))
            chromium.open(f"{address}/artifacts/artifact/{artifacts[key]['id']}", kept, READY)
            time.sleep(1.0)  # pictures are decoded after the words are there
            assert chromium.ask(PICTURES) == [True, True], "loss and memory"
            assert chromium.ask(CUT) == 0
            assert "trajectory_digest" not in chromium.ask("document.body.innerText"), "what programs read is not shown"
            chromium.picture(picture_folder / f"{key}-{name}.png", look.width)
    newer = f"{address}/v2/artifacts/artifact/{artifacts['mem-pictured-result']['id']}"  # Prefect has two interfaces
    chromium.open(newer, LOOKS["wide-dark"], "document.querySelectorAll('img[alt*=\"over steps\"]').length == 2")
    assert "trajectory_digest" not in chromium.ask("document.body.innerText")
    chromium.picture(picture_folder / "mem-pictured-result-newer-interface.png", 1280)
    chromium.open(f"{address}{report}", LOOKS["wide-light"])
    assert chromium.ask("document.title") == "pictured: MEM report"
    chromium.open(f"{address}/mem/", LOOKS["wide-light"])
    assert "pictured" in chromium.ask("document.body.innerText")
    chromium.picture(picture_folder / "all-runs-served.png", 1280)


SUBMIT = "[...document.querySelectorAll('button')].filter(button => button.innerText.trim() === 'Submit').at(-1)"
FORM = f"document.querySelectorAll('input').length > 3 && {SUBMIT} !== undefined"
LABELS = "[...new Set([...document.querySelectorAll('.p-label')].map(label => label.innerText.split('\\n')[0].replace(' (Optional)', '')))]"


def type_into(chromium: Browser, label: str, text: str) -> None:
    """Replace what the field with this label holds, as a person types it."""
    found = f"[...document.querySelectorAll('.p-label')].find(label => label.innerText.trim().startsWith({label!r}))"
    chromium.ask(f"{found}.querySelector('input, textarea').focus(); {found}.querySelector('input, textarea').select()")
    chromium.call("Input.insertText", text=text)


def submitted(chromium: Browser, said: tuple[str, ...]) -> bool:
    """Press the button; whether the page says one of these words now. A form takes a moment to notice what was typed."""
    chromium.ask(f"{SUBMIT}?.click()")
    time.sleep(1.0)
    return any(words in chromium.ask("document.body.innerText") for words in said)


@pytest.mark.parametrize(("deployment", "given"), [("endurance/endurance", {}), ("finetune/finetune", {"Model": "preset:llama-nano"})])
def test_a_form_begins_with_what_a_run_needs_and_refuses_what_no_run_takes(
    site: Site, chromium: Browser, picture_folder: Path, deployment: str, given: dict[str, str]
) -> None:
    """Typed into the fields of a real form: each wrong value is named, and no run is created."""
    found = site.get(f"/deployments/name/{deployment}")
    for label, wrong, said in (
        ("Run id", "Bad Name!", ("'Bad Name!' does not match",)),
        ("Learning rate", "99", ("99 is not valid", "99 is greater than", "learning_rate")),
    ):
        chromium.open(f"{site.url.removesuffix('/api')}/deployments/deployment/{found['id']}/run", LOOKS["wide-light"], FORM)
        chromium.wait(lambda: "Learning rate" in chromium.ask(LABELS), "fields of the form")
        labels = [label for label in chromium.ask(LABELS) if label != "Run Name"]
        first = labels[: next(number for number, label in enumerate(labels) if label.startswith("Advanced"))]
        assert set(first) - {"Epochs"} == {"Run id", "Model", "Data", "Max steps", "Global batch size", "Learning rate"}
        for name, value in ({"Run id": "fine"} | given | {label: wrong}).items():
            type_into(chromium, name, value)
        chromium.wait(lambda said=said: submitted(chromium, said), f"refusal of {wrong}")
        chromium.picture(picture_folder / f"form-{deployment.split('/')[0]}-{label.split()[0].lower()}.png", 1280)
    runs = site.post("/flow_runs/filter", {"deployments": {"id": {"any_": [found["id"]]}}})
    assert not [run for run in runs if run["parameters"].get("run_id") in ("fine", "Bad Name!")]
