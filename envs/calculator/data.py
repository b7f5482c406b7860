"""Products and sums that are too large to be done in one's head."""

from __future__ import annotations

import random

from rlflow.envs.texts import prompt_of
from rlflow.types import Task

OPERATIONS = ("+", "-", "*")
EXAMPLES = ("205 * 314", "614 + 950", "853 - 271")
"""Solved in the prompt, so that a small model sees what a call looks like."""
SYSTEM_PROMPT = "You answer with a number. Use the calculator for every question."


def make_tasks(digits: int, size: int, seed: int) -> list[Task]:
    """`size` questions about two numbers of `digits` digits each."""
    chance = random.Random(f"calculator/{digits}/{seed}")
    low, high = 10 ** (digits - 1), 10**digits - 1
    tasks = []
    for index in range(size):
        left, operation, right = chance.randint(low, high), chance.choice(OPERATIONS), chance.randint(low, high)
        answer = {"+": left + right, "-": left - right, "*": left * right}[operation]
        expression = f"{left} {operation} {right}"
        tasks.append(
            Task(
                id=f"calculator/{digits}/{seed}/{index}",
                prompt=prompt_of(SYSTEM_PROMPT, f"What is {expression}?"),
                answer=str(answer),
                data={"expression": expression},
            )
        )
    return tasks
