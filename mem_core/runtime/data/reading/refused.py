"""Why a row, or a whole file of rows, cannot be used."""

KINDS = {list: "a list", str: "a string", int: "a number", float: "a number", bool: "true or false", type(None): "null", dict: "an object"}


def kind_name(value: object) -> str:
    """What a value of a row is, in words for people."""
    return KINDS.get(type(value), f"of type {type(value).__name__}")


class FileRefused(ValueError):
    """The file cannot be used as rows at all, or holds rows that must not be passed over: no count of bad rows would say what is lost."""

    def __init__(self, line: int, what: str, remedy: str) -> None:
        super().__init__(what)
        self.line = line
        self.what = what
        self.remedy = remedy


class RowRefused(ValueError):
    """One row cannot be used. `hint`: the setting that would fit it, where it is a known kind of row."""

    def __init__(self, reason: str, hint: str = "") -> None:
        super().__init__(reason)
        self.hint = hint
