"""The result as people see it in a notebook and in a terminal."""

from html.parser import HTMLParser

from mem_core.domain.run import CheckpointCounts, FaultRecord, Goodput, RunResult
from mem_core.infrastructure.telemetry.notebook import result_html, result_text

HOSTILE = "<script>alert(1)</script>"
RESULT = RunResult(
    status="failed",
    run_id="demo",
    message=HOSTILE,
    applied_steps=1_200,
    loss_first=5.5,
    loss_last=float("nan"),
    faults=(FaultRecord(kind="hung", step=100, recovered_s=1.5), FaultRecord(kind=HOSTILE, step=200)),
    checkpoints=CheckpointCounts(written=12, validated=11, rejected=1, kept=3),
    goodput=Goodput(fraction=0.9, seconds={"productive": 90.0, "restart": 10.0}),
)


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)


def test_html_says_how_it_ended_and_escapes_what_came_from_outside() -> None:
    text = result_html(RESULT)
    assert set(Tags(text).seen) == {"div", "strong", "table", "tr", "th", "td"}
    for part in ("failed", "1,200 applied", "5.5000 → nan", "90.0% of 1 min 40 s", "12 written, 11 validated", "&lt;script&gt;"):
        assert part in text


def test_text_lists_the_last_faults() -> None:
    text = result_text(RESULT)
    assert text.startswith("run demo: failed\n")
    assert "hung at step 100: recovered in 1.5 s" in text
    assert "at step 200: recovery not measured" in text


def test_a_result_that_knows_nothing_yet_can_be_shown() -> None:
    empty = RunResult(status="running", run_id="x")
    assert "0 applied" in result_html(empty)
    assert "validation –" in result_text(empty)
