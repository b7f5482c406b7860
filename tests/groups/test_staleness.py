"""Admission and order, by literal cases and as properties."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fakes import make_episode

from rlflow.config import Late
from rlflow.groups.staleness import admission_budget, is_too_late, next_target, oldest_allowed, without_old_tokens
from rlflow.types import NO_VERSION, ReadyGroup, Sample


@pytest.mark.parametrize(
    ("served_step", "max_versions", "num_trained", "num_live", "budget"),
    [
        (0, 0, 0, 0, 8),
        (0, 0, 0, 8, 0),
        (0, 0, 0, 7, 1),
        (3, 0, 24, 0, 8),
        (0, 1, 0, 8, 8),
        (3, 2, 24, 20, 4),
        (9, 0, 72, 0, 8),
        (9, 4, 72, 8, 0),
        (10, 0, 80, 0, 0),
    ],
)
def test_admission_budget(served_step: int, max_versions: int, num_trained: int, num_live: int, budget: int) -> None:
    found = admission_budget(
        served_step=served_step,
        num_steps=10,
        groups_per_step=8,
        max_versions=max_versions,
        num_trained=num_trained,
        num_live=num_live,
    )
    assert found == budget


@pytest.mark.parametrize(
    ("served_step", "num_trained", "num_live", "num_training", "budget"),
    [
        (0, 0, 0, 0, 10),
        (0, 0, 10, 7, 0),
        (0, 0, 9, 7, 1),  # one of the spare groups was dropped, and the step still has a place
        (0, 0, 8, 8, 0),  # the step is full
        (0, 8, 0, 0, 0),  # the step is done, and the engines do not have its version yet
        (1, 8, 0, 0, 10),
    ],
)
def test_spare_groups_exist_while_a_step_has_places_left(
    served_step: int, num_trained: int, num_live: int, num_training: int, budget: int
) -> None:
    found = admission_budget(
        served_step=served_step,
        num_steps=10,
        groups_per_step=8,
        max_versions=0,
        num_trained=num_trained,
        num_live=num_live,
        num_training=num_training,
        num_spare=2,
    )
    assert found == budget


def make_group(group_id: int, *versions: tuple[int, int]) -> ReadyGroup:
    """One episode for each (oldest, newest) version."""
    return ReadyGroup(
        group_id=group_id,
        task_id="t",
        episodes=[make_episode(1.0, oldest, newest_version=newest) for oldest, newest in versions],
        payloads=[],
        task_kind="",
        advantages=[],
        num_bytes=10,
    )


@pytest.mark.parametrize(
    ("target", "waited_share", "num_ready", "crowded_share", "expected"),
    [
        (16, 0.5, 0, 0.0, 20),  # the trainer waited: half a step more
        (16, 0.5, 0, 0.5, 20),
        (16, 0.5, 0, 0.6, 16),  # but the engines have no room for more
        (38, 0.5, 0, 0.0, 40),  # up to the bound
        (24, 0.0, 7, 0.0, 24),
        (24, 0.05, 8, 0.0, 23),  # a whole step lies ready: an eighth of a step fewer
        (24, 0.05, 8, 1.0, 23),
        (8, 0.0, 30, 0.0, 8),  # never less than a step
    ],
)
def test_as_many_groups_live_as_keep_the_trainer_busy(
    target: int, waited_share: float, num_ready: int, crowded_share: float, expected: int
) -> None:
    found = next_target(
        target,
        waited_share=waited_share,
        num_ready=num_ready,
        crowded_share=crowded_share,
        groups_per_step=8,
        max_versions=4,
    )
    assert found == expected


@pytest.mark.parametrize(
    ("late", "versions", "is_late"),
    [
        (Late.requeue, [(3, 5), (3, 3)], False),
        (Late.requeue, [(4, 5), (2, 5)], True),
        (Late.mask, [(1, 2), (1, 3)], False),
        (Late.mask, [(1, 2), (2, 2)], True),
        (Late.train, [(0, 0), (1, 1)], False),
    ],
)
def test_what_is_too_late(late: Late, versions: list[tuple[int, int]], is_late: bool) -> None:
    oldest = oldest_allowed(version=5, max_versions=2)
    assert is_too_late(make_group(1, *versions), oldest=oldest, late=late) is is_late


def test_a_demonstration_is_never_too_late() -> None:
    group = make_group(1, (NO_VERSION, NO_VERSION))
    assert not any(is_too_late(group, oldest=3, late=late) for late in Late)


def test_old_tokens_leave_the_loss_and_stay_as_context() -> None:
    sample = Sample(
        prompt_ids=np.array([7], dtype=np.int32),
        completion_ids=np.array([1, 2, 3, 4], dtype=np.int32),
        loss_mask=np.array([True, True, False, True]),
        logprobs=np.array([-1, -2, 0, -4], dtype=np.float32),
        versions=np.array([2, 3, -1, 4], dtype=np.int32),
        cache_versions=np.array([2, 3, -1, 4], dtype=np.int32),
    )
    masked = without_old_tokens(sample, 3)
    assert masked.loss_mask.tolist() == [False, True, False, True]
    assert masked.completion_ids.tolist() == [1, 2, 3, 4]
    assert sample.loss_mask.tolist() == [True, True, False, True]
    nobody = np.full(4, NO_VERSION, np.int32)
    given = without_old_tokens(replace(sample, versions=nobody, cache_versions=nobody), 3)
    assert given.loss_mask.tolist() == [True, True, False, True]
    on_older_cache = replace(sample, cache_versions=np.array([2, 2, -1, 4], dtype=np.int32))
    assert without_old_tokens(on_older_cache, 3).loss_mask.tolist() == [False, False, False, True]
