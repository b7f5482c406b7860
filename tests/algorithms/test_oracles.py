"""Every algorithm by name against an independent NumPy version, on random ragged inputs with holes.

`pytest tests/algorithms/test_oracles.py -s` prints the largest difference of each, relative to values above 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from numpy_advantages import ADVANTAGES, gae, random_groups
from numpy_algorithms import CORRECTIONS, KL, LOSSES, Array, Padded, random_padded
from torch import Tensor

from rlflow.algorithms.aggregation import Aggregation, token_weights
from rlflow.algorithms.registry import CATALOGS, Kind, resolve
from rlflow.algorithms.token_advantage.gae import gae as library_gae
from rlflow.algorithms.tokens import Tokens
from rlflow.plugins.options import bind

SEEDS = range(8)
DRIFTS = {"geometric": 0.01, "veto": 4.0, "divergence": 0.3}
"""How far the policies lie apart, where the usual distance would leave nothing to see."""
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "ppo_clip": [
        {"clip_low": 0.5},
        {"clip_low": None},
        {"clip_high": 0.6},
        {"clip_high": None},
        {"dual_clip": 1.2},
    ],
    "gspo": [{"clip_low": 0.1}, {"clip_low": None}, {"clip_high": 0.1}, {"clip_high": None}],
    "gmpo": [{"clip_low": 0.1}, {"clip_high": 0.1}],
    "cispo": [{"clip_low": 0.2}, {"clip_high": 0.5}, {"clip_high": None, "clip_low": 0.1}],
    "aipo": [{"cap": 1.1}],
    "sapo": [{"temperature_positive": 2.0}, {"temperature_negative": 0.5}],
    "dppo_tv": [{"clip_low": 0.05}, {"clip_high": 0.05}, {"cap": 0.9}],
    "dppo_kl": [{"threshold": 0.2}, {"cap": 0.9}],
    "vespo": [{"power_positive": 1.0}, {"decay_positive": 1.5}, {"power_negative": 1.0}, {"decay_negative": 0.5}],
    "tis": [{"cap": 1.1}],
    "tis_sequence": [{"cap": 1.1}],
    "tis_geometric": [{"cap": 1.1}],
    "mis": [{"low": 0.9}, {"high": 1.2}],
    "mis_sequence": [{"low": 0.05}, {"high": 9.0}],
    "icepop": [{"low": 0.9}, {"high": 1.2}],
    "geometric": [{"low": 0.99}, {"high": 1.01}],
    "veto": [{"low": 0.1}],
    "opsm": [{"delta": 0.01}],
    "divergence": [
        {"of": "token"},
        {"of": "sum", "threshold": 0.3},
        {"of": "max", "threshold": 0.1, "estimate": "k2"},
        {"estimate": "k2"},
    ],
    "low_entropy": [{"threshold": 1.5}],
    "uncertain_negatives": [{"threshold": 0.2}, {"of": "sequence"}],
    "passk": [{"normalise": True}],
    "gdpo": [{"weights": {"right": 1.0, "short": 0.1}}, {"weights": {"short": 1.0}}],
    "gigpo": [{"step_weight": 0.5}, {"discount": 0.5}, {"normalise": False}],
    "eapo": [{"discount": 0.5}],
    "dpo": [{"beta": 0.5}, {"label_smoothing": 0.2}],
    "ipo": [{"beta": 0.5}],
}


@pytest.fixture(scope="module")
def largest() -> Iterator[dict[str, float]]:
    """Name -> largest difference; printed at the end."""
    found: dict[str, float] = {}
    yield found
    print()
    for name, difference in found.items():
        print(f"{name:<34} {difference:.1e}")
    print(f"{'largest':<34} {max(found.values()):.1e}")


def cases(names: Mapping[str, object]) -> list[Any]:
    return [
        pytest.param(name, options, id=f"{name}-{'-'.join(f'{key}={value}' for key, value in options.items())}")
        for name in names
        for options in [{}, *OPTIONS.get(name, [])]
    ]


def compare(largest: dict[str, float], name: str, ours: np.ndarray, oracle: np.ndarray, tolerance: float) -> None:
    difference = float((np.abs(ours - oracle) / np.maximum(1.0, np.abs(oracle))).max())
    largest[name] = max(largest.get(name, 0.0), difference)
    assert difference < tolerance, f"{name} is off by {difference}"


def as_tokens(p: Padded, dtype: torch.dtype = torch.float64) -> tuple[Tokens, Tensor]:
    """The tokens with loss, and the target policy's log-probabilities."""

    def flat(values: Array) -> Tensor:
        return torch.from_numpy(values[p.mask]).to(dtype)

    tokens = Tokens(
        logprobs=flat(p.logprobs).requires_grad_(),
        proximal=flat(p.proximal),
        behaviour=flat(p.behaviour),
        advantages=flat(p.advantages),
        entropies=flat(p.entropies),
        sequence_of=torch.from_numpy(np.nonzero(p.mask)[0]),
        num_sequences=len(p.mask),
    )
    return tokens, flat(p.target)


