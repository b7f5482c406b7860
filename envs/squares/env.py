"""A picture of squares, and a question about it: their number or their colour. Nothing but the picture tells.

The picture is drawn where it is shown, from the task's seed, so that only the seed travels with the task.
"""

import random
import re
from functools import partial
from typing import Any, cast

from rlflow.envs.base import EnvironmentSpec, Prompt, SingleTurn
from rlflow.envs.images import with_images
from rlflow.envs.seeds import seeded_tasks
from rlflow.errors import ConfigError
from rlflow.types import Message, Task

COLORS = ("red", "green", "blue", "yellow", "black", "white")
CELLS = 3
"""The squares are in different cells of so many rows and columns."""
QUESTIONS = {
    "count": "How many squares are in the picture? Answer with a number.",
    "color": f"Which colour do the squares have? Answer with one of the words {', '.join(COLORS)}.",
}


def load(
    question: str = "count", size: int = 2000, seed: int = 0, side: int = 96, evaluation_size: int = 64
) -> EnvironmentSpec:
    """Pictures of one to five squares of one colour.

    question: count or color.
    size: number of tasks; seed: which ones; evaluation_size: of other tasks, for `eval.every`.
    side: width and height of a picture in pixels.
    """
    if question not in QUESTIONS:
        raise ConfigError(f"env.args.question must be one of {', '.join(QUESTIONS)}; got {question!r}")
    if side < 4 * CELLS:
        raise ConfigError(f"env.args.side must be at least {4 * CELLS}, so that squares can be seen; got {side}")
    tasks, evaluation_tasks = seeded_tasks(partial(make_tasks, question), size, seed, evaluation_size)
    build = partial(Squares, question, side)
    return EnvironmentSpec(tasks=tasks, build=build, reward=says_only, evaluation_tasks=evaluation_tasks)


def make_tasks(question: str, size: int, seed: int) -> list[Task]:
    """One Task a picture, whose seed is `seed` plus its index."""
    return [
        Task(
            id=f"squares/{question}/{index}",
            prompt=(Message(role="user", content=QUESTIONS[question]),),
            answer=str(facts_of(index)[question]),
            data={"seed": index},
        )
        for index in range(seed, seed + size)
    ]


def facts_of(seed: int) -> dict[str, int | str]:
    """What is in the picture of a seed."""
    chosen = random.Random(seed)
    return {"count": chosen.randint(1, 5), "color": chosen.choice(COLORS)}


def draw(seed: int, side: int) -> Any:
    """The picture of a seed: squares on gray, [side, side] pixels, as Pillow has it."""
    from PIL import Image, ImageDraw

    facts, picture, cell = facts_of(seed), Image.new("RGB", (side, side), "gray"), side // CELLS
    pen = ImageDraw.Draw(picture)
    for place in random.Random(f"places {seed}").sample(range(CELLS**2), cast(int, facts["count"])):
        left, top = place % CELLS * cell + cell // 6, place // CELLS * cell + cell // 6
        pen.rectangle((left, top, left + cell // 2, top + cell // 2), fill=str(facts["color"]))
    return picture


class Squares(SingleTurn):
    def __init__(self, question: str, side: int) -> None:
        self._question, self._side = question, side

    async def reset(self, task: Task) -> Prompt:
        picture = draw(cast(int, task.data["seed"]), self._side)
        content = [{"type": "image", "image": picture}, {"type": "text", "text": QUESTIONS[self._question]}]
        return Prompt(messages=[with_images({"role": "user", "content": content})])


def says_only(task: Task, completion: str) -> float:
    """1.0 if the reply has the answer and no other number or colour, else 0.0."""
    words = re.findall(r"[0-9]+|[a-z]+", completion.lower())
    return float({word for word in words if word.isdigit() or word in COLORS} == {str(task.answer)})
