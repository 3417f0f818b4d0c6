"""Passwords in URLs are refused when a request is parsed; signed URLs are taken, shown without their signature, and resumed without it."""

import json
import os
import pickle
import stat
from pathlib import Path
from typing import Any

import pytest

from mem_core.core.run.reconcile import reconcile
from mem_core.core.run.record import RunRecord, read_record
from mem_core.core.run.state_manager import StateManager, write_atomically
from mem_core.domain.environment import Finding
from mem_core.domain.errors import DataError, MemError, RequestError
from mem_core.domain.events import Noted
from mem_core.domain.plan import MemoryPlan
from mem_core.domain.request import ModelSection, RuntimeRequest, shown_request
from mem_core.domain.secrets import hide_in_urls, unsigned
from mem_core.infrastructure.request.errors import known_fields
from mem_core.infrastructure.request.file import apply_overrides, build_request
from mem_core.infrastructure.storage.writing import PRIVATE, open_to_append, replace_text

PASSWORD = "hunter2-canary"
CREDENTIALS = f"http://me:{PASSWORD}@host/x"
SIGNED = "https://bucket.s3.amazonaws.com/a.jsonl?versionId=3&X-Amz-Date=20250101T000000Z&X-Amz-Credential=AKIA%2F1&X-Amz-Signature="
TEXT_FIELDS = [path for path, info in known_fields() if "str" in str(info.annotation)]


def nested(path: str, value: Any) -> dict[str, Any]:
    result: dict[str, Any] = {"run_id": "demo"}
    target = result
    *parents, last = path.split(".")
    for name in parents:
        target = target.setdefault(name, {})
    target[last] = value
    return result


@pytest.mark.parametrize("path", [*TEXT_FIELDS, "deepspeed", "deepspeed.a.b", "nosuch", "model.nosuch"])
@pytest.mark.parametrize("value", [CREDENTIALS, [CREDENTIALS], {"deep": [{"er": CREDENTIALS}]}, {CREDENTIALS: 1}])
def test_a_password_in_a_url_is_refused_in_every_field_and_printed_nowhere(path: str, value: Any) -> None:
    for make in (build_request, RuntimeRequest.model_validate):
        with pytest.raises(RequestError) as caught:
            make(nested(path, value))
        assert caught.value.exit_code == 64
        assert caught.value.field.startswith(path)
        assert PASSWORD not in f"{caught.value} {caught.value!r} {caught.value.args} {vars(caught.value)} {caught.value.__cause__}"


def test_the_fields_of_text_are_known() -> None:
    assert {"store", "model.source", "data.train", "data.validation", "checkpoint.mirror", "policy.planner.base_url"} <= set(TEXT_FIELDS)


def test_a_section_by_itself_refuses_it_too() -> None:
    with pytest.raises(RequestError):
        ModelSection(source=f"s3://key:{PASSWORD}@bucket/model")
    with pytest.raises(RequestError):
        build_request(apply_overrides({"run_id": "a"}, [f"data.train=[{CREDENTIALS}]"]))


@pytest.mark.parametrize("text", ["a\0b", "\ud800", "x" * 10_000], ids=["NUL", "half a character", "long"])
@pytest.mark.parametrize("path", ["data.train", "model.source", "store", "checkpoint.mirror", "deepspeed.a"])
def test_texts_that_no_file_or_record_takes_are_refused(path: str, text: str) -> None:
    with pytest.raises(RequestError, match=path.rpartition(".")[2]) as caught:
        build_request(nested(path, [text] if path == "data.train" else text))
    assert str(caught.value).encode()


@pytest.mark.parametrize(
    ("url", "identity"),
    [
        (SIGNED + "abc", "https://bucket.s3.amazonaws.com/a.jsonl?versionId=3"),
        ("https://h/x?token=abc", "https://h/x"),
        ("https://h/x?a=1&token=abc#part", "https://h/x?a=1#part"),
        ("https://a.blob.core.windows.net/c/f?sv=2024&st=1&se=2&sr=b&sp=r&sig=abc%3D", "https://a.blob.core.windows.net/c/f"),
        ("https://storage.googleapis.com/b/f?GoogleAccessId=me&Expires=5&Signature=abc&generation=7", "https://storage.googleapis.com/b/f?generation=7"),
        ("https://h/x?page=2&expires=never", "https://h/x?page=2&expires=never"),
        ("s3://bucket/key?notes", "s3://bucket/key?notes"),
        ("data/what?token=1", "data/what?token=1"),
        ("stdlib:", "stdlib:"),
    ],
)  # fmt: skip
def test_what_identifies_a_file_is_its_url_without_the_signature(url: str, identity: str) -> None:
    assert unsigned(url) == identity
    assert unsigned(identity) == identity


def signed(signature: str, **more: Any) -> RuntimeRequest:
    return build_request(
        {"run_id": "demo", "data": {"train": [SIGNED + signature, "stdlib:"]}, "checkpoint": {"mirror": SIGNED + signature}, **more}
    )


