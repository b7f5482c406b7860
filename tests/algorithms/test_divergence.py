"""The KL over a teacher's likeliest tokens: against NumPy, and its gradient against a full enumeration."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from enumeration import LENGTH, VOCABULARY, exact_gradient, logprobs_of, random_logits, table_rows
from torch import Tensor

from rlflow.algorithms.divergence import divergence


def bucketed_kl(p: np.ndarray, q: np.ndarray, listed: np.ndarray) -> float:
    """KL of two distributions in which the tokens that are not listed are one."""
    p, q = (np.append(each[listed], each.sum() - each[listed].sum()) for each in (p, q))
    kept = p > 1e-14
    return float((p[kept] * np.log(p[kept] / q[kept])).sum())


def likely_of(its: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """ids and rows [K] of the `k` largest of each row."""
    ids = its.topk(k, dim=-1).indices
    return ids.flatten(), torch.arange(len(its)).repeat_interleave(k)


@pytest.mark.parametrize("is_forward", [False, True])
@pytest.mark.parametrize("k", [1, 2, 4, 5])
def test_it_is_the_kl_of_the_likeliest_tokens_and_a_bucket(k: int, is_forward: bool) -> None:
    own, its = (random_logits(seed).log_softmax(-1) for seed in (1, 2))
    ids, of = likely_of(its, k)
    found = divergence(own[of, ids], its[of, ids], of, len(its), is_forward=is_forward)
    for row, value in enumerate(found.tolist()):
        p, q = (each[row].exp().numpy() for each in ((its, own) if is_forward else (own, its)))
        assert value == pytest.approx(bucketed_kl(p, q, ids[of == row].numpy()), abs=1e-12)


def test_tokens_may_have_lists_of_different_lengths() -> None:
    """0.5 and 0.25 listed of the first token, nothing of the second."""
    own, its = torch.tensor([0.5, 0.25]).log(), torch.tensor([0.25, 0.5]).log()
    found = divergence(own, its, torch.tensor([0, 0]), 2, is_forward=False)
    assert found.tolist() == pytest.approx([0.25 * np.log(2), 0.0], abs=1e-6)
    assert divergence(own[:0], its[:0], torch.zeros(0, dtype=torch.int64), 0, is_forward=True).shape == (0,)


@pytest.mark.parametrize("is_forward", [False, True])
def test_the_gradient_over_the_whole_vocabulary_is_exact(is_forward: bool) -> None:
    """Over all 125 sequences, each with its probability, as if it had been sampled so often."""
    policy, teacher = random_logits(1).requires_grad_(), random_logits(2)
    rows = table_rows()
    own, its = policy.log_softmax(-1), teacher.log_softmax(-1)
    ids, of = likely_of(its[rows], VOCABULARY)
    found = divergence(own[rows[of], ids], its[rows[of], ids], of, len(rows), is_forward=is_forward)
    sampled = logprobs_of(policy.detach()).sum(1).exp().repeat_interleave(LENGTH)
    (sampled * found).sum().backward()
    expected = exact_gradient(policy.detach(), teacher, is_forward=is_forward)
    assert policy.grad is not None and expected.abs().max() > 0.1
    assert (policy.grad - expected).abs().max() < 1e-6


@pytest.mark.parametrize("is_forward", [False, True])
def test_the_gradient_of_a_part_is_that_of_finite_differences(is_forward: bool) -> None:
    policy, its = random_logits(1), random_logits(2).log_softmax(-1)
    ids, of = likely_of(its, 2)

    def compute(logits: Tensor) -> Tensor:
        own = logits.log_softmax(-1)
        return divergence(own[of, ids], its[of, ids], of, len(its), is_forward=is_forward)

    assert torch.autograd.gradcheck(compute, policy.requires_grad_())
