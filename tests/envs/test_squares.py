"""Pictures of squares: what is drawn is what the answer says."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import ImageColor

from rlflow.envs.images import file_of
from rlflow.envs.squares.env import COLORS, draw, facts_of, load, make_tasks, says_only
from rlflow.errors import ConfigError
from rlflow.models.images import open_image
from rlflow.types import Task


def pixels_of(seed: int) -> np.ndarray:
    return np.asarray(draw(seed, side=96))


@pytest.mark.parametrize("seed", range(8))
def test_a_picture_shows_its_facts(seed: int) -> None:
    facts, pixels = facts_of(seed), pixels_of(seed)
    is_square = (pixels == ImageColor.getrgb(str(facts["color"]))).all(-1)
    assert ((pixels == ImageColor.getrgb("gray")).all(-1) | is_square).all()
    # Each cell of 32 pixels is empty or has a square of 17.
    cells = is_square.reshape(3, 32, 3, 32).sum((1, 3))
    assert set(np.unique(cells)) <= {0, 17 * 17}
    assert (cells > 0).sum() == facts["count"]


def test_all_answers_come_up() -> None:
    assert {str(task.answer) for task in make_tasks("count", 100, 0)} == set("12345")
    assert {str(task.answer) for task in make_tasks("color", 100, 0)} == set(COLORS)


async def test_the_picture_is_drawn_where_it_is_shown() -> None:
    spec = load(size=3, side=48)
    task = spec.tasks()[2]
    assert (task.id, task.data) == ("squares/count/2", {"seed": 2})
    (message,) = (await spec.build().reset(task)).messages  # type: ignore[union-attr]
    assert message["content"].startswith("[image]How many squares")
    url = dict(message.get("parts", [])[0])["image"]
    assert np.asarray(open_image(file_of(str(url)))).tolist() == np.asarray(draw(2, side=48)).tolist()


@pytest.mark.parametrize(
    ("reply", "reward"), [("3", 1.0), ("There are 3 squares.", 1.0), ("3 or 4", 0.0), ("three", 0.0), ("", 0.0)]
)
def test_the_reply_says_the_answer_and_no_other(reply: str, reward: float) -> None:
    assert says_only(Task(id="t", prompt=(), answer="3"), reply) == reward


def test_a_colour_is_a_word() -> None:
    task = Task(id="t", prompt=(), answer="red")
    assert [says_only(task, reply) for reply in ("Red.", "not red but blue", "reddish")] == [1.0, 0.0, 0.0]


def test_a_question_that_is_not_known() -> None:
    with pytest.raises(ConfigError, match="must be one of count, color; got 'size'"):
        load(question="size")
    with pytest.raises(ConfigError, match="at least 12"):
        load(side=8)