def test_a_request_is_shown_without_signatures_and_stays_itself_without_any() -> None:
    shown = shown_request(signed(PASSWORD))
    assert PASSWORD not in shown.model_dump_json()
    assert shown.data.train == ("https://bucket.s3.amazonaws.com/a.jsonl?versionId=3", "stdlib:")
    plain = build_request({"run_id": "demo", "data": {"train": ["stdlib:", "a?b"]}})
    assert shown_request(plain) is plain
    assert shown_request(shown) is shown


def test_a_run_resumes_with_another_signature_of_the_same_file_and_with_no_other_file() -> None:
    stored = shown_request(signed("first", training={"schedule_steps": 10, "max_steps": 10}))
    going_on = reconcile(stored, signed("second", training={"max_steps": 20}))
    assert going_on.data.train[0].endswith("second"), "it is read through the URL that was given now"
    assert going_on.training.schedule_steps == 10
    other = build_request({"run_id": "demo", "data": {"train": [SIGNED.replace("a.jsonl", "b.jsonl") + PASSWORD, "stdlib:"]}})
    with pytest.raises(RequestError, match=r"b\.jsonl") as caught:
        reconcile(stored, other)
    assert PASSWORD not in str(caught.value)


def test_record_and_journal_hold_no_secret(tmp_path: Path) -> None:
    state = StateManager.acquire(tmp_path, "demo")
    try:
        facts = {"device": "cpu", "dtype": "float32", "data_fingerprint": "", "model_fingerprint": ""}
        state.write_record(RunRecord(run_id="demo", request=signed(PASSWORD), default_plan=MemoryPlan(micro_batch_rows=1), **facts))
        line = state.emit(Noted(text=f'cannot read "{SIGNED}{PASSWORD}\\" or {CREDENTIALS}'))
    finally:
        state.release()
    assert isinstance(line.event, Noted)
    assert "cannot read" in line.event.text
    assert state.lines() == [line]
    assert [path for path in tmp_path.rglob("*") if path.is_file() and PASSWORD.encode() in path.read_bytes()] == []
    record = read_record(tmp_path / "demo")
    assert record is not None
    assert record.request == shown_request(signed("other"))


@pytest.mark.parametrize("where", ["problem", "remedy", "value", "bound", "field"])
def test_an_error_hides_what_it_was_made_with(where: str) -> None:
    parts = {"problem": "it failed", "remedy": "Mend it.", where: f"at {'x' * 180} {CREDENTIALS} and {SIGNED}{PASSWORD}"}
    error = DataError(**parts)  # type: ignore[arg-type]
    assert PASSWORD not in f"{error} {error!r} {vars(error)}"
    again: MemError = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert "\ud800" not in str(DataError("a \ud800 name", remedy="Mend it."))


def test_a_value_is_cut_after_its_secret_was_hidden() -> None:
    """Cut first, a password would have lost the sign that tells it."""
    error = DataError("x", remedy="y", value=f"{'x' * 180}http://me:{PASSWORD}@host")
    assert PASSWORD[:5] not in str(error)


def test_findings_hide_and_can_be_stored() -> None:
    finding = Finding(check="data", severity="failure", observed=f"{CREDENTIALS} \udcff", needed=f"?token={PASSWORD}", remedy="x")
    assert PASSWORD not in finding.model_dump_json()


@pytest.mark.parametrize(
    "text", ["a basic concept of mine", "user@example.com", "see https://h/x?page=2", "token: none", "key=value", "1 @ 2://"]
)
def test_ordinary_words_stay(text: str) -> None:
    assert hide_in_urls(text) == text
    assert build_request({"run_id": "a", "data": {"text_field": text}}).data.text_field == text


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def group_umask() -> Any:
    before = os.umask(0o002)
    yield
    os.umask(before)


@pytest.mark.usefixtures("group_umask")
def test_records_follow_the_umask_and_logs_are_the_owner_s(tmp_path: Path) -> None:
    write_atomically(tmp_path / "record", "x")
    assert mode_of(tmp_path / "record") == 0o664
    state = StateManager.acquire(tmp_path, "demo")
    state.emit(Noted(text="x"))
    state.release()
    written = [path for path in (tmp_path / "demo").rglob("*") if path.is_file()]
    assert {mode_of(path) for path in written} == {0o664}, written
    replace_text(tmp_path / "request", "x", PRIVATE)
    with open_to_append(tmp_path / "log") as log:
        log.write(b"x")
    assert (mode_of(tmp_path / "request"), mode_of(tmp_path / "log")) == (0o600, 0o600)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["demo", "log", "record", "request"], "no leftovers"


@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
def test_a_log_is_written_beside_what_lies_in_its_place(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "log"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/null")
    with open_to_append(path) as log:
        log.write(b"line\n")
    assert path.read_bytes() == b"line\n"
    assert json.dumps(sorted(item.name for item in tmp_path.iterdir())).count("not-a-file") == 1
