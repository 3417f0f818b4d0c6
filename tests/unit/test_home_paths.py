"""`~` means the same in every path that a request or a command line can hold; variables are filled in nowhere."""

from pathlib import Path

import pytest

from flows.commands.output import run_folder
from mem_core.domain.errors import DataError, MemError, RequestError
from mem_core.domain.request import DataSection, ResilienceSection
from mem_core.infrastructure.machine.store import local_path
from mem_core.infrastructure.request.policy_file import load_policy_file
from mem_core.infrastructure.storage.opening import open_store
from mem_core.infrastructure.storage.reading import local_name
from mem_core.runtime.data.reading.sources import resolve_files
from mem_core.runtime.models.folders import local_model_folder
from mem_core.runtime.session.notices import Notices


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder with one of everything."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("A_KEY", "hunter2")
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "y.jsonl").write_text('{"text": "b"}\n')
    (tmp_path / "model").mkdir()
    (tmp_path / "policy.yaml").write_text("{}")
    (tmp_path / "notice").write_text("")
    return tmp_path


def test_home_is_home_in_every_field(home: Path) -> None:
    data = DataSection()
    assert [file.path for file in resolve_files(["~/x.jsonl"], data, "data.train")] == [str(home / "x.jsonl")]
    assert len(resolve_files(["~/*.jsonl"], data, "data.train")) == 2
    assert local_model_folder("~/model") == home / "model"
    assert load_policy_file("~/policy.yaml") is not None
    assert local_path("~/runs") == local_path("file://~/runs") == home / "runs"
    assert open_store("~/mirror").url == open_store(str(home / "mirror")).url
    assert "notice" in Notices(ResilienceSection(preemption_file="~/notice"), lambda text: None).preempted()
    assert run_folder("demo", "~/runs") == home / "runs" / "demo"
    assert run_folder("~/runs/demo", "./elsewhere") == home / "runs" / "demo"


@pytest.mark.usefixtures("home")
def test_what_a_variable_holds_gets_into_no_message() -> None:
    refused: list[MemError] = []
    with pytest.raises(DataError) as data:
        resolve_files(["$A_KEY/x.jsonl"], DataSection(), "data.train")
    with pytest.raises(RequestError) as model:
        local_model_folder("${A_KEY}/model")
    refused += [data.value, model.value]
    assert all("A_KEY" in str(error) and "hunter2" not in str(error) for error in refused)
    assert local_name("$A_KEY/x") == "$A_KEY/x"
