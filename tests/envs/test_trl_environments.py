"""Classes in the form that TRL's GRPOTrainer takes as environment_factory."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from playing import call, calling, play

from rlflow.config import EnvConfig, RewardConfig
from rlflow.environments.find import load_environment
from rlflow.envs.base import EnvironmentSpec
from rlflow.errors import ConfigError

GAME = '''
class Game:
    """As in TRL's documentation of environment_factory."""

    def __init__(self):
        self.reward = 0.0

    def reset(self, secret, **row):
        self.secret = secret
        self.row = row
        return f"\\n\\nGuess a number below {row['data']['top']}." if row["data"] else None

    def guess(self, number: int) -> str:
        """
        Make a guess.

        Args:
            number: The guess.

        Returns:
            A hint.
        """
        if number < 0:
            raise ValueError("Guess a positive number.")
        self.reward = 1.0 if number == self.secret else 0.0
        return "right" if self.reward else "wrong"

    async def hint(self) -> dict[str, bool]:
        """Ask for a hint."""
        return {"even": self.secret % 2 == 0}

    def get_reward(self) -> float:
        return self.reward

    def _private(self):
        raise AssertionError

class Awaited(Game):
    async def get_reward(self) -> float:
        return self.reward + 1

class Silent:
    def reset(self, **row):
        return None

    def wave(self) -> str:
        """Wave."""
        return "bye"

class Needy(Silent):
    def __init__(self, size):
        pass

class Undocumented(Silent):
    def wave(self, size):
        pass

def make():
    return Game()

def score(task, completion):
    return 0.5
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "game.py").write_text(GAME)
    rows = [{"prompt": "Play.", "secret": number, "data": {"top": 20} if number else None} for number in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return tmp_path


def trl(folder: Path, name: str, reward: str | None = None, **arguments: Any) -> EnvironmentSpec:
    arguments = {"path": str(folder / "rows.jsonl"), **arguments}
    config = EnvConfig(name=f"{folder}/game.py:{name}" if name != "trl" else "trl", args=arguments)
    function = f"{folder}/game.py:{reward}" if reward else None
    return pickle.loads(pickle.dumps(load_environment(config, RewardConfig(function=function))))


@pytest.mark.parametrize("name", ["Game", "Awaited", "make"])
async def test_twenty_episodes(name: str, folder: Path) -> None:
    spec = trl(folder, "trl", environment=f"{folder}/game.py:make") if name == "make" else trl(folder, name)
    rewards = []
    for number, task in enumerate(spec.tasks()):
        first = calling(call("hint", {}, 1), call("guess", {"number": number - number % 2}, 2))
        replies = iter([first, "I am done."])
        episode = await play(spec, task, lambda _, replies=replies: next(replies))
        assert [tool["function"]["name"] for tool in episode.prompt.tools] == ["guess", "hint"]  # pyright: ignore
        hint = "Play." if number == 0 else "Play.\n\n\n\nGuess a number below 20."
        assert episode.messages[0]["content"] == hint
        assert [message["content"] for message in episode.messages[2:4]] == [
            f'{{"even": {str(number % 2 == 0).lower()}}}',
            "wrong" if number % 2 else "right",
        ]
        rewards.append(episode.reward)
    assert rewards == [value + (name == "Awaited") for value in [1.0, 0.0] * 10]


async def test_what_a_tool_raises_goes_back_to_the_model(folder: Path) -> None:
    spec = trl(folder, "Game")
    replies = iter(
        [calling(call("guess", {"number": -1}), call("get_reward", {})), calling(call("_private", {})), "so"]
    )
    episode = await play(spec, spec.tasks()[3], lambda _: next(replies))
    assert [message["content"] for message in episode.messages if message["role"] == "tool"] == [
        '{"error": "Guess a positive number."}',
        '{"error": "there is no tool get_reward; there are: guess, hint"}',
        '{"error": "there is no tool _private; there are: guess, hint"}',
    ]
    assert episode.metrics == {"tools/calls": 3.0, "tools/failures": 3.0}
    assert episode.reward == 0.0


async def test_a_class_without_a_reward_needs_a_function(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"reward.function is required with env.name=.*:Silent"):
        trl(folder, "Silent")
    spec = trl(folder, "Silent", reward="score")
    assert (await play(spec, spec.tasks()[0], lambda _: "done")).reward is None


async def test_wrong_classes_and_arguments(folder: Path) -> None:
    with pytest.raises(ConfigError, match="Needy: TRL makes its environments without arguments; .*size"):
        trl(folder, "Needy", reward="score")
    with pytest.raises(ConfigError, match=r"env.args.pat is not an argument of .*:Game.*; did you mean path\?"):
        trl(folder, "Game", pat="x")
    with pytest.raises(ConfigError, match="env.args.environment=.*score must be|without arguments"):
        trl(folder, "trl", environment=f"{folder}/game.py:score")
    with pytest.raises(ConfigError, match="env.args.environment is required by env.name=trl"):
        trl(folder, "trl")
    with pytest.raises(ConfigError, match="tool wave: argument size has no type hint; a tool needs"):
        trl(folder, "Undocumented", reward="score")
