"""The learning rate by update."""

from __future__ import annotations

from typing import Any

import pytest

from rlflow.algorithms.schedules import learning_rate
from rlflow.config import Schedule, TrainerConfig


def rates(num_updates: int, num_steps: int, **settings: Any) -> list[float]:
    trainer = TrainerConfig(learning_rate=1.0, **settings)
    return [learning_rate(trainer, update, num_steps) for update in range(num_updates)]


def test_a_constant_rate_follows_the_warm_up() -> None:
    assert rates(4, 3, warmup_steps=2) == [0.5, 1.0, 1.0, 1.0]
    assert rates(2, 3) == [1.0, 1.0]


def test_a_linear_rate_falls_to_its_floor() -> None:
    assert rates(5, 4, schedule=Schedule.linear) == [1.0, 0.75, 0.5, 0.25, 0.0]
    found = rates(6, 6, warmup_steps=2, schedule=Schedule.linear, schedule_args={"floor": 0.2})
    assert found == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.4], abs=1e-12)


def test_a_cosine_rate_falls_slowly_then_fast_then_slowly() -> None:
    root = 2**0.5 / 4
    found = rates(6, 4, schedule=Schedule.cosine)
    assert found == pytest.approx([1.0, 0.5 + root, 0.5, 0.5 - root, 0.0, 0.0], abs=1e-12)
    found = rates(4, 2, schedule=Schedule.cosine, schedule_args={"floor": 0.5})
    assert found == pytest.approx([1.0, 0.75, 0.5, 0.5], abs=1e-12)


def test_a_resume_with_more_steps_stretches_what_is_left() -> None:
    trainer = TrainerConfig(learning_rate=2.0, schedule=Schedule.linear)
    assert learning_rate(trainer, 5, 10) == 1.0
    assert learning_rate(trainer, 5, 20) == 1.5
