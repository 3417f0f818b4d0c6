"""What preparation counted reaches journal, result and report: rows that were skipped, left out or cut are named, never silent."""

from pathlib import Path

from mem_core.core.run.fold import fold_result
from mem_core.core.run.run_report import load_report_data
from mem_core.core.run.state_manager import StateManager
from mem_core.domain.events import DataPrepared
from mem_core.domain.request import DataSection
from mem_core.domain.run import DataSummary
from mem_core.infrastructure.telemetry.report_page.page import render_report
from mem_core.runtime.data.encoding.notices import coverage
from mem_core.runtime.data.encoding.sequences import RowForm
from mem_core.runtime.data.encoding.tokenize_process import prepare_here
from mem_core.runtime.data.serving.shards import TokenIndex
from mem_core.runtime.data.values import PreparedData, PrepareJob


def prepared(tmp_path: Path) -> PreparedData:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "' + "p" * 300 + '", "completion": "a"}\n[]\n\n' + '{"prompt": "2+2=", "completion": "4"}\n' * 3)
    data = DataSection(
        train=(str(path),), validation=None, prompt_field="prompt", completion_field="completion", on_bad_row="skip", packing=False
    )
    job = PrepareJob(data=data, tokenizer_source="preset:llama-nano", vocab_size=None, cache_dir=tmp_path / "cache", parent_pid=0)
    return prepare_here(job, lambda progress: None)


def test_counts_reach_result_and_report(tmp_path: Path) -> None:
    state = StateManager.acquire(tmp_path, "run")
    state.start_attempt(None)
    assert fold_result(state.lines()).data is None
    state.emit(DataPrepared(data=prepared(tmp_path).summary()))
    told = fold_result(state.lines()).data
    state.release()
    assert told is not None
    assert (told.num_documents, told.num_sequences, told.num_bad_rows) == (4, 4, 1)
    assert told.bad_rows == (f"{tmp_path}/rows.jsonl:2: a list where an object is due",)
    assert told.dropped_rows == {"blank_lines": 1}
    page = render_report(load_report_data(tmp_path / "run"))
    assert '<h2 id="data">Data</h2>' in page
    for name, number in (("files", 1), ("documents", 4), ("sequences trained on", 4), ("bad rows", 1)):
        assert f'<td>{name}</td><td class="number">{number}</td>' in page
    told = ("rows.jsonl:2: a list where an object is due", "blank lines", "the beginning of the prompt gave way", "1 bad row was skipped")
    for words in told:
        assert words in page


def test_a_journal_of_an_older_version_has_no_such_part(tmp_path: Path) -> None:
    state = StateManager.acquire(tmp_path, "run")
    state.start_attempt(None)
    state.release()
    assert 'id="data"' not in render_report(load_report_data(tmp_path / "run"))


def test_a_loss_over_whole_conversations_is_a_warning_in_the_report_too(tmp_path: Path) -> None:
    data = DataSection(train=("chats.jsonl",), messages_field="messages", assistant_only=False)
    index = TokenIndex(
        dtype="uint16", shard_tokens=(10,), has_mask=False, num_rows=1, num_tokens=10, trained_tokens=9, longest_tokens=10, max_token_id=1
    )
    (remark,) = coverage(data, RowForm(masked=False), index, rules=3)
    assert (remark.severity, remark.check) == ("warning", "data.loss")
    state = StateManager.acquire(tmp_path, "run")
    state.start_attempt(None)
    state.emit(DataPrepared(data=DataSummary(notes=(remark.text,))))
    state.release()
    assert "the loss covers whole conversations" in render_report(load_report_data(tmp_path / "run"))
