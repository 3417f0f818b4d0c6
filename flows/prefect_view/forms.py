"""The forms in Prefect's UI: what they ask first, what stands under "Advanced", and names for people.

Only titles, order and folding are made here; which values are taken stays as the flows' signatures say it. One is taken in addition,
since a form has no other way to say "as usual": null in place of a whole section of a request (`without_unset`).
"""

from collections.abc import Collection, Mapping
from typing import Any

from prefect.utilities.callables import ParameterSchema
from pydantic import BaseModel

FIRST_SCREEN = ("run_id", "model", "data", "max_steps", "epochs", "global_batch_size", "learning_rate", "level", "seed")
"""Parameters that a form begins with, in this order; everything else is advanced."""
ADVANCED = "Advanced: "
_WORDS = {
    "lora": "LoRA", "zero": "ZeRO", "url": "URL", "lr": "learning rate", "eps": "epsilon", "dtype": "number format", "api": "API",
    "env": "variable", "deepspeed": "DeepSpeed", "num": "number of", "runtimerequest": "request",
}  # fmt: skip
_LAST_IN_REQUEST = ("deepspeed", "schema_version")
_KINDS = {
    "null": "not set",
    "string": "text",
    "number": "number",
    "integer": "number",
    "array": "list",
    "boolean": "switch",
    "object": "fields",
}
Schema = dict[str, Any]


def form_of(parameters: ParameterSchema) -> ParameterSchema:
    """The parameters of a flow as its form shows them."""
    definitions = {name: _definition(name, schema) for name, schema in parameters.definitions.items()}
    names = sorted(parameters.properties, key=lambda name: _rank(name, parameters.properties[name].get("position", 0)))
    others = ADVANCED if any(name in FIRST_SCREEN for name in names) else ""
    properties = {
        name: _parameter(name, parameters.properties[name], position, "" if name in FIRST_SCREEN else others)
        for position, name in enumerate(names)
    }
    return parameters.model_copy(update={"properties": properties, "definitions": definitions})


def sections_of(model: type[BaseModel]) -> frozenset[str]:
    """The fields that hold a section and may not be null in the model itself."""
    kinds = {name: field.annotation for name, field in model.model_fields.items()}
    return frozenset(name for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, BaseModel))


def without_unset(request: Mapping[str, Any], sections: Collection[str]) -> dict[str, Any]:
    """A request from a form, without the sections that it left as usual."""
    return {name: value for name, value in request.items() if not (value is None and name in sections)}


def _rank(name: str, position: int) -> tuple[int, int]:
    return (FIRST_SCREEN.index(name), 0) if name in FIRST_SCREEN else (len(FIRST_SCREEN), position)


def _parameter(name: str, schema: Schema, position: int, where: str) -> Schema:
    """A field that may be left empty can be typed into at once: of its kinds the empty one comes last, and is not chosen beforehand."""
    titled = {**_named(schema), "title": f"{where}{_title(name)}", "position": position}
    kinds = titled.get("anyOf")
    if kinds and schema.get("default", ...) is None:
        titled["anyOf"] = sorted(kinds, key=lambda kind: kind.get("type") == "null")
        del titled["default"]
    return titled


def _definition(name: str, schema: Schema) -> Schema:
    properties = {field: _field(field, value) for field, value in schema.get("properties", {}).items()}
    if name == "RuntimeRequest":
        order = sorted(properties, key=lambda field: _LAST_IN_REQUEST.index(field) if field in _LAST_IN_REQUEST else -1)
        properties = {field: {**_folded(properties[field]), "position": position} for position, field in enumerate(order)}
    return {**schema, "title": _title(name.removesuffix("Section").lower()), **({"properties": properties} if properties else {})}


def _field(name: str, schema: Schema) -> Schema:
    """A title that somebody gave a field stays; one that pydantic made of its name is made anew."""
    given = schema.get("title", "")
    made_up = given == name.replace("_", " ").title()
    return {**_named(schema), "title": _title(name) if made_up or not given else given}


def _folded(schema: Schema) -> Schema:
    """A section of a request, closed until somebody opens it."""
    if "$ref" not in schema:
        return schema
    usual = {"type": "null", "title": "as usual"}
    others = {key: value for key, value in schema.items() if key not in ("$ref", "default")}
    return {**others, "anyOf": [usual, {"$ref": schema["$ref"], "title": "set"}], "default": None}


def _named(schema: Schema) -> Schema:
    """Each kind of value that a field takes, or each item of a list, under a name for people, which is what the form's tabs show."""
    kinds, items = schema.get("anyOf"), schema.get("items")
    if isinstance(items, dict):
        schema = {**schema, "items": _named(items)}
    return {**schema, "anyOf": [{**kind, "title": _kind(kind)} for kind in kinds]} if kinds else schema


def _kind(kind: Schema) -> str:
    if "$ref" in kind:
        return "set"
    return str(kind["const"]) if "const" in kind else _KINDS.get(kind.get("type", ""), "fields")


def _title(name: str) -> str:
    """`time_limit_s` as "Time limit (s)"."""
    words = name.split("_")
    unit = f" ({words.pop()})" if len(words) > 1 and words[-1] == "s" else ""
    text = " ".join(_WORDS.get(word, word) for word in words)
    return f"{text[:1].upper()}{text[1:]}{unit}"
