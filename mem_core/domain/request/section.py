"""What every part of a request is: a frozen value, valid from birth."""

from collections.abc import Sequence
from typing import Annotated, Any, cast

from pydantic import BaseModel, ConfigDict, Field, model_validator

PositiveInt = Annotated[int, Field(ge=1)]


def _holds_bool(value: Any) -> bool:
    items = cast("Sequence[Any]", value) if isinstance(value, list | tuple) else (value,)
    return any(isinstance(item, bool) for item in items)


class Section(BaseModel):
    """Base of every part of a request: frozen, unknown keys refused, no NaN, no infinity, no bool where a number is due."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _refuse_bool_as_number(cls, raw: Any) -> Any:
        """Python takes `true` for 1; a request that says `max_steps: true` is a mistake, not a wish for one step."""
        for name, value in cast("dict[str, Any]", raw).items() if isinstance(raw, dict) else ():
            field = cls.model_fields.get(name)
            if field is not None and field.annotation is not bool and _holds_bool(value):
                raise ValueError(f"{name} must not be {str(value).lower()}; this field is no switch")
        return cast("Any", raw)
