"""What the doctor says of a tiny model of each architecture is what one step of training does, on packed chats and on text; and what
was trained loads again with no key missing."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flows.commands.export import export_checkpoint
from mem_core.bootstrap import examine_only
from mem_core.domain.errors import MemError
from mem_core.domain.request import RuntimeRequest
from mem_core.domain.run import RunResult
from mem_core.infrastructure.settings import Settings
from mem_core.testing.model_folders import ARCHITECTURES, model_folder

pytestmark = pytest.mark.integration
QUICK = ("mixtral",)
ONE_A_ROW = ("opt", "bloom", "gpt_oss")  # of which this version of transformers lets documents be seen that stand before
CASES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in ARCHITECTURES]
EXTRA: dict[str, dict[str, Any]] = {"mixtral": {"output_router_logits": True}, "falcon": {"alibi": True}}


@pytest.fixture
def data(tmp_path: Path) -> dict[str, Any]:
    """Sections by name: short chats of two turns, and text."""
    chats, text = tmp_path / "chats.jsonl", tmp_path / "text.txt"
    turns = [{"role": role, "content": f"the {word} fox"} for word in ("quick", "brown") for role in ("user", "assistant")]
    chats.write_text("".join(json.dumps({"messages": turns, "id": number}) + "\n" for number in range(24)))
    text.write_text("The quick brown fox jumps over the lazy dog. " * 60)
    common = {"validation": None, "sequence_length": 256}
    return {"chats": {"train": [str(chats)], "messages_field": "messages", **common}, "text": {"train": [str(text)], **common}}


@pytest.mark.parametrize("name", CASES)
def test_the_doctor_s_word_is_what_training_does(
    name: str,
    data: dict[str, Any],
    tmp_path: Path,
    drive: Callable[..., RunResult],
    nano: Callable[..., RuntimeRequest],
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = model_folder(tmp_path / "model", name, **EXTRA.get(name, {}))
    for kind, section in data.items():
        request = nano(
            f"{name.replace('_', '-')}-{kind}", model={"source": str(folder)}, data=section,
            training={"max_steps": 1, "segment_steps": 1, "global_batch_size": 2, "warmup_steps": 0},
        )  # fmt: skip
        report = examine_only(request, Settings.from_environment())
        assert report.failures == ()
        found = {finding.check: finding for finding in report.findings}
        assert ("data.packing" in found) == (kind == "chats" and name in ONE_A_ROW)
        assert ("trained on" in found["model.source"].observed if "model.source" in found else False) == (name == "mixtral")
        notes: list[str] = []
        result = drive(request, prepared=lambda draft, notes=notes: notes.extend(draft.data.notes))
        assert result.applied_steps == 1
        assert any("padded: this model cannot keep documents apart" in note for note in notes) == ("data.packing" in found)
        check_export(Path(result.run_folder), result, capsys)


def check_export(run: Path, result: RunResult, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModelForCausalLM

    assert export_checkpoint(run, None, None, as_json=True) == 0
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])  # libraries print there what they like
    assert answer["weights_digest"] == result.weights_digest
    _, info = AutoModelForCausalLM.from_pretrained(answer["folder"], local_files_only=True, output_loading_info=True)
    assert (set(info["missing_keys"]), set(info["unexpected_keys"]), set(info["mismatched_keys"])) == (set(), set(), set())


def test_a_row_that_cannot_be_told_apart_is_refused_by_both(
    data: dict[str, Any], tmp_path: Path, drive: Callable[..., RunResult], nano: Callable[..., RuntimeRequest]
) -> None:
    """Old thinking is stripped: by default nothing is guessed; skipped aloud where asked; trained as a whole where that is asked."""
    folder = model_folder(tmp_path / "model", "qwen3")
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' and loop.last %}"
        "{{ '<think>\n\n</think>\n\n' }}{% endif %}{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    path = Path(data["chats"]["train"][0])
    single = json.dumps({"messages": json.loads(path.read_text().splitlines()[0])["messages"][:2]}) + "\n"
    path.write_text(single * 3 + path.read_text().splitlines()[0] + "\n" + single * 20)
    training = {"max_steps": 1, "segment_steps": 1, "global_batch_size": 2, "warmup_steps": 0}
    request = nano("ambiguous", model={"source": str(folder)}, data=data["chats"], training=training)
    (failure,) = examine_only(request, Settings.from_environment()).failures
    assert f"{path}:4: the assistant's words cannot be told apart in message 1" in failure.observed
    assert "data.assistant_only to false" in failure.remedy
    with pytest.raises(MemError, match="cannot be told apart in message 1"):
        drive(request)
    skipping = nano("skipping", model={"source": str(folder)}, data={**data["chats"], "on_bad_row": "skip"}, training=training)
    result = drive(skipping)
    assert (result.applied_steps, result.data.num_bad_rows if result.data is not None else None) == (1, 1)
    whole = nano("whole", model={"source": str(folder)}, data={**data["chats"], "assistant_only": False}, training=training)
    assert drive(whole).applied_steps == 1
