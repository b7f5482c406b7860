"""Tests and the solution that they judge, in two processes: what a test asks of the solution goes over as a call.

    tests   ["call", add, [2, 3], {}] ->   solution
            <- ["returned", 5, []]  or  ["raised", ValueError, ["text"], " (line 2: ...)"]

The solution learns which of its names is called with which arguments. What it answers is a claim: plain values, which
are built anew beside the test and compared there. `tests_process` and `solution_process` are the two sides.
"""

import builtins
import importlib
import itertools
import json
import operator
import os
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

LOST = 3
"""The exit code of the tests' process after the solution has ended; it may say why."""
MAX_BYTES = 8 << 20
"""The most that one message may have."""
MAX_ITEMS = 100_000
MAX_TEXT = 1000
_LISTS: dict[str, type[Any]] = {each.__name__: each for each in (list, tuple, set, frozenset)}
_MADE: dict[str, Callable[[Any], list[object]]] = {
    "builtins.bytes": lambda value: [list(value)],
    "builtins.bytearray": lambda value: [list(value)],
    "builtins.complex": lambda value: [value.real, value.imag],
    "builtins.range": lambda value: [value.start, value.stop, value.step],
    "collections.deque": lambda value: [list(value), value.maxlen],
    "collections.Counter": lambda value: [dict(value)],
    "collections.OrderedDict": lambda value: [dict(value)],
    "decimal.Decimal": lambda value: [str(value)],
    "fractions.Fraction": lambda value: [value.numerator, value.denominator],
    "datetime.date": lambda value: [value.year, value.month, value.day],
    "datetime.datetime": lambda value: [*value.timetuple()[:6], value.microsecond, _no_zone(value.tzinfo)],
    "datetime.timedelta": lambda value: [value.days, value.seconds, value.microseconds],
}
"""Further plain values: class -> the arguments that build an equal one."""
_ENDING_LOOPS = (StopIteration, StopAsyncIteration)
"""Raised by a call, they would end a loop of the test early, as if it had gone through all its cases."""


def _no_zone(zone: object) -> None:
    if zone is not None:
        raise TypeError("a time with a time zone is passed between a test and the solution")


class Remote:
    """An object of the other side: a function, a class, what a class or generator made.

    It is called and asked for attributes, items and the next value. What would let it see a value of the test and
    answer for the comparison, such as `==` or `-` beside a plain value, is not passed on.
    """

    __slots__ = ("_exchange_number", "_exchange_peer")
    _exchange_peer: "Peer"
    _exchange_number: int

    def __init__(self, peer: "Peer", number: int) -> None:
        object.__setattr__(self, "_exchange_peer", peer)
        object.__setattr__(self, "_exchange_number", number)

    def __call__(self, *arguments: object, **named: object) -> object:
        return self._exchange_peer.ask("call", self, list(arguments), named)

    def __getattr__(self, name: str) -> object:
        if name.startswith("__") and name != "__name__":  # numpy asks for addresses in this way
            raise AttributeError(name)
        return self._exchange_peer.ask("getattr", self, name)

    def __setattr__(self, name: str, value: object) -> None:
        self._exchange_peer.ask("setattr", self, name, value)

    def __str__(self) -> str:
        return str(self._exchange_peer.ask("str", self))

    def __repr__(self) -> str:
        return str(self._exchange_peer.ask("repr", self))

    def __bool__(self) -> bool:
        return bool(self._exchange_peer.ask("bool", self))

    def __len__(self) -> int:
        return operator.index(self._exchange_peer.ask("len", self))  # pyright: ignore[reportArgumentType]  or TypeError

    def __iter__(self) -> Iterator[object]:
        found: Any = self._exchange_peer.ask("iter", self)
        return found if type(found) is Remote else iter(found)

    def __next__(self) -> object:
        return self._exchange_peer.ask("next", self)

    def __getitem__(self, key: object) -> object:
        return self._exchange_peer.ask("getitem", self, key)

    def __setitem__(self, key: object, value: object) -> None:
        self._exchange_peer.ask("setitem", self, key, value)

    def __enter__(self) -> object:
        return self._exchange_peer.ask("enter", self)

    def __exit__(self, *_: object) -> None:
        self._exchange_peer.ask("exit", self)

    def __instancecheck__(self, value: object) -> bool:
        return type(value) is Remote and bool(self._exchange_peer.ask("isinstance", value, self))

    def __hash__(self) -> int:
        return self._exchange_number


def _between_remotes(name: str) -> Callable[[Remote, object], object]:
    def method(self: Remote, other: object) -> object:
        return self._exchange_peer.ask(name, self, other) if type(other) is Remote else NotImplemented

    return method


