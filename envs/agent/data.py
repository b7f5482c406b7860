"""The tasks of a program: from a function, or from rows as `dataset` reads them."""

import random
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from rlflow.envs.callables import load_callable
from rlflow.envs.dataset.env import read_tasks
from rlflow.envs.dataset.sources import find_source
from rlflow.envs.texts import prompt_of
from rlflow.errors import ConfigError
from rlflow.types import Task

NUM_SUMS = 2000

_FUNCTION = re.compile(r"(?:[A-Za-z_][\w.]*|.*\.py):[A-Za-z_]\w*")


def task_source(argument: str, source: str, system_prompt: str) -> Callable[[], Sequence[Task]]:
    """The function at package.module:name or file.py:name, or else one that reads rows as `dataset` does.

    Raises ConfigError when there is neither.
    """
    before = source.partition(":")[0]
    if not _FUNCTION.fullmatch(source) or (Path(before).exists() and not before.endswith(".py")):
        return partial(read_tasks, find_source(source, f"env.args.{argument}"), system_prompt)
    function = load_callable(argument, source)
    if system_prompt:
        raise ConfigError(f"env.args.system_prompt has no effect with the function {argument}={source}; leave it out")
    return function


def sums() -> list[Task]:
    """Sums of two two-digit numbers, which the example `calculator.py` is asked."""
    draw = random.Random(0)
    tasks = []
    for index in range(NUM_SUMS):
        a, b = draw.randint(10, 99), draw.randint(10, 99)
        question = prompt_of("", f"What is {a} + {b}?")
        tasks.append(Task(id=f"sum/{index}", prompt=question, answer=str(a + b), data={"a": a, "b": b}))
    return tasks
