"""The advantage estimators once more: NumPy and loops, nothing shared with the library.

Each takes groups of Scored and returns group -> episode -> [one value, or one a turn].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from rlflow.algorithms.advantage.base import Scored, ScoredTurn

Groups: TypeAlias = Sequence[Sequence[Scored]]
Nested: TypeAlias = list[list[list[float]]]
_KINDS = ("math", "code", "search")


def random_groups(seed: int, num_groups: int = 6) -> list[list[Scored]]:
    """Groups of 2 to 6 episodes; in the first all rewards are equal, and all are non-negative."""
    rng = np.random.default_rng(seed)
    groups = [[_episode(rng, _KINDS[g % 3]) for _ in range(rng.integers(2, 7))] for g in range(num_groups)]
    turn = ScoredTurn(anchor="start", reward=0.1, num_loss_tokens=3)
    parts = {"right": 0.1, "short": 0.7}
    same = Scored(reward=0.1, num_loss_tokens=5, rewards=parts, turns=[turn], baseline=0.1, log_ratio=0.4)
    return [[same, same, same], *groups]


def _episode(rng: np.random.Generator, kind: str) -> Scored:
    turns = [
        ScoredTurn(
            anchor=str(rng.choice(["start", "door", "key"])),
            reward=float(rng.random()),
            num_loss_tokens=int(rng.integers(1, 9)),
        )
        for _ in range(rng.integers(1, 5))
    ]
    right, short = float(rng.random() < 0.5), float(rng.random())
    return Scored(
        reward=right + 0.3 * short,
        num_loss_tokens=sum(turn.num_loss_tokens for turn in turns),
        rewards={"right": right, "short": short},
        task_kind=kind,
        turns=turns,
        baseline=float(rng.random()),
        log_ratio=float(rng.normal()),
    )


def _rewards(group: Sequence[Scored]) -> list[float]:
    return [episode.reward for episode in group]


def _map(groups: Groups, of_rewards: Callable[[np.ndarray], np.ndarray]) -> Nested:
    return [[[float(value)] for value in of_rewards(np.array(_rewards(group)))] for group in groups]


def _sample_deviation(values: Sequence[float]) -> float:
    mean = sum(values) / len(values)
    return (sum((value - mean) ** 2 for value in values) / (len(values) - 1)) ** 0.5 if len(values) > 1 else 0.0


def _score(values: np.ndarray) -> np.ndarray:
    return (values - values.mean()) / (_sample_deviation(list(values)) + 1e-6)


def grpo(groups: Groups) -> Nested:
    return _map(groups, _score)


def dr_grpo(groups: Groups) -> Nested:
    return _map(groups, lambda r: r - r.mean())


def rloo(groups: Groups) -> Nested:
    return _map(groups, lambda r: np.array([r[i] - np.delete(r, i).mean() for i in range(len(r))]))


def opo(groups: Groups) -> Nested:
    result: Nested = []
    for group in groups:
        numerator = denominator = 0.0
        for episode in group:
            numerator += episode.num_loss_tokens * episode.reward
            denominator += episode.num_loss_tokens
        result.append([[episode.reward - numerator / denominator] for episode in group])
    return result


def passk(groups: Groups, normalise: bool = False) -> Nested:
    def of_rewards(r: np.ndarray) -> np.ndarray:
        order = np.argsort(r)
        result = np.zeros(len(r))
        result[order[-1]] = r[order[-1]] - r[order[-2]]
        return result / (r.std(ddof=1) + 1e-6) if normalise else result

    return _map(groups, of_rewards)


def maxrl(groups: Groups) -> Nested:
    return _map(groups, lambda r: r / r.mean() - 1)


def _by_difference(groups: Groups, loss: Callable[[float], float]) -> Nested:
    """Minus the slope of a loss of the margin between the best and the worst, by central differences."""
    found = [[[0.0] for _ in group] for group in groups]
    for group, values in zip(groups, found, strict=True):
        rewards = np.array(_rewards(group))
        best, worst = int(rewards.argmax()), int(rewards.argmin())
        if best != worst:
            ratios = [episode.log_ratio or 0.0 for episode in group]
            margin = ratios[best] - ratios[worst]
            slope = (loss(margin + 1e-4) - loss(margin - 1e-4)) / 2e-4
            values[best], values[worst] = [-slope / len(groups)], [slope / len(groups)]
    return found


def dpo(groups: Groups, beta: float = 0.1, label_smoothing: float = 0.0) -> Nested:
    def loss(margin: float) -> float:
        right, wrong = (np.log1p(np.exp(-sign * beta * margin)) for sign in (1, -1))
        return float((1 - label_smoothing) * right + label_smoothing * wrong)

    return _by_difference(groups, loss)


def ipo(groups: Groups, beta: float = 0.1) -> Nested:
    return _by_difference(groups, lambda margin: (margin - 1 / (2 * beta)) ** 2)


def reward(groups: Groups) -> Nested:
    return [[[episode.reward] for episode in group] for group in groups]


def remax(groups: Groups) -> Nested:
    return [[[e.reward - (e.baseline if e.baseline is not None else np.nan)] for e in group] for group in groups]


def gdpo(groups: Groups, weights: Mapping[str, float] | None = None) -> Nested:
    names = dict.fromkeys(groups[0][0].rewards, 1.0) if weights is None else weights
    sums = []
    for group in groups:
        total = np.zeros(len(group))
        for name, weight in names.items():
            total += weight * _score(np.array([episode.rewards[name] for episode in group]))
        sums.append(total)
    everything = np.concatenate(sums)
    scale = everything.std(ddof=1) + 1e-6
    return [[[float((value - everything.mean()) / scale)] for value in total] for total in sums]


def _whiten_over_tokens(values: list[np.ndarray], groups: Groups) -> list[np.ndarray]:
    tokens = [
        value
        for total, group in zip(values, groups, strict=True)
        for value, episode in zip(total, group, strict=True)
        for _ in range(episode.num_loss_tokens)
    ]
    return [(total - np.mean(tokens)) / np.sqrt(np.var(tokens) + 1e-8) for total in values]


def reinforce_pp(groups: Groups) -> Nested:
    whitened = _whiten_over_tokens([np.array(_rewards(group)) for group in groups], groups)
    return [[[float(value)] for value in group] for group in whitened]


def reinforce_pp_baseline(groups: Groups) -> Nested:
    centred = [np.array(_rewards(group)) - np.mean(_rewards(group)) for group in groups]
    whitened = _whiten_over_tokens(centred, groups)
    return [
        [[float(value) if len(set(_rewards(group))) > 1 else 0.0] for value in values]
        for values, group in zip(whitened, groups, strict=True)
    ]


def grpo_batch_std(groups: Groups) -> Nested:
    scale = np.std([reward for group in groups for reward in _rewards(group)], ddof=1)
    return _map(groups, lambda r: (r - r.mean()) / (scale + 1e-6))


def grpo_task_std(groups: Groups) -> Nested:
    result: Nested = []
    for group in groups:
        mean = np.mean(_rewards(group))
        kinds = [[e.reward for g in groups for e in g if e.task_kind == episode.task_kind] for episode in group]
        result.append(
            [[float(e.reward - mean) / (_sample_deviation(kind) + 1e-6)] for e, kind in zip(group, kinds, strict=True)]
        )
    return result


def gigpo(groups: Groups, step_weight: float = 1.0, discount: float = 0.95, normalise: bool = True) -> Nested:
    def compare(value: float, others: Sequence[float]) -> float:
        scale = _sample_deviation(others) + 1e-6 if normalise else 1.0
        return (value - sum(others) / len(others)) / scale

    result: Nested = []
    for group in groups:
        steps = [
            (e, t, turn.anchor, sum(discount**k * later.reward for k, later in enumerate(episode.turns[t:])))
            for e, episode in enumerate(group)
            for t, turn in enumerate(episode.turns)
        ]
        rows = [[compare(episode.reward, _rewards(group))] * len(episode.turns) for episode in group]
        for e, t, anchor, value in steps:
            rows[e][t] += step_weight * compare(value, [other[3] for other in steps if other[2] == anchor])
        result.append(rows)
    return result


def eapo(groups: Groups, discount: float = 0.95) -> Nested:
    result: Nested = []
    for group in groups:
        rows = [[e.reward * discount ** (len(e.turns) - 1 - t) for t in range(len(e.turns))] for e in group]
        everything = [value for row in rows for value in row]
        mean, scale = np.mean(everything), _sample_deviation(everything) + 1e-6
        result.append([[float((value - mean) / scale) for value in row] for row in rows])
    return result


ADVANTAGES: dict[str, Callable[..., Nested]] = {
    function.__name__: function
    for function in (
        grpo,
        dr_grpo,
        rloo,
        opo,
        passk,
        maxrl,
        remax,
        gdpo,
        reinforce_pp,
        reinforce_pp_baseline,
        grpo_batch_std,
        grpo_task_std,
        gigpo,
        eapo,
        dpo,
        ipo,
        reward,
    )
}


def gae(
    rewards: np.ndarray, values: np.ndarray, mask: np.ndarray, discount: float, trace: float
) -> tuple[np.ndarray, np.ndarray]:
    """A_t as the sum over l of (discount * trace)^l * delta_{t+l}, over the tokens with loss."""
    places = [t for t in range(len(mask)) if mask[t]]
    advantages, returns = np.zeros(len(mask)), np.zeros(len(mask))
    for start, place in enumerate(places):
        for distance, token in enumerate(places[start:]):
            position = start + distance
            following = values[places[position + 1]] if position + 1 < len(places) else 0.0
            delta = rewards[token] + discount * following - values[token]
            advantages[place] += (discount * trace) ** distance * delta
        returns[place] = advantages[place] + values[place]
    return advantages, returns
