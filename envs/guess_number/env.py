"""Each guess is answered with a hint; the reward comes with the last one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from rlflow.envs.base import Environment, EnvironmentSpec, Prompt, Step
from rlflow.envs.guess_number.data import make_tasks
from rlflow.envs.guess_number.reward import guess_in, worth
from rlflow.errors import ConfigError
from rlflow.types import Message, Task

EVALUATION_SEED = 1_000_003


def load(
    highest: int = 16, guesses: int = 5, size: int = 2000, seed: int = 0, evaluation_size: int = 64
) -> EnvironmentSpec:
    """A number between 1 and `highest` to be found with at most `guesses` replies.

    size: number of tasks; seed: which ones; evaluation_size: number of tasks for `eval.every`, from another seed.
    """
    if guesses < 1:
        raise ConfigError(f"env.args.guesses must be at least 1; got {guesses}")
    make_tasks(highest, 1, seed)
    return EnvironmentSpec(
        tasks=partial(make_tasks, highest, size, seed),
        build=partial(GuessNumber, guesses),
        evaluation_tasks=partial(make_tasks, highest, evaluation_size, seed + EVALUATION_SEED),
        expert=halve,
    )


class GuessNumber(Environment):
    """Says `higher` or `lower`, until the number is found or no guess is left."""

    def __init__(self, guesses: int) -> None:
        self._left = guesses
        self._number = 0

    async def reset(self, task: Task) -> Prompt:
        assert task.answer is not None
        self._number = int(task.answer)
        return Prompt(messages=list(task.prompt))

    async def step(self, reply: Message) -> Step:
        self._left -= 1
        guess = guess_in(reply["content"])
        reward = worth(guess, self._number)
        metrics = {"guesses": 1.0, "not_a_number": float(guess is None)}
        if reward == 1.0 or self._left == 0:
            return Step(done=True, reward=reward, metrics=metrics)
        return Step(messages=[Message(role="user", content=self._hint(guess))], metrics=metrics)

    def _hint(self, guess: int | None) -> str:
        if guess is None:
            return "That is not a number. Reply with a number."
        return f"My number is {'higher' if guess < self._number else 'lower'} than {guess}. What is my number?"


def halve(task: Task, messages: Sequence[Message]) -> str:
    """Guesses the middle of what the hints leave."""
    low, high = 1, int(str(task.data["highest"]))
    for message in messages:
        words = message["content"].split()
        if message["role"] == "user" and "higher" in words:
            low = int(words[words.index("than") + 1].rstrip(".")) + 1
        if message["role"] == "user" and "lower" in words:
            high = int(words[words.index("than") + 1].rstrip(".")) - 1
    return str((low + high) // 2)
