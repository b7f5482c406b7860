"""From groups in the object store to one rank's training samples, with advantages and the critic's targets."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlflow.algorithms.token_advantage.gae import (
    DoubleArray,
    Moments,
    TokenAdvantage,
    TokenAdvantages,
    token_rewards,
    whiten,
)
from rlflow.algorithms.turns import earned, in_time
from rlflow.batching.pack import spread_over_turns
from rlflow.batching.plan import BatchPiece
from rlflow.groups.staleness import without_old_tokens
from rlflow.roles import PROXIMAL, REFERENCE
from rlflow.types import (
    BoolArray,
    CriticTargets,
    EpisodePayload,
    FloatArray,
    Likely,
    Pictures,
    ReadyGroup,
    Sample,
    TrainSample,
    TurnSummary,
)


class Fetcher:
    """Reads payloads as training samples. Tokens that are too old are masked out."""

    def __init__(
        self,
        groups: Sequence[ReadyGroup],
        oldest_version: int | None,
        token_advantage: TokenAdvantage | None,
        kl_coefficient: float = 0.0,
    ) -> None:
        """`token_advantage` turns the critic's values, which the groups then carry, into advantages of tokens.

        `kl_coefficient` weighs the penalty for the distance to the reference, which lowers each token's reward.
        """
        self._groups = groups
        self._oldest_version = oldest_version
        self._token_advantage = token_advantage
        self._kl_coefficient = kl_coefficient
        self._pictures: dict[int, Pictures] = {}
        """By group, of which there may be several pieces."""

    def payloads(self, piece: BatchPiece) -> list[EpisodePayload]:
        return _get(self._groups[piece.group].payloads, piece)

    def samples(self, piece: BatchPiece) -> list[TrainSample]:
        group = self._groups[piece.group]
        nothing: list[Any] = [None] * len(piece.episodes)
        frozen = {name: _get(handles, piece) for name, handles in group.frozen.items()}
        values = nothing if group.values is None else _get(group.values, piece)
        pictures = self._pictures_of(piece)
        found: list[TrainSample] = []
        for place, (index, payload, value) in enumerate(zip(piece.episodes, self.payloads(piece), values, strict=True)):
            advantages, samples = group.advantages[index], payload.samples
            if advantages is None:
                continue
            rows: Sequence[float | FloatArray] = [advantages[0]] * len(samples)
            targets: Sequence[CriticTargets | None] = [None] * len(samples)
            if self._token_advantage is not None:
                assert value is not None, "the critic is asked before the trainer"
                (reward,) = advantages
                turns = group.episodes[index].turns
                reference = frozen[REFERENCE][place] if REFERENCE in frozen else None
                rewards = rewards_of_tokens(samples, turns, reward, reference, self._kl_coefficient)
                rows, targets = token_level(samples, turns, rewards, value, self._token_advantage)
            elif len(advantages) > 1:
                rows = spread_over_turns(samples, advantages)
            kept = samples
            if self._oldest_version is not None:
                kept = [without_old_tokens(sample, self._oldest_version) for sample in samples]
            said = [{name: rows[place][number] for name, rows in frozen.items()} for number in range(len(samples))]
            found += [
                TrainSample(
                    sample=sample,
                    advantage=row,
                    frozen_logprobs={name: one for name, one in each.items() if not isinstance(one, Likely)},
                    likely=next((one for one in each.values() if isinstance(one, Likely)), None),
                    critic=target,
                    pictures=pictures,
                )
                for sample, row, each, target in zip(kept, rows, said, targets, strict=True)
            ]
        return found

    def bare(self, piece: BatchPiece) -> list[list[TrainSample]]:
        """The samples of each episode, to be read by the model and not to be trained on."""
        pictures = self._pictures_of(piece)
        return [
            [TrainSample(sample=one, advantage=0.0, pictures=pictures) for one in payload.samples]
            for payload in self.payloads(piece)
        ]

    def _pictures_of(self, piece: BatchPiece) -> Pictures:
        pictures = self._groups[piece.group].pictures
        if pictures is not None and piece.group not in self._pictures:
            (self._pictures[piece.group],) = _fetched([pictures])
        return self._pictures.get(piece.group, {})


def rewards_of_tokens(
    samples: Sequence[Sample],
    turns: Sequence[TurnSummary],
    reward: float,
    references: Sequence[FloatArray] | None,
    kl_coefficient: float,
) -> DoubleArray:
    """The rewards of all samples' tokens: the penalty of each, and what each turn earned on its last token."""
    mask = np.concatenate([sample.loss_mask for sample in samples])
    sampled = np.concatenate([sample.logprobs for sample in samples])
    reference = sampled if references is None else np.concatenate(list(references))
    return token_rewards(earned(turns, reward), _ends(mask, turns) - 1, sampled, reference, mask, kl_coefficient)


