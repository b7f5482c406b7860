"""From log-probabilities to what is minimised, and to the figures that a step reports. Sums throughout.

loss of a token -> times the corrections -> plus the KL penalty -> times the aggregation's weights -> summed
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rlflow.algorithms.aggregation import Denominator, denominator, token_weights
from rlflow.algorithms.chosen import objective_of
from rlflow.algorithms.proximal import interpolate_proximal
from rlflow.algorithms.tokens import Tokens, clamp_log_ratio
from rlflow.batching import PackedBatch
from rlflow.config import AlgorithmConfig, Config, Proximal
from rlflow.roles import Mean

_METRICS = (
    "entropy",
    "kl",
    "clip_fraction",
    "correction/mean",
    "correction/rejected",
    "sampling/logp_difference_mean",
    "ratio/mean",
)
NUM_SUMS = len(_METRICS) + 3
"""The metrics' sums, then the weighted loss, the number of sequences and the number of loss tokens."""


class Row(NamedTuple):
    """What one packed row adds to a step."""

    loss: Tensor
    """Scalar, a weighted sum over the loss tokens; its gradient is the row's share before the division."""
    sums: Tensor
    """[NUM_SUMS] float64 without gradient."""
    largest_difference: Tensor
    """Scalar float64: the largest |current - behaviour| log-probability, 0 without loss tokens."""


class Objective:
    """The chosen algorithm, applied to packed rows."""

    def __init__(self, config: Config) -> None:
        """Raises ConfigError for an algorithm that cannot be found, or options that it does not take."""
        self._algorithm = config.algorithm
        self._max_length = config.rollout.max_new_tokens
        self._chosen = objective_of(config.algorithm)

    def __call__(self, logprobs: Tensor, entropies: Tensor, packed: PackedBatch, version: int) -> Row:
        """One row, from the log-probabilities and entropies [N] that the policy of `version` gives its loss tokens."""
        tokens = self._tokens(logprobs, entropies, packed, version)
        loss, is_clipped = self._chosen.loss(tokens)
        weights = self._corrections(tokens)
        kl = torch.zeros_like(loss)
        loss = loss * weights
        if self._algorithm.kl_coefficient > 0:
            kl = self._chosen.kl(logprobs, _references(packed).to(logprobs.device))
            loss = loss + self._algorithm.kl_coefficient * kl
        total = (loss * token_weights(self._algorithm.aggregation, tokens, self._max_length)).sum()
        difference = (logprobs - tokens.behaviour).detach()
        ratio = clamp_log_ratio(difference).exp()
        columns = [entropies, kl, is_clipped, weights, weights == 0, difference.abs(), ratio]
        sums = [column.detach().double().sum() for column in columns]
        counts = logprobs.new_tensor([tokens.num_sequences, len(logprobs)], dtype=torch.float64)
        return Row(
            loss=total,
            sums=torch.cat([torch.stack([*sums, total.detach().double()]), counts]),
            largest_difference=difference.abs().double().amax() if len(difference) else counts.new_zeros(()),
        )

    def _tokens(self, logprobs: Tensor, entropies: Tensor, packed: PackedBatch, version: int) -> Tokens:
        device = logprobs.device
        behaviour = torch.from_numpy(packed.behaviour_logprobs).to(device)
        proximal = behaviour
        if self._algorithm.proximal is Proximal.interpolated:
            versions = torch.from_numpy(packed.versions).to(device)
            proximal = interpolate_proximal(logprobs, behaviour, versions, version)
        return Tokens(
            logprobs=logprobs,
            proximal=proximal,
            behaviour=behaviour,
            advantages=torch.from_numpy(packed.advantages).to(device),
            entropies=entropies,
            sequence_of=torch.from_numpy(packed.sequence_of).to(device),
            num_sequences=packed.num_sequences,
        )

    def _corrections(self, tokens: Tokens) -> Tensor:
        """The product of all corrections, [N].

        They compare with the proximal policy where it is one of its own, otherwise with the current one: with one
        update a batch, the gradient is taken at the policy that the step starts from.
        """
        weights = torch.ones_like(tokens.advantages)
        is_interpolated = self._algorithm.proximal is Proximal.interpolated
        target = tokens.proximal if is_interpolated else tokens.logprobs.detach()
        for correction in self._chosen.corrections:
            weights = weights * correction(tokens, target)
        return weights


def divisor(sums: Tensor, algorithm: AlgorithmConfig) -> float:
    """What the step divides its sums by: tokens or sequences, 0 when nothing was accumulated."""
    return float(sums[-1] if denominator(algorithm.aggregation) is Denominator.tokens else sums[-2])


def read_metrics(sums: Tensor, largest_difference: Tensor, algorithm: AlgorithmConfig) -> dict[str, Mean]:
    """The metrics of a step from the sums [NUM_SUMS] over all rows and ranks, without those that the algorithm lacks.

    `ratio/mean` is the current policy over the one that sampled, before any clip or cap. `num_tokens` counts loss
    tokens.
    """
    *totals, loss, _, num_tokens = sums.tolist()
    metrics = {name: Mean(total=total, count=num_tokens) for name, total in zip(_METRICS, totals, strict=True)}
    if algorithm.kl_coefficient == 0:
        del metrics["kl"]
    if not algorithm.corrections:
        del metrics["correction/mean"], metrics["correction/rejected"]
    return metrics | {
        "loss": Mean(total=loss, count=divisor(sums, algorithm)),
        "sampling/logp_difference_max": Mean(total=largest_difference.item(), count=1),
        "num_tokens": Mean(total=num_tokens, count=num_tokens),
    }


def _references(packed: PackedBatch) -> Tensor:
    if packed.reference_logprobs is not None:
        return torch.from_numpy(packed.reference_logprobs)
    if packed.num_loss_tokens:
        raise ValueError(
            "algorithm.kl_coefficient is above 0, but the samples carry no reference log-probabilities; pass them in "
            "TrainSample.reference_logprobs"
        )
    return torch.zeros(0)
