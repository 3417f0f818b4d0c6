"""What rows look like that the request's fields do not fit, and the setting that would. Pure."""

from typing import Any

from mem_core.runtime.data.reading.columns import CHATS

_PAIRS = (
    ("prompt", "completion"), ("prompt", "response"), ("prompt", "answer"), ("instruction", "output"), ("instruction", "response"),
    ("question", "answer"), ("question", "response"), ("query", "response"), ("query", "answer"), ("input", "output"),
    ("source", "target"), ("inputs", "targets"),
)  # fmt: skip
_TEXTS = ("text", "content", "body", "document", "article", "Text", "TEXT")


def fitting_setting(row: dict[str, Any]) -> str:
    """A sentence that names the kind of row and what to set for it; empty where the row is of no known kind."""
    return _chat(row) or _preference(row) or _pair(row) or _text(row)


def _chat(row: dict[str, Any]) -> str:
    for name in CHATS:
        turns = row.get(name)
        if isinstance(turns, list) and turns and all(isinstance(turn, dict) for turn in turns):
            if all("role" in turn and "content" in turn for turn in turns):
                return f"These are chats: set data.messages_field to {name}"
            if all("from" in turn and "value" in turn for turn in turns):
                return f"These are ShareGPT conversations: set data.messages_field to {name}"
    return ""


def _preference(row: dict[str, Any]) -> str:
    if "chosen" not in row or "rejected" not in row:
        return ""
    only = "These are pairs of a chosen and a rejected answer (DPO), which cannot be trained on as pairs yet: "
    if isinstance(row.get("prompt"), str) and isinstance(row["chosen"], str):
        return f"{only}data.prompt_field: prompt with data.completion_field: chosen trains on the chosen ones alone"
    if isinstance(row["chosen"], list):
        return f"{only}data.messages_field: chosen trains on the chosen ones alone"
    return f"{only}data.text_field: chosen trains on the chosen ones alone"


def _pair(row: dict[str, Any]) -> str:
    for prompt, completion in _PAIRS:
        if isinstance(row.get(prompt), str) and isinstance(row.get(completion), str):
            setting = f"set data.prompt_field to {prompt} and data.completion_field to {completion}"
            if (prompt, completion) == ("instruction", "output"):
                third = ", and data.context_field to input" if isinstance(row.get("input"), str) else ""
                return f"These are Alpaca rows: {setting}{third}"
            return f"These are prompts with completions: {setting}"
    return ""


def _text(row: dict[str, Any]) -> str:
    names = [name for name in _TEXTS if isinstance(row.get(name), str)] or [name for name, value in row.items() if isinstance(value, str)]
    return f"Their text stands in '{names[0][:40]}': set data.text_field to it" if len(names) == 1 else ""
