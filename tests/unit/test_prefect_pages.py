"""MEM's own pages beside Prefect's: the reports of known runs and the list of all of them, and nothing else of the machine."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from flows.prefect_view.served import known_stores, page_path, remember_store, store_key
from flows.server.gate import Message, Receive, Scope, Send
from flows.server.shown.pages import FRESH_S, Pages
from flows.server.submit import seen_from
from mem_core.testing.synthetic_history import SyntheticRun
from mem_core.testing.synthetic_run import JournalBuilder


async def prefect(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 299, "headers": []})
    await send({"type": "http.response.body", "body": b"Prefect"})


class Site:
    """A machine with one known store, and one run in it whose report says who it is."""

    def __init__(self, folder: Path) -> None:
        self.home, self.store = folder / "home", folder / "runs"
        self.run = self.store / "one"
        JournalBuilder().start().segment(0, 0, 100).end().write(self.run / "journal")
        (self.run / "report.html").write_text("the report of one")
        os.utime(self.run / "report.html", (2e9, 2e9))
        remember_store(self.home, self.store)
        self.pages = Pages(prefect, self.home)

    def get(self, path: str, method: str = "GET") -> tuple[int, str, dict[str, str]]:
        """Status, text and headers."""
        sent: list[Message] = []

        async def send(message: Message) -> None:
            sent.append(message)

        async def receive() -> Message:
            return {"type": "http.request"}

        scope: dict[str, Any] = {"type": "http", "method": method, "path": path, "headers": [], "query_string": b""}
        asyncio.run(self.pages(scope, receive, send))
        headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
        return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:]).decode(), headers


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_a_known_run_s_report_is_served_and_may_run_nothing(site: Site) -> None:
    status, text, headers = site.get(page_path(site.run))
    assert (status, text) == (200, "the report of one")
    assert headers["content-type"].startswith("text/html")
    assert headers["content-security-policy"].startswith("sandbox; default-src 'none'")
    assert headers["x-content-type-options"] == "nosniff"
    assert site.get(page_path(site.run), "HEAD")[0] == 200
    assert site.get(page_path(site.run), "POST")[0] == 405


def test_everything_else_is_prefect_s(site: Site) -> None:
    for path in ("/", "/api/health", "/memory", "/runs", "/api/mem/"):
        assert site.get(path)[:2] == (299, "Prefect")


@pytest.mark.parametrize(
    "tail",
    [
        "one/result.json", "one/../one/report.html", "../runs/one/report.html", "one", "one/", "", "two/report.html", "./report.html",
        "one/report.html/", "one%2f..%2fone/report.html", "linked/report.html", "no-run/report.html", "one//report.html", "../report.html",
    ],
)  # fmt: skip
def test_no_path_leads_out_of_a_store_or_to_another_file(site: Site, tail: str) -> None:
    outside = site.store.parent / "outside"
    SyntheticRun(num_steps=10, segment_steps=10).write(outside)
    (outside / "report.html").write_text("outside")
    (site.store.parent / "report.html").write_text("outside")
    (site.store / "linked").symlink_to(outside)
    (site.store / "no-run").mkdir()
    (site.store / "no-run" / "report.html").write_text("outside")
    assert site.get(f"/mem/runs/{store_key(site.store)}/{tail}")[0] == 404


def test_a_store_is_never_named_by_its_path(site: Site) -> None:
    for name in (str(site.store), "..", store_key(site.store.parent), store_key(site.store).upper()):
        assert site.get(f"/mem/runs/{name}/one/report.html")[0] == 404
    (site.home / "stores" / ("0" * 16)).write_text("/etc")
    assert known_stores(site.home) == {store_key(site.store): site.store}, "its name must fit what it says"


def test_a_report_that_is_a_link_or_a_pipe_is_not_followed(site: Site) -> None:
    report = site.run / "report.html"
    report.unlink()
    report.symlink_to("/etc/hostname")
    os.utime(report, (2e9, 2e9), follow_symlinks=False)
    assert site.get(page_path(site.run))[0] == 404
    report.unlink()
    os.mkfifo(report)
    os.utime(report, (2e9, 2e9))
    assert site.get(page_path(site.run))[0] == 404


def test_a_run_without_a_report_or_with_an_older_one_gets_one_when_it_is_looked_at(site: Site) -> None:
    report = site.run / "report.html"
    old_unix_s = report.stat().st_mtime - 1e9
    os.utime(report, (old_unix_s, old_unix_s))
    assert os.stat(site.run / "journal" / "attempt-0001.jsonl").st_mtime > old_unix_s + FRESH_S
    status, text, _ = site.get(page_path(site.run))
    assert status == 200
    assert "Completed 100 of 100 steps" in text or "Completed 100 steps" in text


def test_all_runs_are_listed_with_their_state_and_a_link_to_each_report(site: Site) -> None:
    JournalBuilder().start().segment(0, 0, 40).end("failed", 79, "broken").write(site.store / "other & more" / "journal")
    (site.store / "bad" / "journal").mkdir(parents=True)
    (site.store / "bad" / "journal" / "attempt-0001.jsonl").mkdir()
    (site.store / "no-run").mkdir()
    status, text, headers = site.get("/mem/")
    assert (status, headers["content-security-policy"][:7]) == (200, "sandbox")
    for words in ("3 runs on this machine", str(site.store), ">completed<", ">failed<", "4.9000", "other &amp; more"):
        assert words in text
    assert f'href="{page_path(site.run)}"' in text
    assert f'href="{page_path(site.store / "other & more")}"' in text
    assert "no-run" not in text
    assert "<script" not in text
    assert site.get(page_path(site.store / "other & more").replace("%20", " ").replace("%26", "&"))[0] == 200
    assert site.get("/mem")[2]["location"] == "/mem/"


def test_a_machine_where_nothing_was_trained_says_so(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.pages = Pages(prefect, tmp_path / "other-home")
    assert "Nothing was trained on this machine yet." in site.get("/mem/")[1]
    assert site.get(page_path(site.run))[0] == 404


def test_a_store_is_remembered_once_and_never_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    for _ in range(2):
        remember_store(tmp_path, tmp_path / "runs")
    (tmp_path / "linked").symlink_to(tmp_path / "runs")
    remember_store(tmp_path, tmp_path / "linked")
    assert list(known_stores(tmp_path).values()) == [tmp_path / "runs"]
    (tmp_path / "runs").rename(tmp_path / "moved")
    remember_store(tmp_path, tmp_path / "moved")
    assert len(list((tmp_path / "stores").iterdir())) == 1, "one that is gone is forgotten when the next one comes"
    (tmp_path / "file").write_text("")
    remember_store(tmp_path / "file", tmp_path / "moved")  # a folder that cannot be made
    assert known_stores(tmp_path / "file") == {}


def test_who_submitted_from_elsewhere_gets_the_report_under_the_name_that_is_known_there() -> None:
    served = {"report_url": "http://127.0.0.1:4200/mem/runs/0/one/report.html", "status": "completed"}
    elsewhere = seen_from("https://mem.example.org/api", served)
    assert elsewhere == {**served, "report_url": "https://mem.example.org/mem/runs/0/one/report.html"}
    for unserved in ({"report_url": "file:///runs/one/report.html"}, {"report_url": ""}, {}):
        assert seen_from("https://mem.example.org/api", unserved) == unserved
    assert seen_from("", served) == served
