"""Each guess is answered with a hint; the reward comes with the last one."""

import random
import re
from collections.abc import Sequence
from functools import partial

from rlflow.envs.base import Environment, EnvironmentSpec, Prompt, Step
from rlflow.envs.seeds import seeded_tasks
from rlflow.errors import ConfigError
from rlflow.types import Message, Task

SYSTEM_PROMPT = "You play a guessing game. You reply with a single number and nothing else."
EXAMPLE = (
    ("user", "I think of a number between 1 and 8. Which one is it?"),
    ("assistant", "4"),
    ("user", "My number is higher than 4. What is my number?"),
    ("assistant", "6"),
    ("user", "My number is lower than 6. What is my number?"),
    ("assistant", "5"),
)
"""A game that goes well, so that a small model sees what a reply looks like."""
QUESTION = "Right! Now I think of a number between 1 and {highest}. Which one is it?"
_NUMBER = re.compile(r"(?<![\w.-])[0-9]{1,9}(?![\w]|\.[0-9])")


def load(
    highest: int = 8, guesses: int = 3, size: int = 2000, seed: int = 0, evaluation_size: int = 64
) -> EnvironmentSpec:
    """A number between 1 and `highest` to be found with at most `guesses` replies.

    size: number of tasks; seed: which ones; evaluation_size: number of tasks for `eval.every`, from another seed.
    """
    if guesses < 1:
        raise ConfigError(f"env.args.guesses must be at least 1; got {guesses}")
    if highest < 2:
        raise ConfigError(f"env.args.highest must be at least 2; got {highest}")
    tasks, evaluation_tasks = seeded_tasks(partial(make_tasks, highest), size, seed, evaluation_size)
    build = partial(GuessNumber, guesses)
    return EnvironmentSpec(tasks=tasks, build=build, evaluation_tasks=evaluation_tasks, expert=halve)


class GuessNumber(Environment):
    """Says `higher` or `lower`, until the number is found or no guess is left."""

    def __init__(self, guesses: int) -> None:
        self._left = guesses
        self._number = 0

    async def reset(self, task: Task) -> Prompt:
        assert isinstance(task.answer, str)
        self._number = int(task.answer)
        return Prompt(messages=list(task.prompt))

    async def step(self, reply: Message) -> Step:
        self._left -= 1
        guess = guess_in(reply["content"])
        reward = float(guess == self._number)
        metrics = {"guesses": 1.0, "not_a_number": float(guess is None)}
        if reward == 1.0 or self._left == 0:
            return Step(done=True, reward=reward, metrics=metrics)
        hint = "That is not a number. Reply with a number."
        if guess is not None:
            hint = f"My number is {'higher' if guess < self._number else 'lower'} than {guess}. What is my number?"
        return Step(messages=[Message(role="user", content=hint)], metrics=metrics)


def halve(task: Task, messages: Sequence[Message]) -> str:
    """Guesses the middle of what the hints leave."""
    low, high = 1, int(str(task.data["highest"]))
    for message in messages[len(task.prompt) :]:
        words = message["content"].split()
        if message["role"] == "user" and "higher" in words:
            low = int(words[words.index("than") + 1].rstrip(".")) + 1
        if message["role"] == "user" and "lower" in words:
            high = int(words[words.index("than") + 1].rstrip(".")) - 1
    return str((low + high) // 2)


def make_tasks(highest: int, size: int, seed: int) -> list[Task]:
    """`size` tasks."""
    chance = random.Random(f"guess_number/{seed}")
    spoken = (("system", SYSTEM_PROMPT), *EXAMPLE, ("user", QUESTION.format(highest=highest)))
    return [
        Task(
            id=f"guess_number/{seed}/{index}",
            prompt=tuple(Message(role=role, content=content) for role, content in spoken),
            answer=str(chance.randint(1, highest)),
            data={"highest": highest},
        )
        for index in range(size)
    ]


def guess_in(text: str) -> int | None:
    """The only whole number in a reply; None if there is none, or if there are several different ones."""
    numbers = {int(found) for found in _NUMBER.findall(text)}
    return numbers.pop() if len(numbers) == 1 else None
