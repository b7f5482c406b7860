"""One task for each number and wording; the answer is the number."""

from __future__ import annotations

import random

from rlflow.errors import ConfigError
from rlflow.types import Message, Task

SYSTEM_PROMPT = "You play a guessing game. You reply with a single number and nothing else."
QUESTIONS = (
    "I think of a number between 1 and {highest}. Which one is it?",
    "Guess my number. It is at least 1 and at most {highest}.",
    "What is my number? It lies between 1 and {highest}, both included.",
)


def make_tasks(highest: int, size: int, seed: int) -> list[Task]:
    """`size` tasks; the id says which number and wording, and how often they were drawn before."""
    if highest < 2 or size < 1:
        raise ConfigError(f"env.args of guess_number need highest >= 2 and size >= 1; got {highest} and {size}")
    chance = random.Random(f"guess_number/{seed}")
    return [_task(highest, chance, f"guess_number/{seed}/{index}") for index in range(size)]


def _task(highest: int, chance: random.Random, identity: str) -> Task:
    question = chance.choice(QUESTIONS).format(highest=highest)
    return Task(
        id=identity,
        prompt=(Message(role="system", content=SYSTEM_PROMPT), Message(role="user", content=question)),
        answer=str(chance.randint(1, highest)),
        data={"highest": highest},
    )
