"""A picture that is red or blue, and a reward for the half of the alphabet that its colour stands for."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from PIL import Image

from rlflow.envs.base import Environment, EnvironmentSpec, Prompt, Step
from rlflow.types import Message, Task

COLORS = ("red", "blue")


class Painted(Environment):
    def __init__(self, is_blank: bool) -> None:
        self.is_blank = is_blank

    async def reset(self, task: Task) -> Prompt:
        color = "gray" if self.is_blank else str(task.answer)
        content = [{"type": "image", "image": Image.new("RGB", (32, 32), color)}, {"type": "text", "text": "?"}]
        return Prompt(messages=[{"role": "user", "content": content}])  # pyright: ignore[reportArgumentType]

    async def step(self, reply: Message) -> Step:
        return Step(done=True)


def tasks() -> Sequence[Task]:
    prompt = (Message(role="user", content="?"),)
    return [Task(id=str(index), prompt=prompt, answer=COLORS[index % 2]) for index in range(64)]


def is_on_its_side(task: Task, completion: str) -> float:
    """Half of all first letters are right for red, and the others for blue: random replies earn about a half."""
    is_low = completion[:1] < "a"
    return float(is_low == (task.answer == "red"))


def load(blank: bool = False) -> EnvironmentSpec:
    return EnvironmentSpec(tasks=tasks, build=partial(Painted, blank), reward=is_on_its_side)
