"""Losses, corrections and the rest of the tensor formulas, against values worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rlflow.algorithms.aggregation import Aggregation, Denominator, denominator, token_weights
from rlflow.algorithms.correction.divergence import divergence
from rlflow.algorithms.correction.geometric import geometric
from rlflow.algorithms.correction.icepop import icepop
from rlflow.algorithms.correction.mis import mis
from rlflow.algorithms.correction.mis_sequence import mis_sequence
from rlflow.algorithms.correction.opsm import opsm
from rlflow.algorithms.correction.tis import tis
from rlflow.algorithms.correction.tis_geometric import tis_geometric
from rlflow.algorithms.correction.tis_sequence import tis_sequence
from rlflow.algorithms.correction.uncertain_negatives import uncertain_negatives
from rlflow.algorithms.correction.veto import veto
from rlflow.algorithms.entropy import leaves_out_negatives, next_bonus, without_negatives
from rlflow.algorithms.kl.base import next_coefficient
from rlflow.algorithms.kl.k1 import k1
from rlflow.algorithms.kl.k2 import k2
from rlflow.algorithms.kl.k3 import k3
from rlflow.algorithms.kl.k3_straight_through import k3_straight_through
from rlflow.algorithms.loss.aipo import aipo
from rlflow.algorithms.loss.base import PolicyLoss
from rlflow.algorithms.loss.cispo import cispo
from rlflow.algorithms.loss.dppo_kl import dppo_kl
from rlflow.algorithms.loss.dppo_tv import dppo_tv
from rlflow.algorithms.loss.gmpo import gmpo
from rlflow.algorithms.loss.gspo import gspo
from rlflow.algorithms.loss.ppo_clip import ppo_clip
from rlflow.algorithms.loss.reinforce import reinforce
from rlflow.algorithms.loss.sapo import sapo
from rlflow.algorithms.loss.vespo import vespo
from rlflow.algorithms.overlong import overlong_penalty
from rlflow.algorithms.proximal import interpolate_proximal
from rlflow.algorithms.tokens import Tokens, no_tokens, sequence_mean, sequence_sum, spread
from rlflow.algorithms.value_loss import value_loss
from rlflow.errors import ConfigError


def make_tokens(
    logprobs: list[float],
    other: list[float],
    advantages: list[float],
    sequence_of: list[int] | None = None,
    entropies: list[float] | None = None,
) -> Tokens:
    """Tokens whose proximal and behaviour policy is `other`; by default each is a sequence of its own."""
    places = list(range(len(logprobs))) if sequence_of is None else sequence_of
    return Tokens(
        logprobs=torch.tensor(logprobs, requires_grad=True),
        proximal=torch.tensor(other),
        behaviour=torch.tensor(other),
        advantages=torch.tensor(advantages),
        entropies=torch.tensor(entropies or [0.0] * len(logprobs)),
        sequence_of=torch.tensor(places),
        num_sequences=max(places) + 1,
    )


def from_ratios(ratios: list[float], advantages: list[float], sequence_of: list[int] | None = None) -> Tokens:
    return make_tokens([math.log(ratio) for ratio in ratios], [0.0] * len(ratios), advantages, sequence_of)


def check(
    loss: PolicyLoss, tokens: Tokens, values: list[float], slopes: list[float], clipped: list[bool], **options: Any
) -> None:
    found, is_clipped = loss(tokens, **options)
    torch.testing.assert_close(found, torch.tensor(values))
    assert is_clipped.tolist() == clipped
    found.sum().backward()
    torch.testing.assert_close(tokens.logprobs.grad, torch.tensor(slopes))


def test_sums_and_means_over_sequences() -> None:
    tokens = make_tokens([0.0] * 3, [0.0] * 3, [1.0] * 3, [0, 0, 2])
    values = torch.tensor([1.0, 2.0, 5.0])
    assert tokens.lengths.tolist() == [2, 0, 1]
    assert sequence_sum(values, tokens).tolist() == [3.0, 0.0, 5.0]
    assert sequence_mean(values, tokens).tolist() == [1.5, 0.0, 5.0]
    assert spread(torch.tensor([7.0, 8.0, 9.0]), tokens).tolist() == [7.0, 7.0, 9.0]


def test_a_sum_over_a_long_sequence_keeps_its_small_parts() -> None:
    count = 1 << 20
    tokens = Tokens(
        logprobs=torch.zeros(count),
        proximal=torch.zeros(count),
        behaviour=torch.zeros(count),
        advantages=torch.zeros(count),
        entropies=torch.zeros(count),
        sequence_of=torch.zeros(count, dtype=torch.int64),
        num_sequences=1,
    )
    assert sequence_sum(torch.full((count,), 0.1), tokens).item() == pytest.approx(count * 0.1, rel=1e-7)


def test_reinforce() -> None:
    check(reinforce, make_tokens([-1.0, -2.0], [-5.0, -5.0], [2.0, -1.0]), [2.0, -2.0], [-2.0, 1.0], [False, False])


def test_ppo_clip_stops_the_gradient_only_where_the_step_would_go_further() -> None:
    tokens = from_ratios([1.0, 1.5, 1.5, 0.5, 0.5], [2.0, 1.0, -1.0, 1.0, -1.0])
    clipped = [False, True, False, False, True]
    check(ppo_clip, tokens, [-2.0, -1.28, 1.5, -0.5, 0.8], [-2.0, 0.0, 1.5, -0.5, 0.0], clipped)


def test_ppo_clip_without_clips_never_clips() -> None:
    check(ppo_clip, from_ratios([2.0], [3.0]), [-6.0], [-6.0], [False], clip_low=None, clip_high=None)


def test_dual_clip_bounds_the_loss_of_negative_tokens() -> None:
    tokens = from_ratios([5.0, 2.0, 5.0], [-1.0, -1.0, 1.0])
    check(ppo_clip, tokens, [3.0, 2.0, -1.28], [0.0, 2.0, 0.0], [True, False, True], dual_clip=3.0)


def test_ppo_clip_stays_finite_for_absurd_ratios() -> None:
    tokens = make_tokens([0.0, -500.0], [-500.0, 0.0], [-1.0, 1.0])
    check(ppo_clip, tokens, [math.exp(20), -math.exp(-20)], [0.0, 0.0], [False, False])


def test_gspo_takes_one_ratio_for_a_sequence() -> None:
    # log-ratios ln 2 and 0: the sequence's ratio is sqrt 2
    loose = {"clip_low": 0.5, "clip_high": 0.5}
    root = math.sqrt(2)
    tokens = from_ratios([2.0, 1.0, 0.9], [1.0, 1.0, -2.0], [0, 0, 1])
    check(gspo, tokens, [-root, -root, 1.8], [-root, -root, 1.8], [False] * 3, **loose)
    tokens = from_ratios([2.0, 1.0, 0.9], [1.0, 1.0, -2.0], [0, 0, 1])
    check(gspo, tokens, [-1.0004, -1.0004, 1.9994], [0.0, 0.0, 0.0], [True] * 3)


def test_gmpo_clips_tokens_and_averages_geometrically() -> None:
    tokens = make_tokens([1.0, 0.0, -1.0, 0.5], [0.0] * 4, [1.0, 1.0, -1.0, -1.0], [0, 0, 1, 1])
    first, second = math.exp(0.2), math.exp(0.05)
    check(
        gmpo,
        tokens,
        [-first, -first, second, second],
        [0.0, -first, 0.0, second],
        [True, False, True, False],
    )


def test_cispo_bounds_the_weight_and_keeps_the_gradient() -> None:
    tokens = make_tokens([-1.0, -1.0], [-1 - math.log(8), -1 + math.log(8)], [1.0, 1.0])
    check(cispo, tokens, [6.0, 0.125], [-6.0, -0.125], [False, False])


def test_aipo_weighs_by_the_behaviour_policy() -> None:
    tokens = make_tokens([-1.0, -1.0], [-1 - math.log(4), -1 + math.log(4)], [1.0, -1.0])
    check(aipo, tokens, [2.0, -0.25], [-2.0, 0.25], [False, False])


def test_sapo_has_the_plain_gradient_on_policy() -> None:
    tokens = from_ratios([1.0, 1.0], [1.0, -1.0])
    check(sapo, tokens, [-2.0, 2 / 1.05], [-1.0, 1.0], [False, False])


def test_vespo_weighs_a_sequence_most_where_it_has_moved_least() -> None:
    tokens = from_ratios([2.0, 0.25, 1.0], [1.0, 1.0, -1.0], [0, 0, 1])
    weight = 0.25 * math.exp(1.5)  # of w = 0.5, with power 2 and decay 3
    values = [-weight * math.log(2), -weight * math.log(0.25), 0.0]
    check(vespo, tokens, values, [-weight, -weight, 1.0], [False] * 3)


def test_vespo_stays_finite_for_absurd_ratios() -> None:
    found = vespo(make_tokens([-1.0, -1.0], [-500.0, 500.0], [1.0, 1.0])).loss
    torch.testing.assert_close(found, torch.tensor([0.0, 1e-16 * math.exp(3)]), rtol=1e-3, atol=0.0)


def test_dppo_tv_looks_at_how_far_the_probability_moved() -> None:
    tokens = make_tokens([math.log(0.5)] * 3, [math.log(0.3), math.log(0.3), math.log(0.4)], [1.0, -1.0, 1.0])
    values = [0.0, 5 / 3 * math.log(0.5), -1.25 * math.log(0.5)]
    check(dppo_tv, tokens, values, [0.0, 5 / 3, -1.25], [True, False, False])


def test_dppo_kl_looks_at_how_far_the_distribution_moved() -> None:
    # KL of 0.5 from 0.9 is 0.51 nats; of 0.5 from 0.52 it is 0.0008
    tokens = make_tokens([math.log(0.9), math.log(0.9), math.log(0.52)], [math.log(0.5)] * 3, [1.0, -1.0, 1.0])
    values = [0.0, 1.8 * math.log(0.9), -1.04 * math.log(0.52)]
    check(dppo_kl, tokens, values, [0.0, 1.8, -1.04], [True, False, False])


def test_dppo_kl_stays_finite_for_a_certain_token() -> None:
    check(dppo_kl, make_tokens([0.0], [0.0], [1.0]), [0.0], [-1.0], [False])


def test_value_loss_is_clipped_around_the_old_value() -> None:
    values = torch.tensor([1.0, 1.0, 0.6], requires_grad=True)
    found, is_clipped = value_loss(values, torch.full((3,), 0.5), torch.tensor([0.0, 2.0, 2.0]))
    torch.testing.assert_close(found, torch.tensor([0.5, 0.845, 0.98]))
    assert is_clipped.tolist() == [False, True, False]
    found.sum().backward()
    torch.testing.assert_close(values.grad, torch.tensor([1.0, 0.0, -1.4]))
    plain, _ = value_loss(values, torch.full((3,), 0.5), torch.tensor([0.0, 2.0, 2.0]), clip=None)
    torch.testing.assert_close(plain, torch.tensor([0.5, 0.5, 0.98]))


@pytest.mark.parametrize(
    ("correction", "options", "weights"),
    [
        (tis, {"cap": 3.0}, [2.0, 3.0, 0.5]),
        (tis_sequence, {"cap": 5.0}, [5.0, 5.0, 0.5]),
        (tis_geometric, {}, [2.0, 2.0, 0.5]),
        (tis_geometric, {"cap": 9.0}, [math.sqrt(8), math.sqrt(8), 0.5]),
        (mis, {"low": 0.4, "high": 3.0}, [2.0, 0.0, 0.5]),
        (mis_sequence, {"low": 0.4, "high": 3.0}, [0.0, 0.0, 0.5]),
        (icepop, {"low": 0.6}, [2.0, 4.0, 0.0]),
        (geometric, {"low": 0.4, "high": 2.0}, [0.0, 0.0, 1.0]),
        (veto, {"low": 0.6}, [1.0, 1.0, 0.0]),
        (opsm, {}, [1.0, 1.0, 0.0]),
        (divergence, {"threshold": 0.31}, [0.0, 0.0, 1.0]),  # k3: 0.307 and 1.614, 0.193
        (divergence, {"threshold": 0.31, "of": "token"}, [1.0, 0.0, 1.0]),
        (divergence, {"threshold": 1.62, "of": "max"}, [1.0, 1.0, 1.0]),
        (divergence, {"threshold": 1.9, "of": "sum"}, [0.0, 0.0, 1.0]),
        (divergence, {"threshold": 0.3, "of": "token", "estimate": "k2"}, [1.0, 0.0, 1.0]),  # 0.240, 0.961, 0.240
    ],
)
def test_corrections(correction: Any, options: dict[str, Any], weights: list[float]) -> None:
    # ratios 2 and 4 in one sequence, 0.5 in the other; the target is no policy of the loss
    tokens = make_tokens([-9.0] * 3, [0.0] * 3, [-1.0] * 3, [0, 0, 1])
    target = torch.tensor([2.0, 4.0, 0.5]).log().requires_grad_()
    found = correction(tokens, target, **options)
    torch.testing.assert_close(found, torch.tensor(weights))
    assert not found.requires_grad


def test_opsm_keeps_what_is_not_punished() -> None:
    tokens = make_tokens([0.0] * 2, [0.0] * 2, [1.0, -1.0])
    assert opsm(tokens, torch.tensor([-3.0, -3.0])).tolist() == [1.0, 0.0]


def test_a_correction_stays_finite_for_absurd_ratios() -> None:
    tokens = make_tokens([0.0] * 2, [-500.0, 500.0], [1.0, 1.0])
    torch.testing.assert_close(mis_sequence(tokens, torch.zeros(2), high=1e12), torch.tensor([math.exp(20), 0.0]))


def slopes_of(estimate: Any) -> tuple[Tensor, Tensor]:
    logprobs = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    kl = estimate(logprobs, torch.tensor([-1.0, -1.0 + math.log(2), -1.0 - math.log(2)]))
    kl.sum().backward()
    assert logprobs.grad is not None
    return kl.detach(), logprobs.grad


def test_estimates_of_the_kl() -> None:
    log2 = math.log(2)
    for estimate, values, slopes in [
        (k1, [0.0, -log2, log2], [1.0, 1.0, 1.0]),
        (k2, [0.0, log2**2 / 2, log2**2 / 2], [0.0, -log2, log2]),
        (k3, [0.0, 1 - log2, log2 - 0.5], [0.0, -1.0, 0.5]),
        (k3_straight_through, [0.0, 1 - log2, log2 - 0.5], [0.0, -log2, log2]),
    ]:
        found, gradient = slopes_of(estimate)
        torch.testing.assert_close(found, torch.tensor(values))
        torch.testing.assert_close(gradient, torch.tensor(slopes))


def test_k3_counts_ten_nats_at_most_and_has_no_gradient_beyond() -> None:
    logprobs = torch.tensor([-1.0, -5.0], requires_grad=True)
    kl = k3(logprobs, torch.tensor([-1.0, -1.0]))  # e^4 - 5 is 49.6
    kl.sum().backward()
    assert logprobs.grad is not None
    assert (kl.tolist(), logprobs.grad.tolist()) == ([0.0, 10.0], [0.0, 0.0])


@pytest.mark.parametrize(("kl", "coefficient"), [(0.2, 0.102), (0.105, 0.1005), (0.1, 0.1), (0.0, 0.098)])
def test_the_kl_coefficient_follows_the_target(kl: float, coefficient: float) -> None:
    assert next_coefficient(0.1, kl, target=0.1, steps=64, horizon=640) == pytest.approx(coefficient, rel=1e-12)


@pytest.mark.parametrize(
    ("aggregation", "weights", "divides_by"),
    [
        (Aggregation.token_mean, [1.0, 1.0, 1.0], Denominator.tokens),
        (Aggregation.seq_mean_token_mean, [0.5, 0.5, 1.0], Denominator.sequences),
        (Aggregation.seq_mean_token_sum, [1.0, 1.0, 1.0], Denominator.sequences),
        (Aggregation.seq_mean_token_sum_norm, [0.25, 0.25, 0.25], Denominator.sequences),
        (Aggregation.token_sum, [1.0, 1.0, 1.0], Denominator.nothing),
    ],
)
def test_aggregations(aggregation: Aggregation, weights: list[float], divides_by: Denominator) -> None:
    tokens = make_tokens([0.0] * 3, [0.0] * 3, [1.0] * 3, [0, 0, 1])
    assert token_weights(aggregation, tokens, max_length=4).tolist() == weights
    assert denominator(aggregation) is divides_by
    assert token_weights(aggregation, no_tokens(), max_length=4).tolist() == []


def test_a_bonus_for_entropy_grows_up_to_the_target_and_is_given_below_it_only() -> None:
    bonus, found = 0.004, []
    for entropy in [0.1, 0.2, 0.21, 0.5, 0.5, 0.5, 0.19]:
        bonus, is_given = next_bonus(bonus, entropy, target=0.2)
        found.append((round(bonus, 6), is_given))
    assert found == [
        (0.009, True), (0.014, True), (0.009, False), (0.004, False), (0.0, False), (0.0, False), (0.005, True),
    ]  # fmt: skip
    assert next_bonus(0.999, 0.1, target=0.2) == (1.0, True)
    with pytest.raises(ConfigError, match="entropy target must be above 0"):
        next_bonus(0.0, 0.1, target=0.0)


def test_negatives_are_left_out_from_high_entropy_until_low() -> None:
    state, states = False, []
    for entropy in [0.2, 0.31, 0.2, 0.1, 0.09, 0.2, 0.3]:
        state = leaves_out_negatives(state, entropy, low=0.1, high=0.3)
        states.append(state)
    assert states == [False, True, True, True, False, False, False]


def test_masks_of_negatives() -> None:
    tokens = make_tokens([0.0] * 4, [0.0] * 4, [-1.0, -1.0, 1.0, 0.0], [0, 0, 1, 2], [0.9, 0.2, 0.9, 0.9])
    assert without_negatives(tokens).tolist() == [0.0, 0.0, 1.0, 1.0]
    assert uncertain_negatives(tokens, tokens.logprobs, threshold=0.5).tolist() == [0.0, 1.0, 1.0, 1.0]
    by_sequence = uncertain_negatives(tokens, tokens.logprobs, threshold=0.5, of="sequence")
    assert by_sequence.tolist() == [0.0, 0.0, 1.0, 1.0]


@pytest.mark.parametrize(("length", "penalty"), [(1, 0.0), (16384, 0.0), (18432, -0.5), (20480, -1.0), (30000, -1.0)])
def test_the_overlong_penalty_sets_in_softly(length: int, penalty: float) -> None:
    assert overlong_penalty(length, max_length=20480, cache=4096) == penalty


def test_the_proximal_policy_lies_between_behaviour_and_current_policy() -> None:
    logprobs = torch.tensor([-1.0, -1.0, -1.0, -1.0], requires_grad=True)
    found = interpolate_proximal(logprobs, torch.full((4,), -3.0), torch.tensor([5, 4, 3, 1]), current_version=5)
    assert found.tolist() == [-3.0, -3.0, -2.0, -1.5]
    assert not found.requires_grad


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        (ppo_clip, {"clip_low": 0.0}, "clip_low must be above 0 and at most 1, or null for no clip; got 0.0"),
        (ppo_clip, {"clip_low": 1.5}, "clip_low must be above 0 and at most 1, or null for no clip; got 1.5"),
        (ppo_clip, {"clip_high": -0.1}, "clip_high must be above 0, or null for no clip; got -0.1"),
        (ppo_clip, {"dual_clip": 1.0}, "dual_clip must be above 1, or null for none; got 1.0"),
        (gspo, {"clip_low": -1.0}, "clip_low must be above 0 and at most 1, or null for no clip; got -1.0"),
        (gmpo, {"clip_low": 0.0}, "clip_low must be above 0 and finite; got 0.0"),
        (cispo, {"clip_high": 0.0}, "clip_high must be above 0, or null for no clip; got 0.0"),
        (aipo, {"cap": 0.0}, "cap must be above 0 and finite; got 0.0"),
        (sapo, {"temperature_negative": 0.0}, "temperature_negative must be above 0 and finite; got 0.0"),
        (vespo, {"decay_negative": 0.0}, "decay_negative must be above 0 and finite; got 0.0"),
        (dppo_tv, {"clip_high": 2.0}, "clip_high must be above 0 and at most 1; got 2.0"),
        (dppo_kl, {"threshold": 0.0}, "threshold must be above 0 and finite; got 0.0"),
    ],
)
def test_a_loss_refuses_options_out_of_range(function: Any, options: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        function(no_tokens(), **options)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (tis, {"cap": 0.0}),
        (tis_sequence, {"cap": math.inf}),
        (tis_geometric, {"cap": -1.0}),
        (mis, {"low": 1.2}),
        (mis_sequence, {"high": 0.9}),
        (icepop, {"low": -0.1}),
        (geometric, {"low": 1.0, "high": 1.0}),
        (veto, {"low": 1.0}),
        (opsm, {"delta": 0.0}),
        (divergence, {"threshold": 0.0}),
        (divergence, {"of": "sequence"}),
        (divergence, {"estimate": "k1"}),
    ],
)
def test_a_correction_refuses_options_out_of_range(function: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="must be"):
        function(no_tokens(), torch.zeros(0), **options)


def test_other_functions_refuse_options_out_of_range() -> None:
    tokens = no_tokens()
    with pytest.raises(ConfigError, match="clip must be above 0"):
        value_loss(torch.zeros(1), torch.zeros(1), torch.zeros(1), clip=0.0)
    with pytest.raises(ConfigError, match="entropy low must be at least 0 and below high, 0.1"):
        leaves_out_negatives(False, 0.2, low=0.2, high=0.1)
    with pytest.raises(ConfigError, match="threshold must be above 0"):
        uncertain_negatives(tokens, tokens.logprobs, threshold=0.0)
    with pytest.raises(ConfigError, match="cache must be from 1 to max_length, 10"):
        overlong_penalty(5, max_length=10, cache=11)
    with pytest.raises(ConfigError, match="max_length must be 1 or more"):
        token_weights(Aggregation.seq_mean_token_sum_norm, tokens, max_length=0)
    with pytest.raises(ConfigError, match="target must be above 0"):
        next_coefficient(0.1, 0.1, target=0.0, steps=1, horizon=10)
    with pytest.raises(ConfigError, match="horizon must be at least the steps of a batch, 20"):
        next_coefficient(0.1, 0.1, target=0.1, steps=20, horizon=10)
