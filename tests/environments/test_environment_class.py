"""Environments that are classes, or that an installed package registers."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from packages import install

from rlflow.config import EnvConfig, RewardConfig
from rlflow.environments.find import load_environment
from rlflow.envs.base import EnvironmentSpec
from rlflow.errors import ConfigError

CLASSES = """
from rlflow.envs.base import Environment, Program, Prompt, Result, SingleTurn, Step
from rlflow.types import Task

class Echo(Environment):
    def __init__(self, volume: int, color: str = "red"):
        self.volume = volume

    @staticmethod
    def tasks(size: int = 2):
        return [Task(id=str(number), prompt=({"role": "user", "content": "hi"},)) for number in range(size)]

    @classmethod
    def evaluation_tasks(cls, size: int = 2):
        return cls.tasks(size + 1)

    async def reset(self, task):
        return Prompt(messages=list(task.prompt))

    async def step(self, reply):
        return Step(done=True, reward=float(self.volume))

class OfRows(SingleTurn):
    pass

class Agent(Program):
    async def run(self, task, endpoint):
        return Result(reward=1.0)

class Unfinished(Environment):
    async def reset(self, task):
        return Prompt(messages=list(task.prompt))

class Forgetful(SingleTurn):
    def __init__(self, color: str = "red"):
        self.color = color

class Wrong(SingleTurn):
    def tasks(self):
        return []

class Other:
    pass

def score(task, completion):
    return 1.0
"""


def test_an_environment_that_is_a_class(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(CLASSES)

    def spec(name: str, reward: str | None = None, **arguments: Any) -> EnvironmentSpec:
        function = f"{path}:{reward}" if reward else None
        config = EnvConfig(name=f"{path}:{name}", args=arguments)
        return pickle.loads(pickle.dumps(load_environment(config, RewardConfig(function=function))))

    echo = spec("Echo", volume=3, size=4)
    assert [each.id for each in echo.tasks()] == ["0", "1", "2", "3"]
    assert echo.evaluation_tasks is not None and len(echo.evaluation_tasks()) == 5
    assert (echo.build().volume, echo.reward) == (3, None)  # pyright: ignore[reportAttributeAccessIssue]

    rows = str(tmp_path / "rows.jsonl")
    Path(rows).write_text('{"prompt": "2 + 3 =", "answer": "5"}\n')
    assert [each.answer for each in spec("Agent", path=rows).tasks()] == ["5"]
    assert [each.answer for each in spec("OfRows", reward="score", path=rows).tasks()] == ["5"]

    for name, arguments, message in [
        ("Echo", {}, "env.args.volume is required by env.name"),
        (
            "Echo",
            {"volume": 1, "colour": 2},
            r"env.args.colour is not an argument .* takes size, volume, color; did you m",
        ),
        ("OfRows", {"path": rows}, "reward.function is required with env.name"),
        (
            "Agent",
            {},
            r"own.py:Agent has no tasks; give it a static method `tasks` that returns a list of Task, or "
            "env.args.path=FILE with one row for each",
        ),
        ("Forgetful", {"color": "blue"}, "own.py:Forgetful has no tasks; give it a static method `tasks`"),
        ("Forgetful", {"path": rows, "colour": 1}, "env.args.colour is not an argument of env.name"),
        ("Unfinished", {"path": rows}, "does not define step; an environment needs it"),
        ("Wrong", {}, "`tasks` is called before there is an episode; make it a static or a class method"),
        ("Other", {}, "a function that returns an EnvironmentSpec, or a class: an Environment, a Program, or one with"),
    ]:
        with pytest.raises(ConfigError, match=message):
            spec(name, **arguments)


def test_a_gymnasium_class_is_not_taken_for_one_of_trl(tmp_path: Path) -> None:
    path = tmp_path / "lake.py"
    path.write_text("""
import gymnasium

class Lake(gymnasium.Env):
    def reset(self, *, seed=None, options=None):
        return 0, {}
""")
    message = r"lake.py:Lake is a Gymnasium environment; play it with env.name=gymnasium env.args.environment=/.*:Lake$"
    with pytest.raises(ConfigError, match=message):
        load_environment(EnvConfig(name=f"{path}:Lake"), RewardConfig())


GREETING = """
from rlflow.envs.base import EnvironmentSpec, SingleTurn
from rlflow.types import Task

def score(task, completion):
    return 1.0

def tasks():
    return [Task(id="a", prompt=({"role": "user", "content": "hi"},))]

def load(greeting="hi"):
    return EnvironmentSpec(tasks=tasks, build=SingleTurn, reward=score)
"""


def test_an_environment_that_an_installed_package_registers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str, **arguments: Any) -> EnvironmentSpec:
        return load_environment(EnvConfig(name=name, args=arguments), RewardConfig())

    monkeypatch.syspath_prepend(tmp_path)
    install(tmp_path, "their_games", GREETING, {"rlflow.environments": {"greeting": "load", "twice": "load"}})
    assert [each.id for each in load("greeting", greeting="ho").tasks()] == ["a"]
    with pytest.raises(ConfigError, match=r"env.args.gruss is not an argument of env.name=greeting"):
        load("greeting", gruss="ho")
    with pytest.raises(ConfigError, match=r"did you mean greeting\? There are .*textarena.*greeting, twice; your own"):
        load("greetings")
    install(tmp_path, "other_games", GREETING, {"rlflow.environments": {"twice": "load"}})
    with pytest.raises(ConfigError, match="two .*packages .*twice.* .*_games:load and .*_games:load"):
        load("twice")
