"""What a pickle program would have on its stack, without running it: kinds of things, never the things.

Names alone do not make a program harmless. `BUILD` with an allowed class under it writes into the class itself, for the whole process;
`REDUCE` calls whatever lies there, also something that was made before; a state that is a tuple sets attributes one by one, `__class__`
among them. Training state needs none of that: classes are called, what they made is filled.
"""

from collections.abc import Callable
from typing import Literal

Kind = Literal["mark", "value", "tuple", "list", "dict", "set", "name", "made"]
_PUSHED: dict[str, Kind] = {
    "MARK": "mark", "GLOBAL": "name", "NONE": "value", "NEWTRUE": "value", "NEWFALSE": "value", "BININT": "value", "BININT1": "value",
    "BININT2": "value", "LONG1": "value", "BINFLOAT": "value", "BINUNICODE": "value", "SHORT_BINSTRING": "value", "EMPTY_TUPLE": "tuple",
    "EMPTY_LIST": "list", "EMPTY_DICT": "dict", "EMPTY_SET": "set",
}  # fmt: skip
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_FILLED: dict[str, tuple[Kind, ...]] = {  # what may lie below what is put into it: an OrderedDict was made and is filled as a dict
    "APPEND": ("list",), "APPENDS": ("list",), "SETITEM": ("dict", "made"), "SETITEMS": ("dict", "made"),
}  # fmt: skip
_WORDS: dict[Kind, str] = {"name": "a class", "made": "an object", "value": "a plain value"}


class PickleStack:
    """Takes the opcodes that `pickle_scan` allows, one by one."""

    def __init__(self) -> None:
        self._stack: list[Kind] = []
        self._memo: dict[int, Kind] = {}

    def take(self, opcode: str, argument: object) -> str:
        """Why this opcode must not be run where it stands; empty where it may be.

        Raises:
            IndexError, KeyError: the program takes what is not there: it is no pickle.
        """
        if opcode in _PUSHED:
            self._stack.append(_PUSHED[opcode])
        elif opcode in ("BINGET", "LONG_BINGET"):
            self._stack.append(self._memo[int(str(argument))])
        elif opcode in ("BINPUT", "LONG_BINPUT"):
            self._memo[int(str(argument))] = self._stack[-1]
        elif opcode == "TUPLE" or opcode in _TUPLES:
            self._drop(_TUPLES.get(opcode))
            self._stack.append("tuple")
        elif opcode == "BINPERSID":
            self._stack[-1] = "value"
        else:
            return self._act(opcode)
        return ""

    def _act(self, opcode: str) -> str:
        acts: dict[str, Callable[[], str]] = {"REDUCE": self._call, "NEWOBJ": self._call, "BUILD": self._build}
        if opcode in acts:
            return acts[opcode]()
        if opcode in _FILLED:
            self._drop({"APPEND": 1, "SETITEM": 2}.get(opcode))
            target = self._stack[-1]
            return "" if target in _FILLED[opcode] else f"on {_WORDS.get(target, target)}"
        return ""  # PROTO and STOP

    def _call(self) -> str:
        arguments, called = self._stack.pop(), self._stack.pop()
        self._stack.append("made")
        if called != "name":
            return f"calls {_WORDS.get(called, called)}"
        return "" if arguments == "tuple" else f"with {_WORDS.get(arguments, arguments)} for arguments"

    def _build(self) -> str:
        state, target = self._stack.pop(), self._stack[-1]
        if target != "made":
            return f"on {_WORDS.get(target, target)}"
        return "" if state == "dict" else f"with {_WORDS.get(state, state)} for state"

    def _drop(self, count: int | None) -> None:
        """The last `count` things; without a count, everything down to the mark and the mark."""
        if count is not None:
            if count > len(self._stack):
                raise IndexError("not enough on the stack")
            del self._stack[-count:]
            return
        while self._stack.pop() != "mark":
            pass
