"""The output layer and the softmax in one: values, gradients and what is in memory at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rounding import allowed_difference
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlflow.workers.trainer.token_logprobs import LogitRule, TokenLogprobs

ROWS, VOCABULARY, HIDDEN = 13, 101, 24
ROW_OF = torch.arange(17) % ROWS  # four rows predict two tokens each
TARGETS = torch.arange(17) * 37 % VOCABULARY


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    hidden, weight = (torch.randn(rows, HIDDEN, dtype=torch.bfloat16) for rows in (ROWS, VOCABULARY))
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()


def by_definition(dtype: torch.dtype) -> list[Tensor]:
    """Log-probabilities, entropies, gradients of hidden states and weight."""
    hidden, weight = inputs(dtype)
    log_softmax = (hidden @ weight.T / 0.7).log_softmax(-1)[ROW_OF]
    logprobs = log_softmax.gather(1, TARGETS[:, None])[:, 0]
    entropies = -(log_softmax.exp() * log_softmax).sum(-1)
    return [logprobs, entropies, *gradients_of(logprobs, entropies, [hidden, weight], dtype)]


def gradients_of(logprobs: Tensor, entropies: Tensor, leaves: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Of log-probabilities, of entropies, and of both at once."""
    of_logprobs, of_entropies = (logprobs * weights(dtype)).sum(), (entropies * weights(dtype).flip(0)).sum()
    return [
        gradient
        for total in (of_logprobs, of_entropies, of_logprobs + of_entropies)
        for gradient in torch.autograd.grad(total, leaves, retain_graph=True)
    ]


def weights(dtype: torch.dtype) -> Tensor:
    return torch.linspace(-1, 2, len(TARGETS), dtype=dtype)


def fused(dtype: torch.dtype, max_logits: int, *, in_float32: bool = False) -> list[Tensor]:
    hidden, weight = inputs(dtype)
    rule = LogitRule(temperature=0.7, in_float32=in_float32)
    outputs: Any = TokenLogprobs.apply(hidden, weight, None, ROW_OF, TARGETS, rule, max_logits)
    logprobs, entropies = outputs
    gradients = gradients_of(logprobs, entropies, [hidden, weight], torch.float32)
    assert {gradient.dtype for gradient in gradients} == {dtype}
    return [logprobs, entropies, *gradients]


def differences(found: list[Tensor], wanted: list[Tensor]) -> list[float]:
    """Of each tensor, relative to its norm."""
    return [
        float((one.detach().double() - other.detach()).norm() / other.detach().norm())
        for one, other in zip(found, wanted, strict=True)
    ]


@pytest.mark.parametrize("max_logits", [1, 150, 404, 10_000], ids=["one", "a row", "four rows", "all"])
def test_values_and_gradients_are_those_of_the_definition(max_logits: int) -> None:
    wanted = by_definition(torch.float64)
    allowed = allowed_difference(differences(by_definition(torch.float32), wanted))
    assert max(differences(fused(torch.float32, max_logits), wanted)) <= allowed


@pytest.mark.parametrize("max_logits", [150, 10_000])
def test_bfloat16_rounds_logits_and_gradients_alone(max_logits: int) -> None:
    # The largest logits are near 20 and rounded to 8 bits; a softmax in bfloat16 would be off by several tenths.
    logprobs, entropies, *gradients = differences(fused(torch.bfloat16, max_logits), by_definition(torch.float64))
    assert max(logprobs, entropies) < 0.02
    of_entropies = gradients[2:4]  # products with small differences
    assert max(of_entropies) < 0.03
    assert max(gradients[:2] + gradients[4:]) < 0.02


@pytest.mark.parametrize("max_logits", [150, 10_000])
def test_a_float32_head_rounds_gradients_alone(max_logits: int) -> None:
    found = differences(fused(torch.bfloat16, max_logits, in_float32=True), by_definition(torch.float64))
    logprobs, entropies, *gradients = found
    assert max(logprobs, entropies) < 1e-6
    assert max(gradients) < 0.01


class Sizes(TorchDispatchMode):
    """The largest number of elements of a new float32 tensor."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            if isinstance(leaf, Tensor) and leaf.dtype == torch.float32:
                self.largest = max(self.largest, leaf.numel())
        return found


def test_nothing_in_float32_is_as_large_as_the_weight_or_all_logits() -> None:
    with Sizes() as sizes:
        fused(torch.bfloat16, max_logits=404)
    assert sizes.largest == max(404, ROWS * HIDDEN)
