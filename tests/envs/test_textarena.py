"""Games of TextArena that need no word lists."""

from __future__ import annotations

import asyncio
import pickle
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from playing import play

from rlflow.config import EnvConfig, RewardConfig
from rlflow.environments.find import load_environment
from rlflow.envs.base import Environment, EnvironmentSpec
from rlflow.errors import ConfigError
from rlflow.types import Message

pytest.importorskip("textarena")


def arena(**arguments: Any) -> EnvironmentSpec:
    spec = load_environment(EnvConfig(name="textarena", args=arguments), RewardConfig())
    return pickle.loads(pickle.dumps(spec))


def halving(messages: Sequence[Message]) -> str:
    """Halves what is left of 1 to 20; finds each number in five guesses."""
    low, high = 1, 20
    guess = 0
    for message in messages:
        if message["role"] == "assistant":
            guess = int(re.findall(r"\[(\d+)\]", message["content"])[-1])
        elif "higher." in message["content"]:
            low = guess + 1
        elif "lower." in message["content"]:
            high = guess - 1
    return f"<think>not [{low}]</think>[{(low + high) // 2}]"


async def test_twenty_numbers_are_guessed() -> None:
    spec = arena(game="GuessTheNumber-v0", size=20)
    episodes = [await play(spec, task, halving) for task in spec.tasks()]
    assert [episode.reward for episode in episodes] == [1.0] * 20
    assert {episode.metrics["textarena/forbidden_move"] for episode in episodes} == {0.0}
    assert all(1 <= episode.metrics["textarena/moves"] <= 5 for episode in episodes)
    first = episodes[0].messages[0]["content"]
    assert first.startswith("You play GuessTheNumber-v0.\n\nYou are Player 0. You are playing Guess The Number.")
    hints = [episode.messages[2]["content"] for episode in episodes if len(episode.messages) > 2]
    assert set(hints) == {"The target number is higher.", "The target number is lower."}


async def test_games_at_the_same_time_do_not_change_each_other() -> None:
    spec = arena(game="GuessTheNumber-v0", size=8)
    alone = [(await play(spec, task, halving)).messages for task in spec.tasks()]
    state = random.getstate()
    together = await asyncio.gather(*(play(spec, task, halving) for task in spec.tasks()))
    assert [episode.messages for episode in together] == alone
    assert random.getstate() == state


async def test_forbidden_moves_lose() -> None:
    spec = arena(game="GuessTheNumber-v0", size=1)
    episode = await play(spec, spec.tasks()[0], lambda _: "[99]")
    assert "invalid move" in episode.messages[2]["content"]
    assert (episode.is_done, episode.metrics["textarena/forbidden_move"]) == (True, 1.0)


OPPONENT = """
import re

def first_free(seen):
    return re.findall(r"'(\\[\\d\\])'", seen.rpartition("Available Moves:")[2])[0]

async def later(seen):
    return first_free(seen)

def nothing(seen):
    return None
"""


def last_free(messages: Sequence[Message]) -> str:
    return re.findall(r"'(\[\d\])'", messages[-1]["content"].rpartition("Available Moves:")[2])[-1]


@pytest.mark.parametrize("name", ["first_free", "later"])
async def test_two_players(name: str, tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text(OPPONENT)
    spec = arena(game="TicTacToe-v0", num_players=2, opponent=f"{tmp_path}/other.py:{name}", size=2)
    first, second = [await play(spec, task, last_free) for task in spec.tasks()]
    # The policy takes 8, 7 and 6; the other 0 and 1. Where it moves second, the other has 0, 1 and 2 before that.
    assert (first.reward, second.reward) == (1.0, -1.0)
    assert "As Player 0, you will be 'O'" in first.messages[0]["content"]
    assert "As Player 1, you will be 'X'" in second.messages[0]["content"]
    assert "[Player 1]" in first.messages[2]["content"] and "[Player 0]" not in first.messages[2]["content"]


async def test_the_policy_against_itself() -> None:
    asked: list[tuple[str, bool, list[Message]]] = []

    async def ask(messages: Sequence[Message], *, agent: str, tools: object = (), trainable: bool = False) -> Message:
        asked.append((agent, trainable, list(messages)))
        return Message(role="assistant", content=last_free(messages))

    spec = arena(game="TicTacToe-v0", num_players=2, opponent="policy", seat=0, size=1)
    environment = spec.build()
    assert isinstance(environment, Environment)
    environment.ask = ask  # pyright: ignore[reportAttributeAccessIssue]
    prompt = await environment.reset(spec.tasks()[0])
    moves, step = list(prompt.messages), None
    while step is None or not step.done:
        moves.append(Message(role="assistant", content=OPENING[len(moves) // 2]))
        step = await environment.step(moves[-1])
        moves += step.messages
    assert step.reward == 1.0
    assert [(agent, trainable) for agent, trainable, _ in asked] == [("opponent", False)] * 2
    assert [message["role"] for message in asked[1][2]] == ["user", "assistant", "user"]


OPENING = ("[0]", "[1]", "[2]")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "env.args.game is required"),
        ({"game": "GuesTheNumber-v0"}, "cannot start GuesTheNumber-v0 with 1 players"),
        ({"game": "TicTacToe-v0"}, "cannot start TicTacToe-v0 with 1 players and {}: AssertionError: .* has to be 2"),
        ({"game": "TicTacToe-v0", "num_players": 2}, "env.args.opponent is needed with more than one player"),
        ({"game": "GuessTheNumber-v0", "opponent": "policy"}, "env.args.opponent is needed with more than one player"),
        ({"game": "TicTacToe-v0", "num_players": 2, "opponent": "policy", "seat": 2}, "must be from 0 to 1; got 2"),
        ({"game": "GuessTheNumber-v0", "options": {"top": 3}}, "cannot start .*unexpected keyword argument 'top'"),
        ({"game": "GuessTheNumber-v0", "size": 0}, "must be positive; got 0 and 64"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        arena(**arguments)


async def test_an_opponent_that_says_nothing_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text(OPPONENT)
    spec = arena(game="TicTacToe-v0", num_players=2, opponent=f"{tmp_path}/other.py:nothing", seat=0, size=1)
    with pytest.raises(TypeError, match="the opponent must return its move as a text; got None"):
        await play(spec, spec.tasks()[0], last_free)
