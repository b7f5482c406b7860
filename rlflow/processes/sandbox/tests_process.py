"""The side of the tests: runs tests.json, [seconds, statements], and reports in lines of JSON on standard output.

    [3, ""]              test 3 passed; [3, "ValueError: ..."]: it failed; [-1, "..."]: the solution cannot be imported
    ["refused", "..."]   these tests cannot be run in this way; nothing that a solution does brings this about
    ["lost", "..."]      the solution ended, or what it answered is no answer

After `seconds` SIGALRM ends it, also within a test, because an answer may be more than a test can work through.

A name means what the test defines, else Python's own, else one of `_MODULES`, `_HELPERS` or the standard library, else
the solution's.
"""

import ast
import builtins
import importlib
import json
import os
import signal
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rlflow.processes.sandbox.exchange import OPERATIONS, Peer, Remote
from rlflow.processes.sandbox.solution_process import take_standard_input

MAX_ERROR = 1000
_MODULES = {name: name for name in ("numpy", "pandas", "pytest", "scipy", "sympy", "torch")} | {
    "np": "numpy",
    "pd": "pandas",
}
_HELPERS = {
    **dict.fromkeys(("isclose", "sqrt", "floor", "ceil", "pi", "inf"), "math"),
    **dict.fromkeys(("Counter", "defaultdict", "deque", "OrderedDict"), "collections"),
    **{"Decimal": "decimal", "Fraction": "fractions", "reduce": "functools", "deepcopy": "copy", "approx": "pytest"},
}
"""Names that tests use without importing them, because solutions often do. They would be a solution's judges."""
_BEYOND = {
    *("eval", "exec", "compile", "globals", "asyncio", "inspect", "capsys", "monkeypatch", "fixtures"),
    *("patch", "mock", ".mock", "redirect_stdout", ".redirect_stdout", ".stdout", ".stdin", "open", "tempfile"),
    *(".alarm", ".setitimer"),
}
"""What reaches into the solution's process, would run a text of the solution's here, or undoes the time limit; ".": as
an attribute."""


class _Names(dict[str, object]):
    """Python's own names, and behind them the solution's."""

    def __init__(self, peer: Peer, called: frozenset[str], not_ours: str = "") -> None:
        super().__init__(vars(builtins))
        self.pop(not_ours, None)
        self._peer = peer
        self._called = called
        self._not_ours = not_ours

    def __missing__(self, name: str) -> object:
        if name.startswith("__"):
            raise KeyError(name)
        if name in _HELPERS and name != self._not_ours:
            return getattr(importlib.import_module(_HELPERS[name]), name)
        if name in _MODULES or (name in sys.stdlib_module_names and name not in self._called):
            return importlib.import_module(_MODULES.get(name, name))
        found = self.of_solution(name)
        if type(found) is Remote or isinstance(found, type):  # plain values may be others by the next time
            self[name] = found
        return found

    def of_solution(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._peer.ask("name", name)


def main() -> None:
    descriptor = take_standard_input()
    report = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    has_failed = False

    def say(what: int | str, error: str) -> None:
        nonlocal has_failed
        report.write(json.dumps([what, "failed" if has_failed and error and type(what) is int else error]) + "\n")
        report.flush()
        has_failed |= bool(error)

    def refuse(why: str) -> None:
        say("refused", why)
        os._exit(0)

    with open("tests.json") as file:
        seconds, statements = json.load(file)
    peer = Peer(descriptor, {"call": OPERATIONS["call"]}, say)
    trees = [_parsed(index, statement, refuse) for index, statement in enumerate(statements)]
    peer.ask("ready")
    signal.setitimer(signal.ITIMER_REAL, seconds)
    if failure := _failure(lambda: peer.ask("start")):
        say(-1, failure)
        os._exit(0)
    for index, tree in enumerate(trees):
        called = frozenset(
            node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        )
        peer.has_asked = False
        error = _failure(lambda: _run(tree, _Names(peer, called)))  # noqa: B023 - called at once
        is_assertion = len(tree.body) == 1 and isinstance(tree.body[0], ast.Assert)
        own = [name for name in called if is_assertion and hasattr(builtins, name)]
        own += _HELPERS.keys() & set(_words(tree))
        if not peer.has_asked and len(own) == 1:
            # It tests a solution whose function is named like one of ours.
            error = _failure(lambda: _run(tree, _Names(peer, called, own[0])))  # noqa: B023
        if not peer.has_asked:
            refuse(f"test {index + 1} asks nothing of the solution" + (f": {error}" if error else ""))
        say(index, error)
    os._exit(0)


def _parsed(index: int, statement: str, refuse: Callable[[str], None]) -> ast.Module:
    try:
        tree = ast.parse(statement)
    except (SyntaxError, ValueError, RecursionError) as error:
        refuse(f"test {index + 1} is no Python: {error}")
        raise
    for word in _words(tree):
        if word in _BEYOND:
            refuse(f"test {index + 1} uses {word.lstrip('.')}, which does not work between two processes")
    return tree


def _words(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.arg(arg=name):
                yield name
            case ast.Attribute(attr=name):
                yield f".{name}"
            case ast.alias(name=name):
                yield name.rpartition(".")[2]
            case ast.AsyncFunctionDef():
                yield "asyncio"
            case ast.FunctionDef(name=name, args=ast.arguments(args=[ast.arg(arg=first), *_])):
                if name.startswith("test_") and first != "self":
                    yield "fixtures"
            case _:
                pass


def _run(tree: ast.Module, names: _Names) -> None:
    """Raises what fails. After the statements themselves, functions test_* and the cases of unittest are run."""
    module = types.ModuleType("solution")
    setattr(module, "__getattr__", names.of_solution)  # noqa: B010 - a module has it
    setattr(module, "__all__", [])  # noqa: B010
    sys.modules["solution"] = module
    own: dict[str, Any] = {"__name__": "tests", "__builtins__": names}
    match tree.body:
        case [ast.Assert(test=ast.Compare(left=left_side, ops=[ast.Eq()], comparators=[right_side]), msg=None)]:
            sides = [ast.Expression(left_side), ast.Expression(right_side)]
            left, right = [eval(compile(side, "test", "eval"), own) for side in sides]
            assert left == right, f"{ast.unparse(left_side)} is {left!r:.200}, not {right!r:.200}"
            return
        case _:
            pass
    if any(word == "unittest" for word in _words(tree)):
        import unittest

        setattr(unittest, "main", lambda *_, **__: None)  # noqa: B010 - it would end this process
    exec(compile(tree, "test", "exec"), own)
    _run_defined(own)


def _run_defined(own: Mapping[str, Any]) -> None:
    for name, value in own.items():
        if name.startswith("test") and isinstance(value, types.FunctionType) and not value.__code__.co_argcount:
            value()
        elif "unittest" in sys.modules and isinstance(value, type) and value.__module__ == "tests":
            import unittest

            if issubclass(value, unittest.TestCase):
                result = unittest.TestResult()
                unittest.defaultTestLoader.loadTestsFromTestCase(value).run(result)
                for _, text in [*result.errors, *result.failures]:
                    raise AssertionError(text.strip().rpartition("\n")[2])


def _failure(action: Callable[[], object]) -> str:
    """What an action raised, and where in the solution; "" if nothing."""
    try:
        action()
    except BaseException as error:  # also SystemExit
        place = "".join(getattr(error, "__notes__", ()))
        try:
            text = error.msg if isinstance(error, SyntaxError) and place else str(error)
        except Exception as problem:
            text = str(type(problem))
        return f"{type(error).__name__}: {text[:500]}{place}"[:MAX_ERROR]
    return ""