def _ends(mask: BoolArray, turns: Sequence[TurnSummary]) -> NDArray[np.int64]:
    """Where each turn ends in the tokens of all samples; the observations before a turn belong to it."""
    counts = np.cumsum([turn.num_loss_tokens for turn in turns])
    assert counts[-1] == mask.sum(), "the turns of an episode have all its loss tokens"
    return np.flatnonzero(mask)[counts - 1] + 1


def token_level(
    samples: Sequence[Sample],
    turns: Sequence[TurnSummary],
    rewards: DoubleArray,
    values: Sequence[FloatArray],
    estimate: TokenAdvantage,
) -> tuple[list[FloatArray], list[CriticTargets]]:
    """Advantages [L] of each sample of an episode, and the critic's targets.

    All samples of an episode are one sequence here, turn after turn in the order of time; `rewards` has their tokens
    sample after sample.
    """
    mask = np.concatenate([sample.loss_mask for sample in samples])
    flat = np.concatenate([np.asarray(row, np.float32) for row in values])
    of_turns = np.split(np.arange(len(mask)), _ends(mask, turns)[:-1])
    order = np.concatenate([of_turns[index] for index in in_time(turns)])
    found: TokenAdvantages = estimate(rewards[order], flat[order], mask[order])
    ends = np.cumsum([len(sample.loss_mask) for sample in samples])[:-1]
    back = np.argsort(order)
    advantages = [row.astype(np.float32) for row in np.split(found.advantages[back], ends)]
    returns = [row.astype(np.float32) for row in np.split(found.returns[back], ends)]
    targets = [
        CriticTargets(values=np.asarray(value, np.float32), returns=row)
        for value, row in zip(values, returns, strict=True)
    ]
    return advantages, targets


def log_ratios(group: ReadyGroup) -> list[float]:
    """log(policy / reference) of all loss tokens of each episode, in nats, under the weights before the update."""
    payloads = _fetched(group.payloads)
    now, before = (_fetched(group.frozen[name]) for name in (PROXIMAL, REFERENCE))
    return [
        sum(
            float((new - old)[sample.loss_mask].sum(dtype=np.float64))
            for sample, new, old in zip(payload.samples, news, olds, strict=True)
        )
        for payload, news, olds in zip(payloads, now, before, strict=True)
    ]


def moments_of(samples: Sequence[TrainSample]) -> Moments:
    """Moments of the advantages of all loss tokens."""
    total = Moments(0.0, 0.0, 0.0)
    for sample in samples:
        mask = sample.sample.loss_mask
        total = total.plus(Moments.of(np.broadcast_to(sample.advantage, mask.shape), mask))
    return total


def whiten_all(samples: Sequence[TrainSample], moments: Moments) -> None:
    """Scale the advantages of all loss tokens of a step, on all ranks, to mean 0 and deviation 1."""
    for sample in samples:
        mask = sample.sample.loss_mask
        row = np.broadcast_to(sample.advantage, mask.shape)
        sample.advantage = whiten(row, mask, moments).astype(np.float32)


def _get(handles: Sequence[object], piece: BatchPiece) -> list[Any]:
    return _fetched([handles[index] for index in piece.episodes])


def _fetched(handles: Sequence[object]) -> list[Any]:
    import ray

    return ray.get(list(handles))  # type: ignore[arg-type]
