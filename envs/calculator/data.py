"""Products and sums that are too large to be done in one's head."""

from __future__ import annotations

import random

from rlflow.errors import ConfigError
from rlflow.types import Message, Task

OPERATIONS = ("+", "-", "*")
SYSTEM_PROMPT = "You answer with a number. Use the calculator for every question."


def make_tasks(digits: int, size: int, seed: int) -> list[Task]:
    """`size` questions about two numbers of `digits` digits each."""
    if not 1 <= digits <= 12 or size < 1:
        raise ConfigError(f"env.args of calculator need 1 <= digits <= 12 and size >= 1; got {digits} and {size}")
    chance = random.Random(f"calculator/{digits}/{seed}")
    return [_task(digits, chance, f"calculator/{digits}/{seed}/{index}") for index in range(size)]


def _task(digits: int, chance: random.Random, identity: str) -> Task:
    low, high = 10 ** (digits - 1), 10**digits - 1
    left, operation, right = chance.randint(low, high), chance.choice(OPERATIONS), chance.randint(low, high)
    answer = {"+": left + right, "-": left - right, "*": left * right}[operation]
    expression = f"{left} {operation} {right}"
    return Task(
        id=identity,
        prompt=(
            Message(role="system", content=SYSTEM_PROMPT),
            Message(role="user", content=f"What is {expression}?"),
        ),
        answer=str(answer),
        data={"expression": expression},
    )
