"""The output layer and the softmax in one: the logits of a whole row never exist at once.

Shape letters: R rows (states that predict), N loss tokens, V vocabulary, D hidden size.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

MAX_LOGITS = 2**26
"""Logits that exist at once (256 MiB in float32); more loss tokens go through the head in chunks."""


class TokenLogprobs(torch.autograd.Function):
    """log softmax(hidden weight^T / temperature)[row_of, targets], with at most `max_logits` logits in memory.

    If everything fits into one chunk, its probabilities are kept; otherwise backward computes each chunk again.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, row_of: Tensor, targets: Tensor, temperature: float, max_logits: int
    ) -> tuple[Tensor, Tensor]:
        chunk = max(1, max_logits // len(weight))
        logprobs = hidden.new_empty(len(targets), dtype=torch.float32)
        entropies = hidden.new_empty(len(hidden), dtype=torch.float32)
        probabilities = None
        for rows, tokens in _chunks(len(hidden), chunk, row_of):
            log_softmax = _log_softmax(hidden[rows], weight, temperature)
            logprobs[tokens] = log_softmax[row_of[tokens] - rows.start, targets[tokens]]
            probabilities = log_softmax.exp()
            entropies[rows] = -torch.linalg.vecdot(probabilities, log_softmax)
        ctx.save_for_backward(hidden, weight, row_of, targets, probabilities if len(hidden) <= chunk else None)
        ctx.temperature, ctx.chunk = temperature, chunk
        entropies = entropies[row_of]
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, row_of, targets, kept = ctx.saved_tensors
        scaled = gradients[0] / ctx.temperature
        hidden_gradient = torch.empty_like(hidden)
        weight_gradient = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for rows, tokens in _chunks(len(hidden), ctx.chunk, row_of):
            probabilities = _log_softmax(hidden[rows], weight, ctx.temperature).exp_() if kept is None else kept
            own_rows = row_of[tokens] - rows.start
            of_row = scaled.new_zeros(len(probabilities)).index_add_(0, own_rows, scaled[tokens])
            by_logit = probabilities * -of_row[:, None]
            by_logit.view(-1).index_add_(0, own_rows * len(weight) + targets[tokens], scaled[tokens])
            by_logit = by_logit.to(hidden.dtype)
            hidden_gradient[rows] = by_logit @ weight
            if weight_gradient is not None:
                weight_gradient += by_logit.T @ hidden[rows]
        whole = None if weight_gradient is None else weight_gradient.to(weight.dtype)
        return hidden_gradient, whole, None, None, None, None


def among_support(logprobs: Tensor, entropies: Tensor, support_of: Tensor) -> tuple[Tensor, Tensor]:
    """Normalise log-probabilities among the tokens that could have been sampled; top-p and top-k replayed.

    `logprobs` [N + K] and `entropies` [N + K] are of N loss tokens, then of K tokens of supports, of which number i
    belongs to loss token `support_of[i]`. Returns both [N]; a loss token without support keeps what it has.
    """
    own, kept = logprobs[: -len(support_of)], logprobs[-len(support_of) :]
    largest = own.new_zeros(len(own)).scatter_reduce_(0, support_of, kept.detach(), "amax", include_self=False)
    mass = torch.zeros_like(own).index_add(0, support_of, (kept - largest[support_of]).exp())
    has_support = mass.detach() > 0
    log_mass = torch.where(has_support, torch.where(has_support, mass, 1.0).log() + largest, 0.0)
    with torch.no_grad():
        among = kept - log_mass[support_of]
        by_support = torch.zeros_like(own).index_add_(0, support_of, -among.exp() * among)
    return own - log_mass, torch.where(has_support, by_support, entropies[: len(own)])


def _chunks(num_rows: int, chunk: int, row_of: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Runs of at most `chunk` rows, each with the tokens that belong to them."""
    for start in range(0, num_rows, chunk):
        yield slice(start, start + chunk), torch.nonzero((row_of >= start) & (row_of < start + chunk))[:, 0]


def _log_softmax(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    logits = F.linear(hidden, weight).float()
    if temperature != 1:
        logits = logits.div_(temperature)
    return logits.log_softmax(dim=-1)
