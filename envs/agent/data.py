"""Where the tasks of a program come from."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from rlflow.envs.jsonl.data import read_tasks
from rlflow.errors import ConfigError
from rlflow.plugins import load_object
from rlflow.types import Message, Task

NUM_SUMS = 2000


def task_source(argument: str, source: str, system_prompt: str) -> Callable[[], Sequence[Task]]:
    """The function that reads a file of rows, or the one at package.module:name. ConfigError when there is neither."""
    if Path(source).expanduser().is_file():
        return partial(read_tasks, str(Path(source).expanduser()), system_prompt)
    if ":" not in source:
        raise ConfigError(f"env.args.{argument}={source} is neither a file nor package.module:name (from {Path.cwd()})")
    function = load_object(source)
    if not callable(function):
        raise ConfigError(f"env.args.{argument}={source} must be a function; got {type(function).__name__}")
    if system_prompt:
        raise ConfigError(f"env.args.system_prompt has no effect with the function {argument}={source}; leave it out")
    return function  # pyright: ignore[reportReturnType]  what it returns is checked where it is called


def sums() -> list[Task]:
    """Sums of two numbers of two digits, for the example `calculator.py`."""
    draw = random.Random(0)
    return [_sum(index, draw.randint(10, 99), draw.randint(10, 99)) for index in range(NUM_SUMS)]


def _sum(index: int, a: int, b: int) -> Task:
    question = Message(role="user", content=f"What is {a} + {b}?")
    return Task(id=f"sum/{index}", prompt=(question,), answer=str(a + b), data={"a": a, "b": b})
