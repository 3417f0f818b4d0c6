"""A person approves changed hyper-parameters in Prefect; silence is a refusal; a cancel while waiting is obeyed."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from prefect_site import Site, wait_for

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(2_400)]
REPLY = {"choices": [{"message": {"role": "assistant", "content": json.dumps({"lr_multiplier": 0.5})}}]}


@pytest.fixture
def planner_url() -> Iterator[str]:
    """An endpoint that always proposes half the learning rate."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            body = json.dumps(REPLY).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()
    thread.join()


def start(site: Site, run_id: str, planner_url: str, time_limit_s: float) -> str:
    planner = {"kind": "openai", "base_url": planner_url, "model": "any", "every_segments": 1}
    policy = {"planner": planner, "approval": {"required": True, "time_limit_s": time_limit_s}}
    return site.train(run_id, **{"training.max_steps": 100, "policy": policy})


def decision(site: Site, run_id: str) -> dict[str, Any]:
    """The decision of the second segment, the first that a planner is asked for."""
    lines = [json.loads(line) for path in (site.store / run_id / "journal").glob("*.jsonl") for line in path.read_text().splitlines()]
    return next(line["event"] for line in lines if line["event"]["event"] == "policy_decided" and line["event"]["segment_index"] == 1)


def test_a_person_says_yes(site: Site, planner_url: str) -> None:
    flow_run = start(site, "asked", planner_url, 300)
    wait_for(lambda: site.state(flow_run) == "Paused", "the question", 240)
    site.post(f"/flow_runs/{flow_run}/resume", {"run_input": {"apply": True, "by": "test"}})
    assert site.wait_end(flow_run)["state_name"] == "Completed"
    assert decision(site, "asked")["inputs"]["approval"] == "granted"
    assert decision(site, "asked")["decision"]["applied_hyperparams"]["lr_multiplier"] == 0.5


def test_silence_is_a_refusal_and_training_goes_on(site: Site, planner_url: str) -> None:
    run = site.wait_end(start(site, "unasked", planner_url, 3))
    assert run["state_name"] == "Completed"
    assert "Paused" in [state["name"] for state in site.get(f"/flow_run_states/?flow_run_id={run['id']}")]
    assert decision(site, "unasked")["inputs"]["approval"] == "timed_out"
    assert decision(site, "unasked")["decision"]["applied_hyperparams"]["lr_multiplier"] == 1.0


def test_a_cancel_while_a_person_is_asked_is_obeyed(site: Site, planner_url: str) -> None:
    flow_run = start(site, "cancelled-asked", planner_url, 300)
    wait_for(lambda: site.state(flow_run) == "Paused", "the question", 240)
    site.post(f"/flow_runs/{flow_run}/set_state", {"state": {"type": "CANCELLING"}})
    wait_for(lambda: not site.processes("cancelled-asked"), "end of every process", 40)
    assert site.wait_end(flow_run)["state_name"] == "Cancelled"
    assert site.result("cancelled-asked")["exit_code"] == 75
