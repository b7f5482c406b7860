"""The output layer and the softmax in one: the logits of a whole row never exist at once.

    forward    some rows at a time, over the whole vocabulary: the softmax's denominator of each row is kept
    backward   some columns at a time, over all rows: each column's weight gradient is computed once, and is final

Shape letters: R rows (states that predict), N loss tokens, V vocabulary, D hidden size.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import PreTrainedConfig


@dataclass(kw_only=True, slots=True, frozen=True)
class LogitRule:
    """How products of states and output embeddings become logits: cap * tanh(scale * product / cap) / temperature."""

    temperature: float = 1.0
    scale: float = 1.0
    cap: float | None = None
    """None leaves the values as they are."""
    in_float32: bool = False
    """Products are not rounded to the dtype of states and embeddings."""
    forbidden: int | None = None
    """A token that is never sampled."""


FORBIDDEN = -1e4
"""The logit of a token that is never sampled: its probability is 0 in float32, and products with it stay finite."""


def logit_rule(config: PreTrainedConfig, temperature: float, *, in_float32: bool = False) -> LogitRule:
    """The rule of this model, by the names that families have for it, and the run's temperature."""
    text = config.get_text_config()
    scale = math.prod(getattr(text, name, None) or 1.0 for name in ("logit_scale", "lm_head_multiplier"))
    scale /= getattr(text, "logits_scaling", None) or 1.0
    cap = getattr(text, "final_logit_softcapping", None) or getattr(text, "logits_soft_cap", None)
    return LogitRule(temperature=temperature, scale=scale, cap=cap, in_float32=in_float32)


MAX_LOGITS = 2**26
"""Logits that exist at once (256 MiB in float32); with more, rows or columns go through the head in chunks."""


