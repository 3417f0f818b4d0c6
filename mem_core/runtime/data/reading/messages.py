"""Chat messages as rows hold them: checked, and made into what a chat template takes. Pure."""

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, cast

from mem_core.runtime.data.reading.refused import FileRefused, RowRefused, kind_name

Message = dict[str, Any]
UNREAD_COLUMNS = ("functions", "documents", "images", "image", "videos", "video", "audios", "audio")
_UNREAD_KEYS = ("function_call", "audio", "images")
_SPEAKERS = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant", "bard": "assistant",
    "bing": "assistant", "model": "assistant", "bot": "assistant", "system": "system", "tool": "tool", "observation": "tool",
}  # fmt: skip
_OWN_KEYS = ("train", "weight")
_REMEDY = "Leave the rows with {} out, or render them yourself and give them as prompt and completion"


def standard_messages(messages: Any) -> Any:
    """Messages with role and content, where they came as ShareGPT's turns (from and value) or, in a table, as JSON in a string.

    Anything else stays what it is, for `read_messages` to judge. A speaker that is not known keeps his name: the template may know him.
    """
    if isinstance(messages, str) and messages.lstrip()[:1] == "[":
        with suppress(ValueError, RecursionError):
            messages = json.loads(messages)
    if not isinstance(messages, list) or not all(_is_turn(turn) for turn in cast("list[Any]", messages)):
        return messages
    return [_from_turn(turn) for turn in cast("list[Message]", messages)]


def _is_turn(turn: Any) -> bool:
    return isinstance(turn, dict) and "role" not in turn and isinstance(turn.get("from"), str) and "value" in turn


def _from_turn(turn: Message) -> Message:
    role = _SPEAKERS.get(turn["from"].lower(), turn["from"])
    return {"role": role, "content": turn["value"], **{key: value for key, value in turn.items() if key not in ("from", "value")}}


def read_messages(messages: Any, field: str, line: int, hint: str = "") -> list[Message]:
    """The messages of a row as they stand there, each of a kind that can be rendered.

    Raises:
        RowRefused: they are none. FileRefused: they hold what is not supported, which would be lost in silence.
    """
    if not isinstance(messages, list) or not messages:
        kind = "an empty list" if messages == [] else kind_name(messages)
        raise RowRefused(f"field '{field}' is {kind}, not a list of messages", hint)
    for position, message in enumerate(cast("list[Any]", messages)):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RowRefused(f"message {position} of '{field}' needs a role that is a string", hint)
        _check(cast(Message, message), f"message {position} of '{field}'", line, hint)
    return cast("list[Message]", messages)


def _check(message: Message, name: str, line: int, hint: str) -> None:
    for key in _UNREAD_KEYS:
        if message.get(key):
            raise FileRefused(line, f"{name} comes with '{key}', which is not supported yet", _REMEDY.format(f"'{key}'"))
    calls, content = message.get("tool_calls"), message.get("content")
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in cast("list[Any]", calls))):
        raise RowRefused(f"the tool_calls of {name} are no list of calls")
    if isinstance(content, list):
        _check_parts(cast("list[Any]", content), name, line)
    elif content is None and not calls:
        raise RowRefused(f"{name} has no content and calls no tool", hint)
    elif content is not None and not isinstance(content, str):
        raise RowRefused(f"the content of {name} is neither text nor a list of parts", hint)
    _check_training(message, name)
    try:
        json.dumps(message, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as exc:
        raise RowRefused(f"{name} holds half a surrogate pair") from exc


def _check_parts(parts: Sequence[Any], name: str, line: int) -> None:
    for part in parts:
        if isinstance(part, str):
            continue
        kind = part.get("type", "text") if isinstance(part, dict) else None
        if kind is None or (kind == "text" and not isinstance(part.get("text"), str)):
            raise RowRefused(f"a part of the content of {name} is no text")
        if kind != "text":
            raise FileRefused(
                line, f"a part of {name} is of type '{kind}', which is not supported yet", _REMEDY.format(f"such parts ({kind})")
            )


def _check_training(message: Message, name: str) -> None:
    train, weight = message.get("train"), message.get("weight")
    if train is not None and not isinstance(train, bool):
        raise RowRefused(f"train of {name} must be true or false")
    if weight is not None and (isinstance(weight, bool) or weight not in (0, 1)):
        raise RowRefused(f"weight of {name} must be 0 or 1")
    if train is True and message["role"] != "assistant":
        raise RowRefused(f"{name} is to be trained and not the assistant's, whose words alone can be", "Set data.assistant_only to false")


def read_tools(row: dict[str, Any], line: int) -> list[dict[str, Any]] | None:
    """The row's column 'tools', also where it is JSON in a string; None where there are none.

    Raises:
        RowRefused: it is no list of objects. FileRefused: the row has another column that would be lost.
    """
    for name in UNREAD_COLUMNS:
        if row.get(name):
            raise FileRefused(line, f"the chat comes with '{name}', which is not supported yet", _REMEDY.format(f"'{name}'"))
    tools: Any = row.get("tools")
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except ValueError as exc:
            raise RowRefused("field 'tools' is text and no JSON") from exc
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in cast("list[Any]", tools)):
        raise RowRefused("field 'tools' is no list of objects")
    return cast("list[dict[str, Any]]", tools)


def is_trained(message: Message) -> bool:
    """Whether a message's own settings leave it to be trained."""
    return message.get("train") is not False and message.get("weight") != 0


def plain_message(message: Message) -> Message:
    """What a template is given: text in one piece, and none of the settings that are meant for training."""
    plain = {key: value for key, value in message.items() if key not in _OWN_KEYS}
    content = plain.get("content")
    if isinstance(content, list):
        plain["content"] = "".join(part if isinstance(part, str) else str(part.get("text", "")) for part in cast("list[Any]", content))
    return plain
