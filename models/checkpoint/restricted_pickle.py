"""A pickle machine that can build plain containers and nothing else.

``pickle.Unpickler`` imports what a file names and calls what it has imported. Restricting its ``find_class`` still
leaves it the extension registry, attributes set by BUILD, memo indices that allocate gigabytes and dictionary keys that
take for ever to hash. Here a file's names stay strings, the only calls are to the functions that the caller lists, and
operations that checkpoints have no use for are refused. ``pickletools`` of the standard library decodes the stream.
"""

from __future__ import annotations

import pickletools
import re
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import IO, Any, Callable

_LIMIT = 1 << 26
_NUMBERS = ("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT")
_BYTE_STRINGS = ("STRING", "BINSTRING", "SHORT_BINSTRING")  # Python 2's str, decoded as Latin-1 or ASCII
_STRINGS = ("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8")
_LITERALS = frozenset({*_NUMBERS, *_BYTE_STRINGS, *_STRINGS})
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_FRESH: dict[str, Callable[[], Any]] = {"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_TUPLE": tuple}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_KEYS = (str, int, float, bool, type(None))  # their hashes are cheap whatever the file holds


class Refused(ValueError):
    """The pickle is intact and asks for something that is not allowed."""


@dataclass(frozen=True)
class Symbol:
    """What a pickle names: the qualified name, not the thing."""

    name: str


def load(
    stream: IO[bytes],
    calls: Mapping[str, Callable[..., Any]],
    names: Collection[str],
    persistent: Callable[[Any], Any],
) -> Any:
    """The object of one pickle (protocols 0 to 5); leaves ``stream`` behind it.

    calls: qualified name -> what is done when the pickle calls it. names: further names that may occur, as arguments.
    persistent: makes an object of a persistent id. All are given whatever the file has; a TypeError of theirs is taken
    for damage. ``Refused`` names what is not allowed; other ValueErrors are damage. Both in one line.
    """
    machine = _Machine(calls, names, persistent)
    begin = stream.tell()
    operations = pickletools.genops(stream)
    try:
        for operation, argument, position in operations:
            if (position or 0) - begin > _LIMIT:
                raise Refused(f"its pickle is longer than {_LIMIT >> 20} MiB, which no table of tensors is")
            machine.step(operation.name, argument)
        return machine.stack[-1]
    except Refused:
        raise
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, struct.error) as error:
        reason = f" ({shown(str(error), 80)})" if isinstance(error, ValueError) and str(error) else ""
        raise ValueError(f"its pickle is damaged or cut off{reason}") from None


def shown(text: str, longest: int = 120) -> str:
    """A file's text for a message: one line, no control characters, not too long."""
    short = text if len(text) <= longest else text[:longest] + "..."
    return short if re.fullmatch(r"[ -~]*", short) else ascii(short)


