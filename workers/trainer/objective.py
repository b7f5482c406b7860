"""From log-probabilities to what is minimised, and to the figures that a step reports. Sums throughout."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rlflow.algorithms.correction import tis
from rlflow.algorithms.kl import k3
from rlflow.algorithms.loss.ppo_clip import MAX_LOG_RATIO, ppo_clip
from rlflow.batching import PackedBatch
from rlflow.config import AlgorithmConfig, Correction
from rlflow.roles import Mean

_METRICS = ("loss", "entropy", "kl", "clip_fraction", "sampling/logp_difference_mean", "ratio/mean")
NUM_SUMS = len(_METRICS) + 1


class Objective(NamedTuple):
    loss: Tensor
    """Scalar, summed over the loss tokens; its gradient is the gradient's contribution before the division."""
    sums: Tensor
    """[NUM_SUMS] float64 without gradient: the metrics' sums, then the number of loss tokens."""
    largest_difference: Tensor
    """Scalar float64: the largest |current - behaviour| log-probability, 0 without loss tokens."""


def token_objective(logprobs: Tensor, entropies: Tensor, packed: PackedBatch, algorithm: AlgorithmConfig) -> Objective:
    """The objective of one row from the current policy's log-probabilities and entropies of its loss tokens [N].

    Without correction the behaviour policy is the proximal policy. With `tis` it is the current policy: with one
    optimiser step a batch the gradient is taken at the policy that the step starts from, so nothing can be clipped.
    """
    device = logprobs.device
    behaviour = torch.from_numpy(packed.behaviour_logprobs).to(device)
    advantages = torch.from_numpy(packed.advantages).to(device)
    if algorithm.correction is Correction.tis:
        assert algorithm.tis_cap is not None, "checked by rlflow.config.check"
        loss, is_clipped = ppo_clip(logprobs, logprobs.detach(), advantages, None, None)
        loss = loss * tis(logprobs, behaviour, algorithm.tis_cap)
    else:
        loss, is_clipped = ppo_clip(logprobs, behaviour, advantages, algorithm.clip_low, algorithm.clip_high)
    kl = torch.zeros_like(loss)
    if algorithm.kl_coefficient > 0:
        kl = k3(logprobs, _references(packed).to(device))
        loss = loss + algorithm.kl_coefficient * kl
    difference = (logprobs - behaviour).detach()
    ratio = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    columns = [loss, entropies, kl, is_clipped, difference.abs(), ratio, torch.ones_like(loss)]
    sums = torch.stack([column.detach().double().sum() for column in columns])
    largest = difference.abs().double().amax() if len(difference) else sums.new_zeros(())
    return Objective(loss=loss.sum(), sums=sums, largest_difference=largest)


def read_metrics(sums: Tensor, largest_difference: Tensor, algorithm: AlgorithmConfig) -> dict[str, Mean]:
    """The metrics of a step from the sums [NUM_SUMS] over all rows and ranks, without those that the algorithm lacks.

    `ratio/mean` is the current policy over the one that sampled, before any clip or cap. `num_tokens` counts loss
    tokens.
    """
    *totals, count = sums.tolist()
    metrics = {name: Mean(total=total, count=count) for name, total in zip(_METRICS, totals, strict=True)}
    if algorithm.kl_coefficient == 0:
        del metrics["kl"]
    if algorithm.correction is Correction.tis:
        del metrics["clip_fraction"]
    metrics["sampling/logp_difference_max"] = Mean(total=largest_difference.item(), count=1)
    return metrics | {"num_tokens": Mean(total=count, count=count)}


def _references(packed: PackedBatch) -> Tensor:
    if packed.reference_logprobs is not None:
        return torch.from_numpy(packed.reference_logprobs)
    if packed.num_loss_tokens:
        raise ValueError(
            "algorithm.kl_coefficient is above 0, but the samples carry no reference log-probabilities; pass them in "
            "TrainSample.reference_logprobs"
        )
    return torch.zeros(0)
