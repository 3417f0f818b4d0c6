"""The notification that ships with the automations reaches a person's webhook."""

import datetime
import json
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from prefect_site import Site, wait_for

pytestmark = pytest.mark.integration
AUTOMATIONS = Path(__file__).parents[2] / "deployments" / "automations.yaml"
SAVE_BLOCK = """
import sys
from prefect.blocks.notifications import CustomWebhookNotificationBlock
block = CustomWebhookNotificationBlock(name="mem", url=sys.argv[1], json_data={"subject": "{{subject}}", "body": "{{body}}"})
block.save("mem-notify", overwrite=True)
"""


@pytest.fixture
def webhook() -> Iterator[tuple[str, list[dict[str, str]]]]:
    """Its address, and what it was told."""
    told: list[dict[str, str]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            told.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/", told
    server.shutdown()
    server.server_close()
    thread.join()


def test_the_end_of_a_run_is_told_to_a_person(site: Site, webhook: tuple[str, list[dict[str, str]]]) -> None:
    """The block is created, the shipped file is applied again, the event of a run's end arrives with its words."""
    url, told = webhook
    for command in (["-c", SAVE_BLOCK, url], ["-m", "flows.automations", str(AUTOMATIONS)]):
        done = subprocess.run([sys.executable, *command], env=site.environment, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
    assert "mem-notify: created" in done.stdout
    assert "endurance/endurance: its form is up to date" in done.stdout
    event = {
        "id": str(uuid.uuid4()),
        "occurred": datetime.datetime.now(datetime.UTC).isoformat(),
        "event": "mem.run.finished",
        "resource": {"prefect.resource.id": "mem.run.told"},
        "payload": {"run_id": "told", "status": "failed", "exit_code": 73},
    }
    site.post("/events", [event])  # type: ignore[arg-type]
    subject = "MEM: mem.run.finished of told"  # runs of other tests may end meanwhile
    wait_for(lambda: any(call["subject"] == subject for call in told), "a call of the webhook", 60)
    assert "73" in next(call["body"] for call in told if call["subject"] == subject)
