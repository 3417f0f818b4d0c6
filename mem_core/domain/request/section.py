"""What every part of a request is: a frozen value, valid from birth."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, cast

from pydantic import BaseModel, ConfigDict, Field, model_validator

from mem_core.domain.errors import RequestError
from mem_core.domain.secrets import holds_credentials

PositiveInt = Annotated[int, Field(ge=1)]
LONGEST_TEXT = 8_192


def _holds_bool(value: Any) -> bool:
    items = cast("Sequence[Any]", value) if isinstance(value, list | tuple) else (value,)
    return any(isinstance(item, bool) for item in items)


def refuse_unusable_text(values: Any, field: str = "") -> None:
    """Texts that may not or cannot be stored, at any depth; sections that exist already have been through this.

    Not a ValueError, since pydantic would print what it was given.

    Raises:
        RequestError: naming the field; never the value of one that carries a password.
    """
    seen: set[int] = set()
    waiting: list[tuple[str, Any]] = [(field, values)]
    while waiting:
        where, value = waiting.pop()
        if isinstance(value, str):
            _refuse_text(where, value)
        elif isinstance(value, Mapping | list | tuple) and id(cast("object", value)) not in seen:
            seen.add(id(cast("object", value)))
            named = cast("Mapping[Any, Any]", value).items() if isinstance(value, Mapping) else enumerate(cast("Sequence[Any]", value))
            for name, inner in named:
                if isinstance(name, str):
                    _refuse_text(f"{where}.{name}".lstrip("."), name)
                waiting.append((f"{where}.{name}".lstrip("."), inner))


def _refuse_text(field: str, text: str) -> None:
    if holds_credentials(text):
        raise RequestError(
            "it carries a user, password or key, and a request is stored and shown",
            field=field,
            remedy="Leave them out; keys come from the environment or a Prefect block.",
        )
    if "\0" in text or not _can_be_stored(text):
        raise RequestError("it holds a character that no name or text can have", field=field, value=repr(text), remedy="Correct the text.")
    if len(text) > LONGEST_TEXT:
        raise RequestError(f"it has {len(text)} characters", field=field, bound=f"at most {LONGEST_TEXT}", remedy="Correct the text.")


def _can_be_stored(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


class Section(BaseModel):
    """Base of every part of a request: frozen, unknown keys refused, no NaN, no infinity, no bool where a number is due."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_is_not_meant(cls, raw: Any) -> Any:
        """Python takes `true` for 1; a request that says `max_steps: true` is a mistake, not a wish for one step."""
        refuse_unusable_text(raw)
        for name, value in cast("dict[str, Any]", raw).items() if isinstance(raw, dict) else ():
            field = cls.model_fields.get(name)
            if field is not None and field.annotation is not bool and _holds_bool(value):
                raise ValueError(f"{name} must not be {str(value).lower()}; this field is no switch")
        return cast("Any", raw)