_BINARY = ("eq", "ne", "lt", "le", "gt", "ge", "add", "sub", "mul", "truediv")
for _name in _BINARY:
    setattr(Remote, f"__{_name}__", _between_remotes(_name))

OPERATIONS: dict[str, Callable[..., object]] = {
    "call": lambda function, arguments, named: function(*arguments, **named),
    "enter": lambda value: value.__enter__(),
    "exit": lambda value: value.__exit__(None, None, None),
    **{each.__name__: each for each in (getattr, setattr, len, iter, next, str, repr, bool, isinstance)},
    **{name: getattr(operator, name) for name in (*_BINARY, "getitem", "setitem")},
}


class Peer:
    """One side of the exchange. Both ask, because a test may pass a function to the solution.

    report: the judge's; it is told "refused" when a test cannot be run in this way, whatever the solution does, and
    "lost" when the solution ended or gave no answer. Then the process ends, because a test might catch an exception.
    """

    def __init__(
        self,
        descriptor: int,
        operations: dict[str, Callable[..., object]],
        report: Callable[[str, str], None] | None = None,
    ) -> None:
        self.has_asked = False
        self._descriptor = descriptor
        self._operations = operations
        self._report = report
        self._own: dict[int, object] = {}
        self._errors: dict[int, type[Any]] = {}
        self._remotes: dict[int, Remote] = {}
        self._lock = threading.RLock()
        self._depth = 0

    def ask(self, operation: str, *arguments: object) -> object:
        """What the other side answers. Raises what it says was raised, as a built-in exception, or one made like it."""
        with self._lock:
            self.has_asked = True
            try:
                message = self._content([operation, *[self._encode(each) for each in arguments]])
            except (TypeError, ValueError) as error:
                if self._report and not self._depth:  # deeper, it is within a function that the solution called
                    self._end("refused", str(error))
                raise
            self._depth += 1
            try:
                self._write(message)
                while (answer := self._receive())[0] not in ("returned", "raised"):
                    self.answer(answer)
                return self._result(operation, arguments, answer)
            finally:
                self._depth -= 1

    def answer(self, message: list[Any]) -> None:
        """Do what the other side asks for, and say what came of it."""
        operation, *asked = message
        try:
            arguments = [self._decode(each) for each in asked]
            result = self._operations[operation](*arguments)
            changed: object = None
            if operation == "call" and result is None and (now := self._encode(arguments[1])) != asked[1]:
                changed = now
            content = self._content(["returned", self._encode(result), changed])
        except BaseException as error:  # a program raises what it likes
            values = [each for each in error.args if type(each) in (str, int, float, bool, type(None))]
            if self._report and isinstance(error, AssertionError):
                values = []  # it may quote the expected value
            said = ["raised", self._encode(type(error)), self._encode(values), place_of(error)]
            content = self._content(said)
        self._write(content)

    def serve(self) -> NoReturn:
        """The process ends with the other side."""
        while True:
            self.answer(self._receive())

    def _result(self, operation: str, arguments: tuple[Any, ...], answer: list[Any]) -> object:
        try:
            kind, value, more, *place = answer
            found = self._decode(value) if kind == "returned" else self._error_of(*value[1:])
            further = self._decode(more)
            if kind == "returned":
                if found is None and operation == "call" and further is not None:
                    for old, new in zip(arguments[1], further, strict=True):
                        _change(old, new)
                return found
            if not issubclass(found, Exception | SystemExit) or (
                operation != "next" and issubclass(found, _ENDING_LOOPS)
            ):
                found = RuntimeError
            try:
                error = found(*further)
            except TypeError:
                error = found.__new__(found)
            error.add_note(str(place[0]))
        except Exception as problem:
            self._end("lost", f"the program answered with what is no plain value: {problem!r:.200}")
        raise error

    def _encode(self, value: object) -> object:
        """A plain value as lists of JSON; an object as its number. Raises TypeError for what the judge cannot send."""
        kind: type[Any] = type(value)
        if value is None or kind in (bool, str, float):
            return value
        if kind is int:
            return value if -(2**53) < operator.index(value) < 2**53 else ["int", hex(value)]  # pyright: ignore
        if kind in _LISTS.values():
            return [kind.__name__, *[self._encode(each) for each in value]]  # pyright: ignore
        if kind is dict:
            pairs: Any = value
            return ["dict", *[[self._encode(key), self._encode(each)] for key, each in pairs.items()]]
        if kind is Remote:
            return ["yours", hash(value)]
        if (name := f"{kind.__module__}.{kind.__qualname__}") in _MADE:
            return ["made", name, *[self._encode(each) for each in _MADE[name](value)]]
        if isinstance(value, type) and issubclass(value, BaseException):
            if getattr(builtins, value.__name__, None) is value:
                return ["error", None, value.__name__, None]
            return ["error", self._number_of(value), value.__name__, self._encode(value.__base__)]
        return self._encode_object(value, kind)

    def _encode_object(self, value: Any, kind: type[Any]) -> object:
        if self._report:
            if getattr(builtins, getattr(value, "__name__", ""), None) is value:
                return ["builtin", value.__name__]
            if hasattr(value, "__next__") and kind.__module__ in ("builtins", "itertools"):
                items = list(itertools.islice(value, MAX_ITEMS + 1))
                if len(items) > MAX_ITEMS:
                    raise TypeError(f"a test passes an iterator of more than {MAX_ITEMS} items to the solution")
                return ["iterator", *[self._encode(each) for each in items]]
            if not callable(value):
                raise TypeError(f"a test passes a value of {kind.__module__}.{kind.__qualname__} to the solution")
        elif kind.__module__ == "numpy":
            return self._encode(value.tolist())
        elif kind.__module__ == "collections" and isinstance(value, dict):
            return self._encode(dict(value))
        for base in (int, float, str):  # an enumeration's value, and the like
            if isinstance(value, base):
                return self._encode(base(value))
        return ["mine", self._number_of(value)]

    def _number_of(self, value: object) -> int:
        self._own[id(value)] = value  # held, so that the number stays its own
        return id(value)

    def _decode(self, said: Any) -> Any:
        """Fresh objects. Raises for what `_encode` does not write."""
        if type(said) is not list:
            assert type(said) is not dict
            return said
        kind, *parts = said
        if kind in _LISTS:
            return _LISTS[kind](self._decode(each) for each in parts)
        match kind, parts:
            case "dict", _:
                return {self._decode(key): self._decode(value) for key, value in parts}
            case "int", [str() as text]:
                return int(text, 16)
            case "made", [name, *arguments] if name in _MADE:
                module, _, attribute = name.rpartition(".")
                return getattr(importlib.import_module(module), attribute)(*[self._decode(each) for each in arguments])
            case "yours", [number]:
                return self._own[number]
            case "mine", [int() as number]:
                return self._remotes.setdefault(number, Remote(self, number))
            case "error", [number, str() as name, base]:
                found = self._error_of(number, name, base)
                assert not self._report or not issubclass(AssertionError, found), "it would catch failed assertions"
                return found
            case "builtin", [str() as name] if not self._report:
                return getattr(builtins, name)
            case "iterator", _ if not self._report:
                return iter([self._decode(each) for each in parts])
        raise ValueError(f"{kind!r:.50}")

    def _error_of(self, number: object, name: str, base: Any) -> type[Any]:
        if number is None:
            found = getattr(builtins, name)
            assert issubclass(found, BaseException)
            return found
        assert type(number) is int
        if number not in self._errors:
            self._errors[number] = type(name, (self._error_of(*base[1:]),), {})
        return self._errors[number]

    def _content(self, message: list[Any]) -> bytes:
        """Raises ValueError when it is too long, and RecursionError when it is too deep."""
        content = json.dumps(message).encode()
        if len(content) > MAX_BYTES:
            raise ValueError(f"a value of {len(content)} bytes; {MAX_BYTES} at most")
        return len(content).to_bytes(4, "big") + content

    def _write(self, rest: bytes) -> None:
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError:
            self._end("lost", "")

    def _receive(self) -> list[Any]:
        size = int.from_bytes(self._read(4), "big")
        content = self._read(size) if size <= MAX_BYTES else b""
        try:
            message = json.loads(content)
            assert type(message) is list and type(message[0]) is str
        except Exception as problem:
            self._end("lost", f"the program answered with what is no plain value: {problem!r:.200}")
        return message

    def _read(self, count: int) -> bytes:
        parts: list[bytes] = []
        while count:
            try:
                part = os.read(self._descriptor, min(count, 1 << 20))
            except OSError:
                part = b""
            if not part:
                self._end("lost", "")
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def _end(self, what: str, why: str) -> NoReturn:
        if self._report:
            self._report(what, why)
        os._exit(LOST if what == "lost" and not why else 0)


def _change(old: object, new: object) -> None:
    """Change an argument as a function that returned None did. Others change none: `f(x) == sorted(x)` needs its x."""
    if type(old) is list and type(new) is list:
        old[:] = new
    elif (type(old) is dict and type(new) is dict) or (type(old) is set and type(new) is set):
        old.clear()
        old.update(new)


def place_of(error: BaseException) -> str:
    """The line of the solution that raised it, for people; "" if none did."""
    if isinstance(error, SyntaxError) and error.filename == "solution.py":
        return f" (line {error.lineno}: {(error.text or '').strip()})"[:MAX_TEXT]
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "solution.py"]
    return f" (line {frames[-1].lineno}: {frames[-1].line})"[:MAX_TEXT] if frames else ""
