"""A task for each number; the answer is the number."""

from __future__ import annotations

import random

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
