"""Every sequence of three tokens from a vocabulary of five, under tables of logits."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

VOCABULARY, LENGTH = 5, 3
CONTEXTS = [()] + [c for n in range(1, LENGTH) for c in itertools.product(range(VOCABULARY), repeat=n)]
SEQUENCES = list(itertools.product(range(VOCABULARY), repeat=LENGTH))


def random_logits(seed: int) -> Tensor:
    """A policy over every context: [contexts, vocabulary]."""
    return torch.randn(len(CONTEXTS), VOCABULARY, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def logprobs_of(logits: Tensor) -> Tensor:
    """Of each token of every sequence: [sequences, length]."""
    table = logits.log_softmax(-1)
    return torch.stack(
        [
            torch.stack([table[CONTEXTS.index(each[:place]), each[place]] for place in range(LENGTH)])
            for each in SEQUENCES
        ]
    )


def table_rows() -> Tensor:
    """The context of each token of every sequence, laid end to end: [sequences * length]."""
    return torch.tensor([CONTEXTS.index(each[:place]) for each in SEQUENCES for place in range(LENGTH)])


def exact_gradient(policy: Tensor, teacher: Tensor, *, is_forward: bool = False) -> Tensor:
    """Of KL(policy || teacher), or the other way round, at each context, times the probability of the context, which is
    taken as it is."""
    policy = policy.clone().requires_grad_()
    own, its = policy.log_softmax(-1), teacher.log_softmax(-1)
    reached = []
    for context in CONTEXTS:
        probability = torch.ones((), dtype=torch.float64)
        for place, token in enumerate(context):
            probability = probability * own[CONTEXTS.index(context[:place]), token].exp()
        reached.append(probability.detach())
    kl = its.exp() * (its - own) if is_forward else own.exp() * (own - its)
    (torch.stack(reached) * kl.sum(-1)).sum().backward()
    assert policy.grad is not None
    return policy.grad
