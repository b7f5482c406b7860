"""From the model's outputs for a packed row to the loss to minimise, and to the figures that a step reports.

    loss of each token -> times the corrections -> plus the KL penalty and the balance loss, less the bonus for entropy
        -> times the aggregation's weights -> summed

Rules: everything is a sum over loss tokens, in float64 for figures, so rows and ranks can be added in any order; `step`
divides once, by `divisor`. Figures carry no gradient. State that adapts (the KL coefficient, the bonus for entropy, the
entropy control) changes in `end_step` alone, which every rank calls with the same sums.

Example: two rows with weighted losses 3.0 and 1.0 over 5 and 3 loss tokens, aggregated by token: the step divides by 8,
and reports the loss 0.5.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlflow.algorithms.aggregation import Denominator, denominator, token_weights
from rlflow.algorithms.distillation import FORWARD, SAMPLED, distillation_of, teacher_options
from rlflow.algorithms.divergence import divergence
from rlflow.algorithms.entropy import leaves_out_negatives, next_bonus, without_negatives
from rlflow.algorithms.kl.base import next_coefficient
from rlflow.algorithms.proximal import interpolate_proximal
from rlflow.algorithms.registry import objective_of
from rlflow.algorithms.schedules import share_power
from rlflow.algorithms.tokens import Tokens, clamp_log_ratio, sequence_mean
from rlflow.batching.pack import PackedBatch
from rlflow.config import Config, Proximal
from rlflow.roles import PROXIMAL, REFERENCE, TEACHER, Mean
from rlflow.runtime.derived import keeps_cache, num_updates
from rlflow.types import NO_VERSION, FloatArray

KL_HORIZON = 10_000
"""An adaptive KL coefficient changes by at most about 20 % over this many episodes (arXiv:1909.08593)."""
_METRICS = (
    "entropy",
    "kl",
    "clip_fraction",
    "correction/mean",
    "correction/rejected",
    "sampling/logp_difference_mean",
    "ratio/mean",
    "sampling/current_share",
    "sampling/current_logp_difference_mean",
    "sampling/older_cache_share",
    "sampling/older_cache_logp_difference_mean",
    "entropy/sequence_mean",
    "ratio/effective_share",
    "given_share",
    "distil/kl",
    "distil/clamped",
)


class Row(NamedTuple):
    """The contribution of one packed row to a step."""

    loss: Tensor
    """Scalar, a weighted sum over the loss tokens; its gradient is the row's share before the division."""
    sums: Tensor
    """[num_sums] float64 without gradient; ends with the weighted loss, the sequences and the loss tokens."""
    largest: Tensor
    """Scalar float64: the largest value of the figure whose maximum is reported, 0 without loss tokens."""


class Objective(ABC):
    """What a model minimises over packed rows, and the figures that it reports."""

    num_sums: int

    @abstractmethod
    def __call__(self, outputs: tuple[Tensor, ...], packed: PackedBatch, version: int) -> Row:
        """One row, from the outputs of the model of `version` for its loss tokens."""

    @abstractmethod
    def divisor(self, sums: Tensor) -> float:
        """What the step divides its sums by: tokens, sequences or 1; 0 if nothing was accumulated."""

    @abstractmethod
    def metrics(self, sums: Tensor, largest: Tensor) -> dict[str, Mean]:
        """The metrics of a step from the sums [num_sums] over all rows and ranks."""

    def rate_scale(self, sums: Tensor) -> float:
        """What the learning rate of this update is multiplied by; `sums` are those of all ranks."""
        del sums
        return 1.0

    def end_step(self, sums: Tensor) -> None:  # noqa: B027  optional: most objectives do not adapt
        """Adapt to the figures of a step; called on every rank with the same sums."""

    def adapted(self) -> dict[str, Mean]:
        """The metrics of what adapts, as it is now."""
        return {}

    def state(self) -> dict[str, float]:
        """What a resumed run must remember of earlier steps."""
        return {}

    def load_state(self, state: Mapping[str, float]) -> None:  # noqa: B027
        """Restore what `state` returned; entries that are missing begin anew."""


