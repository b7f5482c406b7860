"""Tasks: each function of `functions.py`, broken in each way of `mutations.py` that its tests notice."""

import inspect
import random

from rlflow.envs.python_repair import functions
from rlflow.envs.python_repair.cases import TESTS
from rlflow.envs.python_repair.mutations import broken_versions
from rlflow.envs.texts import prompt_of
from rlflow.errors import ConfigError
from rlflow.types import Task

EVALUATION = ("clamp", "digit_sum", "is_sorted", "longest_run", "two_sum")
"""Functions that are never trained on."""

FIRST_FAILURE = {
    "average": "031",
    "balanced": "00000000000100",
    "binary_digits": "101011121121",
    "clamp": "0-1-2",
    "collatz_steps": "0001101111122122122222",
    "common_prefix": "10030020",
    "count_vowels": "000000",
    "digit_sum": "00012112222",
    "distinct": "00",
    "divisors": "00000-000",
    "factorial": "00022-212",
    "fibonacci": "00112",
    "find": "0022",
    "greatest_divisor": "0000",
    "is_leap_year": "10000020022332233",
    "is_palindrome": "00-00000000001",
    "is_prime": "121241100-233222",
    "is_sorted": "01001001",
    "largest": "02-",
    "letter_counts": "00000",
    "longest_run": "01-000-000004000",
    "merge_sorted": "000010-3000000",
    "most_profit": "010000",
    "power": "000011111",
    "rotate": "000300",
    "running_total": "000",
    "second_largest": "00013101-",
    "transpose": "01",
    "two_sum": "10010",
    "words_by_length": "00",
}
"""The number of the first test that each broken version of a function fails. "-" if it passes all: it makes no task."""


def make_tasks(size: int | None, seed: int, *, is_evaluation: bool) -> list[Task]:
    """Tasks in an order that depends on the seed alone; the id is "<function>/<version>".

    The answer is a reply that solves the task. Raises ConfigError when there are fewer than `size`.
    """
    tasks = []
    for name, tests in TESTS.items():
        if (name in EVALUATION) != is_evaluation:
            continue
        for version, broken in enumerate(broken_versions(source_of(name))):
            if (first_failure := FIRST_FAILURE[name][version]) == "-":
                continue
            question = (
                f"This Python function has one mistake:\n\n```python\n{broken}\n```\n\n"
                f"It fails this test:\n\n```python\nassert {tests[int(first_failure)]}\n```\n\n"
                "Reply with the whole function, repaired, in a ```python block."
            )
            answer = f"```python\n{source_of(name)}```"
            task_id, prompt = f"{name}/{version}", prompt_of("", question)
            tasks.append(Task(id=task_id, prompt=prompt, answer=answer, data={"tests": list(tests)}))
    if size is not None and not 1 <= size <= len(tasks):
        raise ConfigError(f"env.args.size must be from 1 to {len(tasks)}, or null for all; got {size}")
    random.Random(seed).shuffle(tasks)
    return tasks[:size]


def source_of(name: str) -> str:
    """The right version of a function."""
    return inspect.getsource(getattr(functions, name))