class TokenLogprobs(torch.autograd.Function):
    """log softmax(logits)[row_of, targets], with at most `max_logits` logits in memory; see `LogitRule`.

    Returns log-probabilities [N] and entropies [N], float32. If everything fits into one chunk, its probabilities are
    kept; otherwise backward computes each chunk again. The gradient of entropies costs nothing where none is asked for.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        row_of: Tensor,
        targets: Tensor,
        rule: LogitRule,
        max_logits: int,
    ) -> tuple[Tensor, Tensor]:
        logprobs = hidden.new_empty(len(targets), dtype=torch.float32)
        entropies, denominators = hidden.new_empty(2, len(hidden), dtype=torch.float32)
        kept = None
        for rows, tokens in _chunks(len(hidden), max_logits // len(weight), row_of):
            logits = _logits(hidden[rows], weight, bias, rule)
            denominators[rows] = logits.logsumexp(dim=-1)
            log_softmax = logits.sub_(denominators[rows, None])
            logprobs[tokens] = log_softmax[row_of[tokens] - rows.start, targets[tokens]]
            probabilities = log_softmax.exp()
            entropies[rows] = -torch.linalg.vecdot(probabilities, log_softmax)
            kept = probabilities if len(probabilities) == len(hidden) and rule.cap is None else None
        ctx.save_for_backward(hidden, weight, bias, row_of, targets, denominators, entropies, kept)
        ctx.rule, ctx.max_logits = rule, max_logits
        ctx.set_materialize_grads(False)
        return logprobs, entropies[row_of]

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, row_of, targets, denominators, entropies, kept = ctx.saved_tensors
        rule: LogitRule = ctx.rule
        of_logprobs, of_entropies = gradients
        if of_logprobs is None:
            scaled = torch.zeros_like(targets, dtype=torch.float32)
        else:
            scaled = of_logprobs / rule.temperature
        of_row = scaled.new_zeros(len(hidden)).index_add_(0, row_of, scaled)
        entropy_of_row = None
        if of_entropies is not None:
            entropy_of_row = torch.zeros_like(of_row).index_add_(0, row_of, of_entropies / rule.temperature)
        hidden_gradient = torch.zeros_like(hidden, dtype=torch.float32)
        weight_gradient = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        bias_gradient = torch.empty_like(bias) if bias is not None and ctx.needs_input_grad[2] else None
        width = len(weight) if kept is not None else ctx.max_logits // max(1, len(hidden))
        for columns, tokens in _chunks(len(weight), width, targets):
            by_logit, slopes = kept, None
            if by_logit is None:
                by_logit = _logits(
                    hidden, weight[columns], None if bias is None else bias[columns], rule, columns.start
                )
                if rule.cap is not None:
                    slopes = 1 - (by_logit * (rule.temperature / rule.cap)).square_()
                by_logit = by_logit.sub_(denominators[:, None]).exp_()
            curved = None
            if entropy_of_row is not None:  # of p (-log p - entropy), by which a logit changes its row's entropy
                curved = torch.special.entr(by_logit).sub_(by_logit * entropies[:, None])
                curved *= entropy_of_row[:, None]
            by_logit = by_logit * -of_row[:, None] if kept is not None else by_logit.mul_(-of_row[:, None])
            if curved is not None:
                by_logit += curved
            cells = row_of[tokens] * by_logit.shape[1] + targets[tokens] - columns.start
            by_logit.view(-1).index_add_(0, cells, scaled[tokens])
            if slopes is not None:
                by_logit *= slopes
            if bias_gradient is not None:
                bias_gradient[columns] = by_logit.sum(0)
            if rule.scale != 1:
                by_logit *= rule.scale
            by_logit = by_logit.to(hidden.dtype)
            hidden_gradient += by_logit @ weight[columns]
            if weight_gradient is not None:
                torch.mm(by_logit.T, hidden, out=weight_gradient[columns])
        return hidden_gradient.to(hidden.dtype), weight_gradient, bias_gradient, None, None, None, None


@torch.no_grad()
def likeliest(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, rule: LogitRule, max_logits: int, k: int, num_ids: int
) -> tuple[Tensor, Tensor]:
    """The `k` likeliest of the first `num_ids` tokens for each row, the likeliest first, and their log-probabilities
    among all tokens; both [R, k]. At most `max_logits` logits are in memory."""
    ids = torch.empty(len(hidden), k, dtype=torch.int64, device=hidden.device)
    logprobs = hidden.new_empty(len(hidden), k, dtype=torch.float32)
    size = max(1, max_logits // len(weight))
    for start in range(0, len(hidden), size):
        rows = slice(start, start + size)
        logits = _logits(hidden[rows], weight, bias, rule)
        values, ids[rows] = logits[:, :num_ids].topk(k, dim=-1)
        logprobs[rows] = values - logits.logsumexp(dim=-1, keepdim=True)
    return ids, logprobs


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
    among = kept - log_mass[support_of]
    by_support = torch.zeros_like(own).index_add(0, support_of, -among.exp() * among)
    return own - log_mass, torch.where(has_support, by_support, entropies[: len(own)])


def _chunks(length: int, size: int, place_of: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Runs of at most `size` (at least one) of `length` places, each with the tokens whose place is among them."""
    size = max(1, size)
    ordered, tokens = torch.sort(place_of, stable=True)
    starts = range(0, length, size)
    edges = torch.searchsorted(ordered, torch.tensor([*starts, length], device=place_of.device)).tolist()
    for start, first, last in zip(starts, edges, edges[1:], strict=False):
        yield slice(start, min(start + size, length)), tokens[first:last]


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, rule: LogitRule, first: int = 0) -> Tensor:
    """[R, V] in float32, not shared with anything; of the tokens from `first` on."""
    if not rule.in_float32:
        logits = F.linear(hidden, weight).float()
    elif hidden.is_cuda and hidden.dtype != torch.float32:  # which adds up in float32 anyway
        logits = torch.mm(hidden, weight.T, out_dtype=torch.float32)
    else:
        logits = F.linear(hidden.float(), weight.float())
    if rule.scale != 1:
        logits *= rule.scale
    if bias is not None:
        logits += bias
    if rule.cap is not None:
        logits.div_(rule.cap).tanh_().mul_(rule.cap)
    if rule.temperature != 1:
        logits.div_(rule.temperature)
    if rule.forbidden is not None and first <= rule.forbidden < first + len(weight):
        logits[:, rule.forbidden - first] = FORBIDDEN
    return logits
