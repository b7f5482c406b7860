"""The formulas, against values worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from rlflow.algorithms.advantage import grpo
from rlflow.algorithms.correction import tis
from rlflow.algorithms.kl import k3
from rlflow.algorithms.loss.ppo_clip import ppo_clip


def test_grpo_divides_by_the_sample_deviation() -> None:
    # mean 0.5; squared deviations 4 x 0.25; sample variance 1/3
    high = 0.5 / (math.sqrt(1 / 3) + 1e-6)
    assert grpo.advantages([1.0, 0.0, 0.0, 1.0]) == pytest.approx([high, -high, -high, high], rel=1e-12)


@pytest.mark.parametrize("rewards", [[], [0.7], [0.1, 0.1, 0.1]])
def test_grpo_gives_exactly_zero_when_nothing_differs(rewards: list[float]) -> None:
    assert grpo.advantages(rewards) == [0.0] * len(rewards)


def test_ppo_clip_stops_the_gradient_only_where_the_step_would_go_further() -> None:
    ratio = torch.tensor([1.0, 1.5, 1.5, 0.5, 0.5])
    advantages = torch.tensor([2.0, 1.0, -1.0, 1.0, -1.0])
    logprobs = ratio.log().requires_grad_()
    loss, is_clipped = ppo_clip(logprobs, torch.zeros(5), advantages, clip_low=0.2, clip_high=0.28)
    torch.testing.assert_close(loss, torch.tensor([-2.0, -1.28, 1.5, -0.5, 0.8]))
    assert is_clipped.tolist() == [False, True, False, False, True]
    loss.sum().backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([-2.0, 0.0, 1.5, -0.5, 0.0]))


def test_ppo_clip_without_clips_never_clips() -> None:
    loss, is_clipped = ppo_clip(torch.tensor([2.0]).log(), torch.zeros(1), torch.tensor([3.0]), None, None)
    torch.testing.assert_close(loss, torch.tensor([-6.0]))
    assert is_clipped.tolist() == [False]


def test_ppo_clip_stays_finite_for_absurd_ratios() -> None:
    logprobs = torch.tensor([0.0, -500.0], requires_grad=True)
    loss, _ = ppo_clip(logprobs, torch.tensor([-500.0, 0.0]), torch.tensor([-1.0, 1.0]), 0.2, 0.28)
    loss.sum().backward()
    torch.testing.assert_close(loss, torch.tensor([math.exp(20), -math.exp(-20)]))
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [0.0, 0.0]


def test_tis_caps_from_above_only_and_carries_no_gradient() -> None:
    proximal = torch.tensor([4.0, 1.0, 0.1]).log().requires_grad_()
    weight = tis(proximal, torch.zeros(3), cap=2.0)
    torch.testing.assert_close(weight, torch.tensor([2.0, 1.0, 0.1]))
    assert not weight.requires_grad


def test_k3_is_zero_where_the_policies_agree_and_pulls_towards_the_reference() -> None:
    logprobs = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    kl = k3(logprobs, torch.tensor([-1.0, -1.0 + math.log(2), -1.0 - math.log(2)]))
    torch.testing.assert_close(kl, torch.tensor([0.0, 1 - math.log(2), math.log(2) - 0.5]))
    kl.sum().backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([0.0, -1.0, 0.5]))
