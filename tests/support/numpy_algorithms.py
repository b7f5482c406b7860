"""The formulas of the algorithm library once more: loops over padded NumPy arrays, float64, nothing shared with it.

S sequences of up to L tokens; `mask` says which tokens have loss. A function that returns [S, L] leaves the rest 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class Padded(NamedTuple):
    logprobs: Array
    proximal: Array
    behaviour: Array
    target: Array
    reference: Array
    advantages: Array
    entropies: Array
    mask: NDArray[np.bool_]

    def places(self) -> Iterator[tuple[int, int]]:
        for i in range(self.mask.shape[0]):
            for t in range(self.mask.shape[1]):
                if self.mask[i, t]:
                    yield i, t

    def places_of(self, sequence: int) -> list[int]:
        return [t for t in range(self.mask.shape[1]) if self.mask[sequence, t]]


def random_padded(seed: int, num_sequences: int = 6, length: int = 9, drift: float = 0.7) -> Padded:
    """Ragged sequences with holes, at least one token each; one advantage a sequence, one of them 0."""
    rng = np.random.default_rng(seed)
    shape = (num_sequences, length)
    mask = rng.random(shape) < 0.6
    mask[:, 0] |= ~mask.any(axis=1)
    mask[-1] = False
    mask[-1, 3] = True
    logprobs = -rng.exponential(1.5, shape) - 0.01

    def near(policy: Array) -> Array:
        return np.minimum(policy + rng.normal(0.0, drift, shape), -0.005)

    advantages = rng.normal(0.0, 1.0, (num_sequences, 1))
    advantages[1] = 0.0
    return Padded(
        logprobs=logprobs,
        proximal=near(logprobs),
        behaviour=near(logprobs),
        target=near(logprobs),
        reference=near(logprobs),
        advantages=np.broadcast_to(advantages, shape).copy(),
        entropies=rng.exponential(1.0, shape),
        mask=mask,
    )


class LossOracle(NamedTuple):
    values: Array
    """[S, L]"""
    is_clipped: Array
    """[S, L], 0 or 1."""
    slopes: Array | None
    """[S, L], d loss / d logprob of the same token where a stop-gradient makes it differ from the differences of the
    values; None where it does not."""


def _each(p: Padded, of_token: Callable[[int, int], tuple[float, bool, float]]) -> LossOracle:
    values, clipped, slopes = np.zeros(p.mask.shape), np.zeros(p.mask.shape), np.zeros(p.mask.shape)
    for i, t in p.places():
        values[i, t], clipped[i, t], slopes[i, t] = of_token(i, t)
    return LossOracle(values, clipped, None if np.isnan(slopes).any() else slopes)


def _surrogate(ratio: float, advantage: float, low: float | None, high: float | None) -> tuple[float, bool]:
    bounded = ratio
    if low is not None and bounded < 1 - low:
        bounded = 1 - low
    if high is not None and bounded > 1 + high:
        bounded = 1 + high
    plain, clipped = -advantage * ratio, -advantage * bounded
    return (clipped, True) if clipped > plain else (plain, False)


def reinforce(p: Padded) -> LossOracle:
    return _each(p, lambda i, t: (-p.advantages[i, t] * p.logprobs[i, t], False, math.nan))


def ppo_clip(
    p: Padded, clip_low: float | None = 0.2, clip_high: float | None = 0.28, dual_clip: float | None = None
) -> LossOracle:
    def of_token(i: int, t: int) -> tuple[float, bool, float]:
        advantage = float(p.advantages[i, t])
        loss, clipped = _surrogate(math.exp(p.logprobs[i, t] - p.proximal[i, t]), advantage, clip_low, clip_high)
        if dual_clip is not None and advantage < 0 and loss > -advantage * dual_clip:
            return -advantage * dual_clip, True, math.nan
        return loss, clipped, math.nan

    return _each(p, of_token)


def gspo(p: Padded, clip_low: float | None = 3e-4, clip_high: float | None = 4e-4) -> LossOracle:
    def of_token(i: int, t: int) -> tuple[float, bool, float]:
        places = p.places_of(i)
        mean = sum(p.logprobs[i, u] - p.proximal[i, u] for u in places) / len(places)
        return *_surrogate(math.exp(mean), float(p.advantages[i, t]), clip_low, clip_high), math.nan

    return _each(p, of_token)


def gmpo(p: Padded, clip_low: float = 0.4, clip_high: float = 0.4) -> LossOracle:
    def bounded(i: int, t: int) -> tuple[float, bool]:
        difference = float(p.logprobs[i, t] - p.proximal[i, t])
        if p.advantages[i, t] > 0 and difference > clip_high:
            return clip_high, True
        if p.advantages[i, t] < 0 and difference < -clip_low:
            return -clip_low, True
        return difference, False

    def of_token(i: int, t: int) -> tuple[float, bool, float]:
        product = 1.0
        places = p.places_of(i)
        for u in places:
            product *= math.exp(bounded(i, u)[0])
        return -p.advantages[i, t] * product ** (1 / len(places)), bounded(i, t)[1], math.nan

    return _each(p, of_token)


def cispo(p: Padded, clip_low: float | None = None, clip_high: float | None = 5.0) -> LossOracle:
    def of_token(i: int, t: int) -> tuple[float, bool, float]:
        ratio = math.exp(p.logprobs[i, t] - p.proximal[i, t])
        if clip_high is not None:
            ratio = min(ratio, 1 + clip_high)
        if clip_low is not None:
            ratio = max(ratio, 1 - clip_low)
        return -ratio * p.advantages[i, t] * p.logprobs[i, t], False, -ratio * p.advantages[i, t]

    return _each(p, of_token)


def aipo(p: Padded, cap: float = 2.0) -> LossOracle:
    def of_token(i: int, t: int) -> tuple[float, bool, float]:
        weight = min(math.exp(p.logprobs[i, t]) / math.exp(p.behaviour[i, t]), cap)
        return -weight * p.advantages[i, t] * p.logprobs[i, t], False, -weight * p.advantages[i, t]

    return _each(p, of_token)


def sapo(p: Padded, temperature_positive: float = 1.0, temperature_negative: float = 1.05) -> LossOracle:
    def of_token(i: int, t: int) -> tuple[float, bool, float]:
        tau = temperature_positive if p.advantages[i, t] > 0 else temperature_negative
        ratio = math.exp(p.logprobs[i, t] - p.proximal[i, t])
        return -4 / tau / (1 + math.exp(-tau * (ratio - 1))) * p.advantages[i, t], False, math.nan

    return _each(p, of_token)


def _masked_score(p: Padded, i: int, t: int, cap: float, is_dropped: bool) -> tuple[float, bool, float]:
    weight = 0.0 if is_dropped else min(math.exp(p.logprobs[i, t] - p.behaviour[i, t]), cap)
    return -weight * p.advantages[i, t] * p.logprobs[i, t], is_dropped, -weight * p.advantages[i, t]


def dppo_tv(p: Padded, clip_low: float = 0.15, clip_high: float = 0.15, cap: float = 20.0) -> LossOracle:
    def of_token(i: int, t: int) -> tuple[float, bool, float]:
        moved = math.exp(p.logprobs[i, t]) - math.exp(p.behaviour[i, t])
        advantage = p.advantages[i, t]
        is_dropped = (advantage > 0 and moved > clip_high) or (advantage < 0 and moved < -clip_low)
        return _masked_score(p, i, t, cap, bool(is_dropped))

    return _each(p, of_token)


def dppo_kl(p: Padded, threshold: float = 0.05, cap: float = 20.0) -> LossOracle:
    def of_token(i: int, t: int) -> tuple[float, bool, float]:
        mu, pi = math.exp(p.behaviour[i, t]), math.exp(p.logprobs[i, t])
        divergence = mu * math.log(mu / pi) + (1 - mu) * math.log((1 - mu) / (1 - pi))
        advantage = p.advantages[i, t]
        goes_further = (advantage > 0 and pi > mu) or (advantage < 0 and pi < mu)
        return _masked_score(p, i, t, cap, bool(goes_further and divergence > threshold))

    return _each(p, of_token)


def vespo(
    p: Padded,
    power_positive: float = 2.0,
    decay_positive: float = 3.0,
    power_negative: float = 3.0,
    decay_negative: float = 2.0,
) -> LossOracle:
    def of_token(i: int, t: int) -> tuple[float, bool, float]:
        advantage = p.advantages[i, t]
        is_positive = advantage >= 0
        power = power_positive if is_positive else power_negative
        decay = decay_positive if is_positive else decay_negative
        w = math.prod(math.exp(p.logprobs[i, u] - p.behaviour[i, u]) for u in p.places_of(i))
        weight = w**power * math.exp(decay * (1 - w))
        return -weight * advantage * p.logprobs[i, t], False, -weight * advantage

    return _each(p, of_token)


def _token_ratio(p: Padded, i: int, t: int) -> float:
    return math.exp(p.target[i, t]) / math.exp(p.behaviour[i, t])


def _product(p: Padded, i: int) -> float:
    return math.prod(_token_ratio(p, i, t) for t in p.places_of(i))


def _geometric_mean(p: Padded, i: int) -> float:
    return _product(p, i) ** (1 / len(p.places_of(i)))


def _weights(p: Padded, of_token: Callable[[int, int], float]) -> Array:
    weights = np.zeros(p.mask.shape)
    for i, t in p.places():
        weights[i, t] = of_token(i, t)
    return weights


def tis(p: Padded, cap: float = 2.0) -> Array:
    return _weights(p, lambda i, t: min(_token_ratio(p, i, t), cap))


def tis_sequence(p: Padded, cap: float = 2.0) -> Array:
    return _weights(p, lambda i, t: min(_product(p, i), cap))


def tis_geometric(p: Padded, cap: float = 2.0) -> Array:
    return _weights(p, lambda i, t: min(_geometric_mean(p, i), cap))


def _inside(ratio: float, low: float, high: float) -> float:
    return ratio if low <= ratio <= high else 0.0


def mis(p: Padded, low: float = 0.5, high: float = 2.0) -> Array:
    return _weights(p, lambda i, t: _inside(_token_ratio(p, i, t), low, high))


def mis_sequence(p: Padded, low: float = 0.5, high: float = 2.0) -> Array:
    return _weights(p, lambda i, t: _inside(_product(p, i), low, high))


def icepop(p: Padded, low: float = 0.5, high: float = 5.0) -> Array:
    return _weights(p, lambda i, t: _inside(_token_ratio(p, i, t), low, high))


def geometric(p: Padded, low: float = 0.999, high: float = 1.001) -> Array:
    return _weights(p, lambda i, t: float(low <= _geometric_mean(p, i) <= high))


def veto(p: Padded, low: float = 1e-4) -> Array:
    return _weights(p, lambda i, t: float(min(_token_ratio(p, i, u) for u in p.places_of(i)) >= low))


def opsm(p: Padded, delta: float = 0.5) -> Array:
    def of_token(i: int, t: int) -> float:
        return float(not (p.advantages[i, t] < 0 and math.log(1 / _geometric_mean(p, i)) > delta))

    return _weights(p, of_token)


def divergence(p: Padded, threshold: float = 0.05, of: str = "mean", estimate: str = "k3") -> Array:
    def of_place(i: int, t: int) -> float:
        ratio = _token_ratio(p, i, t)
        return ratio - 1 - math.log(ratio) if estimate == "k3" else math.log(ratio) ** 2 / 2

    def of_token(i: int, t: int) -> float:
        values = [of_place(i, u) for u in ([t] if of == "token" else p.places_of(i))]
        return float({"sum": sum(values), "max": max(values)}.get(of, sum(values) / len(values)) <= threshold)

    return _weights(p, of_token)


def uncertain_negatives(p: Padded, threshold: float = 1.0, of: str = "token") -> Array:
    def of_token(i: int, t: int) -> float:
        entropy = p.entropies[i, t] if of == "token" else np.mean([p.entropies[i, s] for s in p.places_of(i)])
        return float(not (p.advantages[i, t] < 0 and entropy > threshold))

    return _weights(p, of_token)


def low_entropy(p: Padded, threshold: float = 0.67) -> Array:
    return _weights(p, lambda i, t: float(p.entropies[i, t] >= threshold))


LOSSES: dict[str, Callable[..., LossOracle]] = {
    function.__name__: function
    for function in (reinforce, ppo_clip, gspo, gmpo, cispo, aipo, sapo, dppo_tv, dppo_kl, vespo)
}
CORRECTIONS: dict[str, Callable[..., Array]] = {
    function.__name__: function
    for function in (
        tis,
        tis_sequence,
        tis_geometric,
        mis,
        mis_sequence,
        icepop,
        geometric,
        veto,
        opsm,
        divergence,
        uncertain_negatives,
        low_entropy,
    )
}
KL: dict[str, tuple[Callable[[float, float], float], Callable[[float, float], float]]] = {
    # name -> value and slope at (policy, reference) log-probabilities
    "k1": (lambda p, q: p - q, lambda p, q: 1.0),
    "k2": (lambda p, q: (p - q) ** 2 / 2, lambda p, q: p - q),
    "k3": (lambda p, q: math.exp(q) / math.exp(p) - (q - p) - 1, lambda p, q: 1 - math.exp(q) / math.exp(p)),
    "k3_straight_through": (lambda p, q: math.exp(q) / math.exp(p) - (q - p) - 1, lambda p, q: p - q),
}
