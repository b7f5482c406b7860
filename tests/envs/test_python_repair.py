"""Broken functions, their tests, and an episode of repairs."""

from __future__ import annotations

import asyncio
import json

import pytest

from rlflow.config import EnvConfig, RewardConfig
from rlflow.environments.find import load_environment
from rlflow.envs.base import Environment, EnvironmentSpec
from rlflow.envs.python_repair.cases import TESTS
from rlflow.envs.python_repair.data import EVALUATION, FIRST_FAILURE, make_tasks, source_of
from rlflow.envs.python_repair.env import load, worth
from rlflow.envs.python_repair.mutations import broken_versions
from rlflow.errors import ConfigError
from rlflow.processes.sandbox.run import SandboxLimits, run
from rlflow.types import Message


def test_every_way_to_break_a_line() -> None:
    source = "def f(n):\n    return n < 2 and n % 3 == 0\n"
    assert broken_versions(source) == [
        "def f(n):\n    return n < 2 or n % 3 == 0",
        "def f(n):\n    return n <= 2 and n % 3 == 0",
        "def f(n):\n    return n < 2 and n % 3 != 0",
        "def f(n):\n    return n < 3 and n % 3 == 0",
        "def f(n):\n    return n < 1 and n % 3 == 0",
        "def f(n):\n    return n < 2 and n // 3 == 0",
        "def f(n):\n    return n < 2 and n % 3 == 1",
        "def f(n):\n    return n < 2 and n % 4 == 0",
        "def f(n):\n    return n < 2 and n % 2 == 0",
    ]


def test_tasks() -> None:
    tasks = make_tasks(None, 0, is_evaluation=False)
    held_out = make_tasks(None, 0, is_evaluation=True)
    assert (len(TESTS), len(tasks), len(held_out)) == (30, 197, 41)
    assert tasks == make_tasks(None, 0, is_evaluation=False)
    assert {task.id for task in tasks} == {task.id for task in make_tasks(None, 1, is_evaluation=False)}
    assert make_tasks(3, 0, is_evaluation=False) == tasks[:3]
    assert {task.id.partition("/")[0] for task in held_out} == set(EVALUATION)
    average = next(task for task in tasks if task.id == "average/1")
    assert average.data == {"tests": list(TESTS["average"])}
    assert average.answer == f"```python\n{source_of('average')}```"
    question = average.prompt[0]["content"]
    assert "    return sum(values) // len(values)\n```" in question
    assert "```python\nassert average([1, 2]) == 1.5\n```" in question


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": 0}, "env.args.size must be from 1 to 197, or null for all; got 0"),
        ({"max_turns": 0}, "env.args.max_turns must be from 1 to 10; got 0"),
    ],
)
def test_wrong_arguments(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(**arguments)


FIRST_FAILURES = """
import json, signal, sys

def stop(*_):
    raise TimeoutError

def passes(names, test):
    signal.setitimer(signal.ITIMER_VIRTUAL, 0.1)
    try:
        return eval(test, names) is True
    except Exception:
        return False
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)

signal.signal(signal.SIGVTALRM, stop)
request = json.load(sys.stdin)
for program in request["programs"]:
    names = {}
    exec(program, names)
    failed = (str(index) for index, test in enumerate(request["tests"]) if not passes(names, test))
    print(next(failed, "-"), end="")
"""
"""Its own way to run the tests, many programs in one process."""


@pytest.mark.slow
async def test_every_broken_version_fails_the_test_that_is_shown() -> None:
    async def first_failures(name: str) -> str:
        source = source_of(name)
        request = {"programs": [source, *broken_versions(source)], "tests": TESTS[name]}
        return (await run(FIRST_FAILURES, stdin=json.dumps(request), limits=SandboxLimits(seconds=60))).stdout

    found = await asyncio.gather(*(first_failures(name) for name in TESTS))
    assert dict(zip(TESTS, found, strict=True)) == {name: f"-{row}" for name, row in FIRST_FAILURE.items()}


async def episode(spec: EnvironmentSpec, task_id: str, *replies: str) -> list[tuple[float | None, bool, str]]:
    task = next(task for task in spec.tasks() if task.id == task_id)
    environment = spec.build()
    assert isinstance(environment, Environment)
    prompt = await environment.reset(task)
    assert prompt.messages == list(task.prompt)
    steps = [await environment.step(Message(role="assistant", content=reply)) for reply in replies]
    await environment.close()
    return [(step.reward, step.done, "".join(message["content"] for message in step.messages)) for step in steps]


def block(body: str) -> str:
    return f"I see.\n```python\ndef average(values):\n{body}\n```"


RIGHT = "    return sum(values) / len(values) if values else 0.0"


async def test_a_repair_at_once() -> None:
    assert await episode(load(), "average/0", block(RIGHT)) == [(1.0, True, "")]


async def test_the_answer_of_a_task_solves_it() -> None:
    tasks = load().tasks()
    assert await episode(load(), tasks[0].id, str(tasks[0].answer)) == [(1.0, True, "")]


async def test_a_repair_in_three_turns() -> None:
    first, second, third = await episode(
        load(), "average/0", "I do not know.", block("    return sum(values) / len(values)"), block(RIGHT)
    )
    ask = "Reply with the whole function in a ```python block."
    assert first == (
        0.0,
        False,
        f"0 of 4 tests pass. The first problem: there is no ```python block in your reply\n{ask}",
    )
    problem = "ZeroDivisionError: division by zero (line 2: return sum(values) / len(values))"
    assert second == (worth(0.75, 2), False, f"3 of 4 tests pass. The first problem: {problem}\n{ask}")
    assert third == (worth(1.0, 3) - worth(0.75, 2), True, "")


async def test_turns_run_out() -> None:
    wrong = block("    return 2.0")
    steps = await episode(load(max_turns=2), "average/0", block(RIGHT.replace("0.0", "1.0")), wrong)
    assert [step[:2] for step in steps] == [(0.75, False), (-0.75, True)]


def test_worth() -> None:
    assert [worth(1.0, 1), worth(1.0, 2), worth(0.5, 3), worth(0.0, 3)] == [1.0, 0.9, 0.4, 0.0]


def test_found_by_its_name() -> None:
    spec = load_environment(EnvConfig(name="python_repair", args={"size": 3}), RewardConfig())
    assert len(spec.tasks()) == 3