class PolicyObjective(Objective):
    """The chosen algorithm; outputs are log-probabilities and entropies, [N] each, and with a balance loss that."""

    num_sums = len(_METRICS) + 3

    def __init__(self, config: Config) -> None:
        """Raises ConfigError for an algorithm that cannot be found, or options that it does not take."""
        self._algorithm = config.algorithm
        self._max_length = config.rollout.max_new_tokens
        self._chosen = objective_of(config.algorithm)
        self._teacher = config.teacher
        self._options = teacher_options(config.teacher) if config.teacher.models else None
        self._distil = distillation_of(config.teacher)
        self._kl_coefficient = config.algorithm.kl_coefficient
        self._leaves_out_negatives = False
        self._bonus, self._gives_bonus = config.algorithm.entropy_bonus, True
        self._rate_power = share_power(config.trainer)
        self._keeps_cache, self._is_asynchronous = keeps_cache(config), config.staleness.max_versions > 0

    def __call__(self, outputs: tuple[Tensor, ...], packed: PackedBatch, version: int) -> Row:
        logprobs, entropies, *balance = outputs
        likely = None if packed.likely is None else balance.pop(0)
        device = logprobs.device
        versions = torch.from_numpy(packed.versions).to(device)
        is_given = versions.eq(NO_VERSION)  # by a demonstration, whose ratio is 1, because nobody has sampled it
        behaviour = torch.from_numpy(packed.behaviour_logprobs).to(device).where(~is_given, logprobs.detach())
        advantages, distance, is_clamped = self._advantages(packed, likely, device)
        tokens = Tokens(
            logprobs=logprobs,
            proximal=self._proximal(logprobs, behaviour, versions, packed, version),
            behaviour=behaviour,
            advantages=advantages,
            entropies=entropies,
            sequence_of=torch.from_numpy(packed.sequence_of).to(device),
            num_sequences=packed.num_sequences,
        )
        loss, is_clipped = self._chosen.loss(tokens)
        weights = self._corrections(tokens)
        kl = torch.zeros_like(loss)
        loss = loss * weights
        if self._algorithm.kl_coefficient > 0:
            kl = self._chosen.kl(logprobs, torch.from_numpy(_said_by(REFERENCE, packed)).to(device))
            if not self._algorithm.kl_in_reward:
                loss = loss + self._kl_coefficient * kl
        if self._learns_divergence:
            loss = loss + self._teacher.weight * distance
        if self._bonus and self._gives_bonus:
            loss = loss - self._bonus * entropies
        if balance:
            loss = loss + self._algorithm.balance_coefficient * balance[0]
        total = (loss * token_weights(self._algorithm.aggregation, tokens, self._max_length)).sum()
        difference = (logprobs - behaviour).detach()
        ratio = clamp_log_ratio(difference).exp()
        on_older = torch.from_numpy(packed.is_on_older_cache).to(device)
        gap = difference.abs()
        is_current = versions.eq(version) & ~on_older
        columns = [entropies, kl, is_clipped, weights, weights == 0, gap * ~on_older, ratio]
        columns += [is_current, gap * is_current, on_older, gap * on_older]
        columns += [sequence_mean(entropies.detach(), tokens), ratio.double().square(), is_given]
        columns += [distance, is_clamped]
        sums = [column.detach().double().sum() for column in columns]
        counts = logprobs.new_tensor([tokens.num_sequences, len(logprobs)], dtype=torch.float64)
        return Row(
            loss=total,
            sums=torch.cat([torch.stack([*sums, total.detach().double()]), counts]),
            largest=(gap * ~on_older).double().amax() if len(gap) else counts.new_zeros(()),
        )

    def divisor(self, sums: Tensor) -> float:
        num_sequences, num_tokens = sums[-2:].tolist()
        match denominator(self._algorithm.aggregation):
            case Denominator.tokens:
                return num_tokens
            case Denominator.sequences:
                return num_sequences
            case Denominator.nothing:
                return float(num_tokens > 0)

    def metrics(self, sums: Tensor, largest: Tensor) -> dict[str, Mean]:
        """The metrics that the algorithm has.

        `ratio/mean` is the current policy over the one that sampled, before any clip or cap; `ratio/effective_share` is
        (sum of ratios)^2 / (tokens * sum of squares). `num_tokens` counts loss tokens. Tokens sampled on a cache of an
        older version have a log-probability difference of their own, because there engine and trainer need not agree.
        `current`: tokens of the version that is trained, on its cache, where they must.
        """
        *totals, loss, num_sequences, num_tokens = sums.tolist()
        num_older = totals[_METRICS.index("sampling/older_cache_share")]
        num_current = totals[_METRICS.index("sampling/current_share")]
        num_sampled = num_tokens - totals[_METRICS.index("given_share")]
        counts = {
            "sampling/logp_difference_mean": num_sampled - num_older,
            "sampling/older_cache_logp_difference_mean": num_older,
            "sampling/current_logp_difference_mean": num_current,
            "entropy/sequence_mean": num_sequences,
        }
        metrics = {
            name: Mean(total=total, count=counts.get(name, num_tokens))
            for name, total in zip(_METRICS, totals, strict=True)
        }
        ratios, squares = metrics["ratio/mean"].total, metrics["ratio/effective_share"].total
        metrics["ratio/effective_share"] = Mean(total=ratios**2, count=num_tokens * squares)
        del metrics["given_share"]
        if not self._is_asynchronous:
            del metrics["sampling/current_share"], metrics["sampling/current_logp_difference_mean"]
        if not self._keeps_cache:
            del metrics["sampling/older_cache_share"], metrics["sampling/older_cache_logp_difference_mean"]
        if self._algorithm.kl_coefficient == 0:
            del metrics["kl"]
        if self._options is None:
            del metrics["distil/kl"]
        if self._options is None or self._learns_divergence:
            del metrics["distil/clamped"]
        if not self._algorithm.corrections:
            del metrics["correction/mean"], metrics["correction/rejected"]
        if self._algorithm.entropy_high is None:
            del metrics["entropy/sequence_mean"]
        return metrics | {
            "loss": Mean(total=loss, count=self.divisor(sums)),
            "sampling/logp_difference_max": Mean(total=largest.item(), count=min(1, num_sampled)),
            "num_tokens": Mean(total=num_tokens, count=num_tokens),
        }

    def rate_scale(self, sums: Tensor) -> float:
        share = self.metrics(sums, sums.new_zeros(()))["ratio/effective_share"].value if self._rate_power else None
        return 1.0 if share is None else share**self._rate_power

    def end_step(self, sums: Tensor) -> None:
        totals = dict(zip(_METRICS, sums.tolist(), strict=False))
        algorithm, num_sequences = self._algorithm, int(sums[-2])
        if algorithm.kl_target is not None:
            horizon = max(KL_HORIZON, num_sequences)
            self._kl_coefficient = next_coefficient(
                self._kl_coefficient, totals["kl"] / float(sums[-1]), algorithm.kl_target, num_sequences, horizon
            )
        if algorithm.entropy_target is not None:
            entropy = totals["entropy"] / float(sums[-1])
            self._bonus, self._gives_bonus = next_bonus(self._bonus, entropy, algorithm.entropy_target)
        if algorithm.entropy_low is not None and algorithm.entropy_high is not None:
            entropy = totals["entropy/sequence_mean"] / num_sequences
            self._leaves_out_negatives = leaves_out_negatives(
                self._leaves_out_negatives, entropy, low=algorithm.entropy_low, high=algorithm.entropy_high
            )

    def adapted(self) -> dict[str, Mean]:
        metrics: dict[str, Mean] = {}
        if self._algorithm.kl_target is not None:
            metrics["kl_coefficient"] = Mean(total=self._kl_coefficient, count=1)
        if self._algorithm.entropy_target is not None:
            metrics["entropy_bonus"] = Mean(total=self._bonus * self._gives_bonus, count=1)
        if self._algorithm.entropy_high is not None:
            metrics["entropy_control"] = Mean(total=float(self._leaves_out_negatives), count=1)
        return metrics

    def state(self) -> dict[str, float]:
        return {
            "kl_coefficient": self._kl_coefficient,
            "leaves_out_negatives": float(self._leaves_out_negatives),
            "entropy_bonus": self._bonus,
            "gives_bonus": float(self._gives_bonus),
        }

    def load_state(self, state: Mapping[str, float]) -> None:
        if self._algorithm.kl_target is not None:  # otherwise the setting holds
            self._kl_coefficient = state.get("kl_coefficient", self._kl_coefficient)
        if self._algorithm.entropy_target is not None:
            self._bonus = state.get("entropy_bonus", self._bonus)
            self._gives_bonus = bool(state.get("gives_bonus", 1.0))
        self._leaves_out_negatives = bool(state.get("leaves_out_negatives", 0.0))

    @property
    def _learns_divergence(self) -> bool:
        """Whether the teacher's likeliest tokens are learnt from, and not what it says of the sampled ones."""
        return self._options is not None and self._options.kl != SAMPLED

    def _advantages(
        self, packed: PackedBatch, likely: Tensor | None, device: torch.device
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What the tokens are trained with, how far the policy was from its teacher, and where that was clamped; [N].

        Without a teacher, zeros and nowhere. `likely` are the policy's log-probabilities [K] of the teacher's likeliest
        tokens; then the distance has a gradient.
        """
        if self._options is None or self._learns_divergence:
            advantages = torch.from_numpy(packed.advantages).to(device)
            nothing = torch.zeros_like(advantages)
            if self._options is None:
                return advantages, nothing, nothing
            return self._teacher.reward_weight * advantages, self._divergence(packed, likely, device), nothing
        said = _said_by(TEACHER, packed)
        found = self._distil(packed.advantages, packed.behaviour_logprobs, said)
        columns = (found.advantages, packed.behaviour_logprobs - said, found.is_clamped)
        advantages, distance, is_clamped = (torch.from_numpy(each).to(device) for each in columns)
        return advantages, distance, is_clamped

    def _divergence(self, packed: PackedBatch, likely: Tensor | None, device: torch.device) -> Tensor:
        """[N] nats. Raises ValueError if no teacher said what it finds likely."""
        assert self._options is not None
        its = packed.likely
        if its is None or likely is None:
            if packed.num_loss_tokens:
                raise ValueError("the settings ask for a teacher's likeliest tokens; pass them in TrainSample.likely")
            return torch.zeros(0, device=device)
        said, of = (torch.from_numpy(each).to(device) for each in (its.logprobs, its.of))
        return divergence(likely, said, of, packed.num_loss_tokens, is_forward=self._options.kl == FORWARD)

    def _proximal(
        self, logprobs: Tensor, behaviour: Tensor, versions: Tensor, packed: PackedBatch, version: int
    ) -> Tensor:
        """The policy that the loss compares with, [N] without gradient."""
        match self._algorithm.proximal:
            case Proximal.behaviour:
                return behaviour
            case Proximal.interpolated:
                return interpolate_proximal(logprobs, behaviour, versions, version)
            case Proximal.recomputed if num_updates(self._algorithm) == 1:
                return logprobs.detach()  # the only update of a step begins where the step does
        recomputed = packed.frozen_logprobs.get(PROXIMAL)
        assert recomputed is not None or not packed.num_loss_tokens, "they are computed before the first update"
        return behaviour if recomputed is None else torch.from_numpy(recomputed).to(logprobs.device)

    def _corrections(self, tokens: Tokens) -> Tensor:
        """The product of all corrections, [N].

        They compare with the proximal policy if that is not the behaviour policy, otherwise with the current policy,
        at which the gradient is taken.
        """
        weights = torch.ones_like(tokens.advantages)
        has_own = self._algorithm.proximal is not Proximal.behaviour
        target = tokens.proximal if has_own else tokens.logprobs.detach()
        for correction in self._chosen.corrections:
            weights = weights * correction(tokens, target)
        return weights * without_negatives(tokens) if self._leaves_out_negatives else weights


def _said_by(model: str, packed: PackedBatch) -> FloatArray:
    """The log-probabilities [N] of what is the frozen `model` to the row. Raises ValueError if there are none."""
    found = packed.frozen_logprobs.get(model)
    if found is None and packed.num_loss_tokens:
        raise ValueError(
            f"the settings ask for a {model}, but the samples carry no {model} log-probabilities; pass them in "
            "TrainSample.frozen_logprobs"
        )
    return np.zeros(0, np.float32) if found is None else found
