"""Runs submitted from Python: a handle with status, result and cancel, and plain words where nobody picks a run up."""

import os
import signal

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect_site import Site, wait_for

from flows.notebook import ShownResult
from flows.submit import submit
from mem_core.domain.errors import EnvironmentUnfit, Interrupted, RequestError, RunHeld

pytestmark = pytest.mark.integration


def request_of(site: Site, run_id: str, max_steps: int) -> dict[str, object]:
    return {"run_id": run_id, "store": str(site.store), "device": "cpu", "training": {"max_steps": max_steps, "segment_steps": 50}}


def test_a_submitted_run_gives_its_result_and_wrong_ones_are_refused_before(site: Site) -> None:
    with temporary_settings({PREFECT_API_URL: site.url}):
        with pytest.raises(RequestError, match="relative store"):
            submit({"run_id": "python"})
        with pytest.raises(RequestError, match="no such deployment"):
            submit(request_of(site, "python", 50), deployment="endurance/elsewhere")
        run = submit(request_of(site, "python", 50), start_within_s=120)
        result = run.result(timeout_s=240)
        assert isinstance(result, ShownResult)
        assert (result.status, result.applied_steps) == ("completed", 50)
        assert "<svg" in result._repr_html_()
        assert run.status() == "Completed: completed at step 50 of 50"


def test_without_a_server_it_says_what_to_start() -> None:
    with temporary_settings({PREFECT_API_URL: ""}), pytest.raises(EnvironmentUnfit, match="mem serve"):
        submit({"run_id": "python", "store": "/tmp/x"})


@pytest.mark.slow
def test_a_held_run_is_named_and_a_cancelled_one_is_interrupted(site: Site) -> None:
    with temporary_settings({PREFECT_API_URL: site.url}):
        run = submit(request_of(site, "python-held", 100_000), start_within_s=120)
        site.wait_validated("python-held", 50)
        other = submit(
            deployment="finetune/finetune",
            model="preset:llama-nano",
            run_id="python-held",
            store=str(site.store),
            overrides={"device": "cpu"},
            start_within_s=120,
        )
        with pytest.raises(RunHeld, match=f"process {site.holder('python-held')}"):
            other.result(timeout_s=240)
        run.cancel()
        with pytest.raises(Interrupted):
            run.result(timeout_s=120)
        assert not site.processes("python-held")


@pytest.mark.slow
def test_nobody_picks_it_up(site: Site) -> None:
    assert site.serving is not None
    os.killpg(site.serving.pid, signal.SIGKILL)
    site.serving.wait()
    try:
        with temporary_settings({PREFECT_API_URL: site.url}):
            run = submit(request_of(site, "python-late", 50), start_within_s=3)
            with pytest.raises(EnvironmentUnfit, match=r"no worker picked it up within 3 s.*mem serve"):
                run.result(timeout_s=30)
            run.cancel()
    finally:
        site.start_serving()


@pytest.mark.slow
def test_a_queued_run_names_the_one_that_it_waits_behind(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """The deployment has one place and lets others wait: nobody is missing, and it starts by itself."""
    parameters = {"store": str(site.store), "overrides": {"device": "cpu", "training.segment_steps": 50}}
    with temporary_settings({PREFECT_API_URL: site.url}):
        first = submit(
            deployment="finetune/finetune",
            model="preset:llama-nano",
            run_id="python-first",
            max_steps=100_000,
            start_within_s=120,
            **parameters,
        )
        site.wait_validated("python-first", 50)
        second = submit(
            deployment="finetune/finetune", model="preset:llama-nano", run_id="python-second", max_steps=20, start_within_s=1, **parameters
        )
        wait_for(lambda: site.state(str(second.flow_run_id)) == "AwaitingConcurrencySlot", "the queue", 60)
        assert "waits behind python-first (Running): one run at a time" in second.status()
        with pytest.raises(TimeoutError, match="waits behind python-first"):
            second.result(timeout_s=3)
        assert "waits behind python-first" in capsys.readouterr().err
        first.cancel()
        assert second.result(timeout_s=300).applied_steps == 20


def test_rows_in_the_request_are_refused_in_one_line() -> None:
    """Before anything is sent or repeated; the way out is named."""
    rows = [f"row {number} " * 20 for number in range(10_000)]
    for given in ({"request": {"run_id": "a", "store": "/runs", "data": {"train": rows}}}, {"run_id": "a", "data": rows}):
        with pytest.raises(RequestError, match=r"too large to be submitted.*Pass a path") as caught:
            submit(**given)  # type: ignore[arg-type]
        assert len(str(caught.value)) < 400
        assert "\n" not in str(caught.value)


def test_what_the_server_refuses_is_told_in_its_words_alone(site: Site) -> None:
    with temporary_settings({PREFECT_API_URL: site.url}), pytest.raises(RequestError, match="max_steps") as caught:
        submit(deployment="finetune/finetune", model="preset:llama-nano", run_id="a", max_steps=0)
    assert len(str(caught.value)) < 700


def test_a_server_that_is_away_is_named() -> None:
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}), pytest.raises(EnvironmentUnfit, match="is away"):
        submit(deployment="finetune/finetune", model="preset:llama-nano", run_id="a")