class _Machine:
    """The stack, the marks on it and the memo."""

    def __init__(
        self, calls: Mapping[str, Callable[..., Any]], names: Collection[str], persistent: Callable[[Any], Any]
    ) -> None:
        self.stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self._calls = calls
        self._names = names
        self._persistent = persistent

    def step(self, name: str, argument: Any) -> None:
        if name in _LITERALS:
            self.stack.append(argument)
        elif name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name])
        elif name in _FRESH:
            self.stack.append(_FRESH[name]())
        elif name in _TUPLES:
            self.stack.append(tuple(self._pop(_TUPLES[name])))
        elif name in _OPERATIONS:
            _OPERATIONS[name](self, argument)
        else:
            raise Refused(f"uses the pickle operation {name}, which tensors and plain containers do not need")

    def _pop(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            raise IndexError
        items = self.stack[-count:]
        del self.stack[-count:]
        return items

    def _from_mark(self) -> list[Any]:
        mark = self._marks.pop()
        items = self.stack[mark:]
        del self.stack[mark:]
        return items

    def nothing(self, _: Any) -> None:
        """PROTO, FRAME and STOP: the decoder sees to them."""

    def mark(self, _: Any) -> None:
        self._marks.append(len(self.stack))

    def pop(self, _: Any) -> None:
        if self._marks and self._marks[-1] == len(self.stack):
            self._marks.pop()
        else:
            self.stack.pop()

    def pop_mark(self, _: Any) -> None:
        self._from_mark()

    def duplicate(self, _: Any) -> None:
        self.stack.append(self.stack[-1])

    def put(self, index: int | None) -> None:
        self._memo[len(self._memo) if index is None else index] = self.stack[-1]

    def get(self, index: int) -> None:
        self.stack.append(self._memo[index])

    def make_tuple(self, _: Any) -> None:
        self.stack.append(tuple(self._from_mark()))

    def make_list(self, _: Any) -> None:
        self.stack.append(self._from_mark())

    def make_dict(self, _: Any) -> None:
        items = self._from_mark()
        self.stack.append({})
        self._set(items)

    def append(self, _: Any) -> None:
        self._extend(self._pop(1))

    def appends(self, _: Any) -> None:
        self._extend(self._from_mark())

    def _extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not list:
            raise Refused(f"appends to a {type(target).__name__}")
        target.extend(items)

    def set_item(self, _: Any) -> None:
        self._set(self._pop(2))

    def set_items(self, _: Any) -> None:
        self._set(self._from_mark())

    def _set(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not dict:
            raise Refused(f"sets items of a {type(target).__name__}")
        put_items(target, zip(items[::2], items[1::2]))

    def name(self, pair: str) -> None:
        self._name(pair.replace(" ", ".", 1))

    def name_from_stack(self, _: Any) -> None:
        module, name = self._pop(2)
        if type(module) is not str or type(name) is not str:
            raise TypeError
        self._name(f"{module}.{name}")

    def _name(self, name: str) -> None:
        if name not in self._calls and name not in self._names:
            raise not_allowed(name)
        self.stack.append(Symbol(name))

    def refuse_instance(self, pair: str) -> None:
        raise not_allowed(pair.replace(" ", ".", 1))

    def call(self, _: Any) -> None:
        function, arguments = self._pop(2)
        if type(function) is not Symbol or type(arguments) is not tuple:
            raise TypeError
        if function.name not in self._calls:
            raise Refused(f"calls {function.name}, which makes no tensor")
        self.stack.append(self._calls[function.name](*arguments))

    def build(self, _: Any) -> None:
        # The attributes of an OrderedDict: versions of a module's classes, of no use here.
        self.stack.pop()
        if type(self.stack[-1]) is not dict:
            raise Refused(f"sets attributes of a {type(self.stack[-1]).__name__}")

    def persist(self, _: Any) -> None:
        self.stack.append(self._persistent(self.stack.pop()))


_OPERATIONS: dict[str, Callable[[_Machine, Any], None]] = {
    "PROTO": _Machine.nothing,
    "FRAME": _Machine.nothing,
    "STOP": _Machine.nothing,
    "MARK": _Machine.mark,
    "POP": _Machine.pop,
    "POP_MARK": _Machine.pop_mark,
    "DUP": _Machine.duplicate,
    "PUT": _Machine.put,
    "BINPUT": _Machine.put,
    "LONG_BINPUT": _Machine.put,
    "MEMOIZE": _Machine.put,
    "GET": _Machine.get,
    "BINGET": _Machine.get,
    "LONG_BINGET": _Machine.get,
    "TUPLE": _Machine.make_tuple,
    "LIST": _Machine.make_list,
    "DICT": _Machine.make_dict,
    "APPEND": _Machine.append,
    "APPENDS": _Machine.appends,
    "SETITEM": _Machine.set_item,
    "SETITEMS": _Machine.set_items,
    "GLOBAL": _Machine.name,
    "STACK_GLOBAL": _Machine.name_from_stack,
    "INST": _Machine.refuse_instance,
    "REDUCE": _Machine.call,
    "BUILD": _Machine.build,
    "BINPERSID": _Machine.persist,
}


def put_items(target: dict[Any, Any], pairs: Any) -> None:
    """``target.update(pairs)`` if all keys are of the plain types."""
    for key, value in pairs:
        if type(key) not in _KEYS:
            raise Refused(f"has a dict key of type {type(key).__name__}; keys have to be strings or numbers")
        target[key] = value


def not_allowed(name: str) -> Refused:
    """The refusal of something that a pickle names."""
    if name.startswith("__builtin__."):  # Python 2's name, which protocols 0 to 2 write
        name = "builtins." + name.partition(".")[2]
    return Refused(
        f"refers to {shown(name)}, which is not a tensor or plain container; nothing of the file was executed; "
        "save the tensors alone, torch.save(model.state_dict(), ...), or as safetensors"
    )