def padded_for(name: str, seed: int) -> Padded:
    return random_padded(seed, drift=DRIFTS.get(name, 0.7))


def loss_of(name: str, options: Mapping[str, Any], tokens: Tokens) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Loss and clips of each token, and the gradient of the mean over sequences of the mean over tokens; all [N]."""
    loss, is_clipped = bind(resolve(Kind.loss, name).function, options, "loss_args", name)(tokens)
    weights = token_weights(Aggregation.seq_mean_token_mean, tokens, max_length=1)
    ((loss * weights).sum() / tokens.num_sequences).backward()
    assert tokens.logprobs.grad is not None
    return loss.detach().numpy(), is_clipped.numpy(), tokens.logprobs.grad.numpy()


def objective(name: str, options: Mapping[str, Any], p: Padded) -> float:
    values = LOSSES[name](p, **options).values
    return float(np.mean([values[i, p.places_of(i)].mean() for i in range(len(values))]))


def oracle_gradient(name: str, options: Mapping[str, Any], p: Padded) -> np.ndarray:
    """The slopes that the oracle states, or central differences of its objective; [S, L]."""
    slopes = LOSSES[name](p, **options).slopes
    if slopes is not None:
        return slopes / p.mask.sum(axis=1, keepdims=True) / len(slopes)
    gradient = np.zeros(p.mask.shape)
    for i, t in p.places():
        sides = []
        for step in (1e-6, -1e-6):
            moved = p.logprobs.copy()
            moved[i, t] += step
            sides.append(objective(name, options, p._replace(logprobs=moved)))
        gradient[i, t] = (sides[0] - sides[1]) / 2e-6
    return gradient


def test_every_name_has_an_oracle_and_every_option_a_case() -> None:
    assert set(CATALOGS[Kind.loss].shipped) == set(LOSSES)
    assert set(CATALOGS[Kind.correction].shipped) == set(CORRECTIONS)
    assert set(CATALOGS[Kind.kl].shipped) == set(KL)
    assert set(CATALOGS[Kind.advantage].shipped) == set(ADVANTAGES)
    for kind in set(Kind) - {Kind.token_advantage}:  # whose oracle has a test of its own
        for name in CATALOGS[kind].shipped:
            function = resolve(kind, name).function
            options = set(function.__kwdefaults__ or {})
            assert options == {key for case in OPTIONS.get(name, []) for key in case}


@pytest.mark.parametrize(("name", "options"), cases(LOSSES))
def test_loss(name: str, options: dict[str, Any], largest: dict[str, float]) -> None:
    for seed in SEEDS:
        p = padded_for(name, seed)
        oracle = LOSSES[name](p, **options)
        loss, is_clipped, gradient = loss_of(name, options, as_tokens(p)[0])
        compare(largest, f"loss/{name}", loss, oracle.values[p.mask], 1e-12)
        assert is_clipped.tolist() == oracle.is_clipped[p.mask].astype(bool).tolist()
        tolerance = 1e-12 if oracle.slopes is not None else 1e-8
        compare(largest, f"loss/{name} (gradient)", gradient, oracle_gradient(name, options, p)[p.mask], tolerance)


@pytest.mark.parametrize("name", LOSSES)
def test_loss_in_single_precision(name: str, largest: dict[str, float]) -> None:
    for seed in SEEDS:
        p = padded_for(name, seed)
        loss, _, _ = loss_of(name, {}, as_tokens(p, torch.float32)[0])
        assert loss.dtype == np.float32
        compare(largest, f"loss/{name} (float32)", loss, LOSSES[name](p).values[p.mask], 1e-5)


@pytest.mark.parametrize(("name", "options"), cases(CORRECTIONS))
def test_correction(name: str, options: dict[str, Any], largest: dict[str, float]) -> None:
    algorithm = resolve(Kind.correction, name)
    found: set[float] = set()
    for seed in SEEDS:
        p = padded_for(name, seed)
        tokens, target = as_tokens(p)
        weights = bind(algorithm.function, options, "correction_args", name)(tokens, target.requires_grad_())
        assert not weights.requires_grad
        compare(largest, f"correction/{name}", weights.numpy(), CORRECTIONS[name](p, **options)[p.mask], 1e-12)
        found.update(weights.tolist())
    assert (found == {0.0, 1.0}) == algorithm.traits.is_mask


@pytest.mark.parametrize("name", KL)
def test_kl(name: str, largest: dict[str, float]) -> None:
    value, slope = KL[name]
    for seed in SEEDS:
        p = padded_for(name, seed)
        logprobs = torch.from_numpy(p.logprobs[p.mask]).requires_grad_()
        estimate = resolve(Kind.kl, name).function(logprobs, torch.from_numpy(p.reference[p.mask]))
        estimate.sum().backward()
        pairs = list(zip(p.logprobs[p.mask].tolist(), p.reference[p.mask].tolist(), strict=True))
        compare(largest, f"kl/{name}", estimate.detach().numpy(), np.array([value(*pair) for pair in pairs]), 1e-12)
        assert logprobs.grad is not None
        expected = np.array([slope(*pair) for pair in pairs])
        compare(largest, f"kl/{name} (gradient)", logprobs.grad.numpy(), expected, 1e-12)


@pytest.mark.parametrize(("name", "options"), cases(ADVANTAGES))
def test_advantage(name: str, options: dict[str, Any], largest: dict[str, float]) -> None:
    algorithm = resolve(Kind.advantage, name)
    for seed in SEEDS:
        groups = random_groups(seed)
        ours = bind(algorithm.function, options, "advantage_args", name)(groups)
        oracle = ADVANTAGES[name](groups, **options)
        for group, found, expected in zip(groups, ours, oracle, strict=True):
            for episode, values, others in zip(group, found, expected, strict=True):
                assert len(values) == (len(episode.turns) if algorithm.traits.is_per_turn else 1)
                compare(largest, f"advantage/{name}", np.array(values), np.array(others), 1e-9)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_an_advantage_depends_on_other_groups_only_if_it_says_so(name: str) -> None:
    algorithm = resolve(Kind.advantage, name)
    groups = random_groups(3)
    alone = [algorithm.function([group])[0] for group in groups]
    assert (alone == algorithm.function(groups)) == (algorithm.traits.scope == "group")


@pytest.mark.parametrize(("discount", "trace"), [(1.0, 0.95), (0.9, 0.8), (1.0, 1.0), (0.5, 0.0)])
def test_gae(discount: float, trace: float, largest: dict[str, float]) -> None:
    for seed in SEEDS:
        rng = np.random.default_rng(seed)
        rewards, values, mask = rng.normal(size=17), rng.normal(size=17), rng.random(17) < 0.6
        ours = library_gae(rewards, values, mask, discount=discount, trace=trace)
        expected = gae(rewards, values, mask, discount, trace)
        compare(largest, "gae", np.stack(ours), np.stack(expected), 1e-12)


def outcome(kind: Kind, name: str, options: Mapping[str, Any]) -> list[Any]:
    """Everything that an algorithm gives for all seeds."""
    function = bind(resolve(kind, name).function, options, "args", name)
    if kind is Kind.advantage:
        return [function(random_groups(seed)) for seed in SEEDS]
    rows = [as_tokens(padded_for(name, seed)) for seed in SEEDS]
    if kind is Kind.correction:
        return [function(tokens, target).tolist() for tokens, target in rows]
    return [[part.tolist() for part in loss_of(name, options, tokens)] for tokens, _ in rows]


@pytest.mark.parametrize("name", OPTIONS)
def test_each_option_changes_the_result(name: str) -> None:
    kind = next(kind for kind in Kind if name in CATALOGS[kind].shipped)
    usual = outcome(kind, name, {})
    for options in OPTIONS[name]:
        assert outcome(kind, name, options) != usual, f"{name} ignores {options}"
