"""Runs submitted from Python: a handle with status, result and cancel, and plain words where nobody picks a run up."""

import os
import signal

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect_site import Site

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
            deployment="finetune/finetune", run_id="python-held", store=str(site.store), overrides={"device": "cpu"}, start_within_s=120
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
