"""Gymnasium environments in words; the worlds are those of its toy_text."""

from __future__ import annotations

import pickle
import random
import re
from pathlib import Path
from typing import Any

import pytest
from playing import play

from rlflow.config import EnvConfig, RewardConfig
from rlflow.environments.find import load_environment
from rlflow.envs.base import EnvironmentSpec
from rlflow.errors import ConfigError

gymnasium = pytest.importorskip("gymnasium")
pytest.importorskip("gymnasium.envs.toy_text")


def world(**arguments: Any) -> EnvironmentSpec:
    spec = load_environment(EnvConfig(name="gymnasium", args=arguments), RewardConfig())
    return pickle.loads(pickle.dumps(spec))


FROZEN = {"id": "FrozenLake-v1", "options": {"is_slippery": False}}
WAY = (1, 1, 2, 1, 2, 2)
"""Of the map 4x4 of FrozenLake, past its holes: left 0, down 1, right 2, up 3."""


async def test_the_way_over_the_lake() -> None:
    spec = world(**FROZEN, size=1)
    (task,) = spec.tasks()
    assert task.id == "FrozenLake-v1/0"
    moves = iter(WAY)
    episode = await play(spec, task, lambda _: f"<think>0, 1, 2, 3?</think>I go {next(moves)}.")
    assert episode.prompt.messages == [
        {
            "role": "user",
            "content": "You play FrozenLake-v1. After each observation reply with one action: a whole number from 0 to "
            "3.\n\n0\n\n[S]FFF\nFHFH\nFFFH\nHFFG",
        }
    ]
    assert episode.messages[2]["content"] == "4\n\n  (Down)\nSFFF\n[F]HFH\nFFFH\nHFFG"
    assert (episode.reward, episode.is_done) == (1.0, True)
    assert episode.metrics == {"gymnasium/actions": 6.0, "gymnasium/truncated": 0.0}


async def test_a_reply_that_is_no_action_gets_an_answer() -> None:
    spec = world(**FROZEN, size=1)
    replies = iter(["Down!", "I go 7", "99999999999999999999999999", "1.5", "go 1", "2"])
    episode = await play(spec, spec.tasks()[0], lambda _: next(replies))
    said = [message["content"] for message in episode.messages[2:10:2]]
    assert said == [
        "Your reply has no action. Reply with 1 whole number.",
        "7 is not an action. Reply with a whole number from 0 to 3.",
        "9999999999999999999 is not an action. Reply with a whole number from 0 to 3.",
        "Your reply has no action. Reply with 1 whole number.",
    ]
    assert episode.metrics["gymnasium/not_an_action"] == 4.0
    assert (episode.reward, episode.is_done) == (0.0, True), "down and right is a hole"


@pytest.mark.parametrize("id", ["FrozenLake-v1", "Blackjack-v1", "Taxi-v4"])
async def test_twenty_episodes_of_toy_text(id: str) -> None:
    spec = world(id=id, size=20)
    rewards = []
    for task in spec.tasks():
        chosen = random.Random(task.id)
        episode = await play(spec, task, lambda _, chosen=chosen: str(chosen.randrange(2)), max_turns=250)
        assert episode.is_done
        rewards.append(episode.reward)
    assert len(rewards) == 20
    allowed = {"FrozenLake-v1": {0.0, 1.0}, "Blackjack-v1": {-1.0, 0.0, 1.0}, "Taxi-v4": {-200.0}}[id]
    assert set(rewards) <= allowed


async def test_a_task_is_the_same_game_each_time() -> None:
    spec = world(id="Blackjack-v1", size=30)
    first = [(await play(spec, task, lambda _: "0")).messages for task in spec.tasks()]
    assert [(await play(spec, task, lambda _: "0")).messages for task in spec.tasks()] == first
    assert len({str(messages) for messages in first}) > 5
    assert spec.evaluation_tasks is not None
    assert not {task.id for task in spec.evaluation_tasks()} & {task.id for task in spec.tasks()}


