"""What 1,000,000 steps cost Prefect: database, task runs, log lines, artifact rows, memory of the flow process."""

import json
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from prefect_site import Site, wait_for

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(2_400)]
NUM_SEGMENTS = 1_000  # the cap: 1,000,000 steps


def database_bytes(site: Site) -> int:
    """Pages in use, with what is still in the write-ahead log."""
    with sqlite3.connect(f"file:{site.database}?mode=ro", uri=True, timeout=60) as connection:
        pages, size, free = (connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "page_size", "freelist_count"))
    connection.close()
    return (pages - free) * size


def test_a_million_steps_stay_small(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    with Site.open(tmp_path_factory.mktemp("footprint-site"), serving=False) as site:
        before = database_bytes(site)
        started_s = time.monotonic()
        done = subprocess.run(
            [sys.executable, str(Path(__file__).with_name("footprint_flow.py")), str(tmp_path), str(NUM_SEGMENTS)],
            env=site.environment, capture_output=True, text=True, timeout=900, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        wall_s = time.monotonic() - started_s
        run = site.post("/flow_runs/filter", {"flow_runs": {"name": {"like_": "%"}}, "sort": "START_TIME_DESC"})[0]
        filters = {"flow_runs": {"id": {"any_": [run["id"]]}}}
        wait_for(lambda: site.post("/task_runs/count", filters) == 2 * NUM_SEGMENTS, "every task run in the database", 120)
        time.sleep(5)
        grown = database_bytes(site) - before
        rss = {int(key): value for key, value in json.loads(done.stdout.splitlines()[-1])["rss_bytes"].items()}
        slope = (rss[1_000] - rss[200]) / (1_000 - 200) * 500  # two task runs a segment: per 1,000 task runs
        artifacts = site.post("/artifacts/count", filters)
        logs = site.post("/logs/filter", {"logs": {"flow_run_id": {"any_": [run["id"]]}}, "limit": 200, "offset": 4_000})
        print(
            f"\n{NUM_SEGMENTS} segments: {grown / 2**20:.1f} MiB of database ({grown / NUM_SEGMENTS:,.0f} bytes a segment), "
            f"flow RSS {rss[0] / 2**20:.0f} to {rss[1_000] / 2**20:.0f} MiB, {slope / 2**20:.2f} MiB per 1,000 task runs, {wall_s:.0f} s"
        )
        assert grown < 100e6
        assert slope < 3e6
        assert artifacts <= 3
        assert logs == [], "one line per segment and two per task run at most"
