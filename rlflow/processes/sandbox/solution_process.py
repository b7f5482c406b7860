"""The side of the solution: imports solution.py and does what the tests ask. It knows nothing else of them."""

import os
import sys
import types
from typing import NoReturn

from rlflow.processes.sandbox.exchange import OPERATIONS, Peer


def main() -> NoReturn:
    """Standard input is the socket to the tests; the solution finds an empty one, and its prints go nowhere."""
    descriptor = take_standard_input()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    failures: list[BaseException] = []
    try:
        with open("solution.py") as file:
            exec(compile(file.read(), "solution.py", "exec"), module.__dict__)
    except BaseException as error:  # a program raises what it likes
        failures.append(error)

    def start() -> None:
        if failures:
            raise failures[0]

    def name(name: str) -> object:
        if name not in module.__dict__:
            raise NameError(f"name '{name}' is not defined")
        return module.__dict__[name]

    Peer(descriptor, {**OPERATIONS, "start": start, "name": name}).serve()


def take_standard_input() -> int:
    descriptor = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    return descriptor