OWN = """
import gymnasium
from gymnasium import spaces

class Own(gymnasium.Env):
    action_space = {space}
    observation_space = spaces.Text(100)

    def __init__(self, word="yes"):
        self.word = word

    def reset(self, seed=None, options=None):
        return dict(word=self.word, seed=seed), dict()

    def step(self, action):
        return str(action), 1.5, False, True, dict()

class Words(spaces.Space):
    def contains(self, x):
        return isinstance(x, str)

def shout(observation):
    return str(observation).upper()

def first_word(text):
    if not text:
        raise ValueError("Say something.")
    return text.split()[0]
"""


async def test_a_class_of_ones_own_with_variants_and_words(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN.replace("{space}", "spaces.Text(100)"))
    spec = world(
        environment=f"{tmp_path}/own.py:Own", variants=[{"word": "a"}, {"word": "b"}], size=3, instructions="Go."
    )
    texts = [(await play(spec, task, lambda _: " fine ")).prompt.messages[0]["content"] for task in spec.tasks()]
    assert texts == [f'Go.\n\n{{"word": "{word}", "seed": {seed}}}' for seed, word in enumerate("aba")]
    episode = await play(spec, spec.tasks()[0], lambda _: "fine")
    assert (episode.reward, episode.is_done, episode.metrics["gymnasium/truncated"]) == (1.5, True, 1.0)

    (tmp_path / "box.py").write_text(OWN.replace("{space}", "spaces.Box(0, 1)"))
    with pytest.raises(ConfigError, match=r"actions of Box.* have no words of their own; give env.args.action_parser"):
        world(environment=f"{tmp_path}/box.py:Own")
    spec = world(
        environment=f"{tmp_path}/box.py:Own",
        action_parser=f"{tmp_path}/box.py:first_word",
        observation_to_text=f"{tmp_path}/box.py:shout",
        size=1,
    )
    replies = iter(["<think>well</think>", "0.5 it is"])
    episode = await play(spec, spec.tasks()[0], lambda _: next(replies))
    assert episode.messages[0]["content"].endswith("{'WORD': 'YES', 'SEED': 0}")
    assert episode.messages[2]["content"] == "Say something."
    assert episode.metrics["gymnasium/not_an_action"] == 1.0


async def test_a_space_of_texts_that_is_not_gymnasiums_own(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN.replace("{space}", "None") + "\nOwn.action_space = Words()\n")
    spec = world(environment=f"{tmp_path}/own.py:Own", size=1)
    episode = await play(spec, spec.tasks()[0], lambda _: "find_user(name='Ada')")
    assert (episode.is_done, episode.reward) == (True, 1.5)


async def test_several_numbers(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN.replace("{space}", "spaces.MultiDiscrete([2, 5])"))
    spec = world(environment=f"{tmp_path}/own.py:Own", size=1)
    replies = iter(["4", "2 and 4", "1 and 4"])
    episode = await play(spec, spec.tasks()[0], lambda _: next(replies))
    assert "one action: 2 whole numbers, from 0 to 1, and from 0 to 4." in episode.messages[0]["content"]
    assert episode.messages[2]["content"] == "Your reply has no action. Reply with 2 whole numbers."
    assert re.match(r"\[2, 4\] is not an action. Reply with 2 whole numbers from", episode.messages[4]["content"])
    assert episode.reward == 1.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "need one of `id` and `environment`"),
        ({"id": "FrozenLake-v1", "environment": "a.py:b"}, "need one of `id` and `environment`"),
        ({"id": "FrozenLak-v1"}, "cannot make FrozenLak-v1: .*FrozenLake"),
        ({"id": "FrozenLake-v1", "options": {"ice": 1}}, "cannot make FrozenLake-v1: .*ice"),
        ({"id": "FrozenLake-v1", "size": 0}, "size and evaluation_size must be positive; got 0 and 64"),
        ({"id": "none_such:Own-v0"}, "cannot make none_such:Own-v0: .*none_such"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        world(**arguments)
