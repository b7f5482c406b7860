"""The loss tokens of one packed row, and sums and means over the sequences that they belong to.

Shape letters: N loss tokens, S sequences. Tokens without loss (prompts, observations) are not here at all, so no
function needs a mask.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Beyond it a probability ratio is not a number to compute with; the gradient there is 0."""


@dataclass(kw_only=True, slots=True, frozen=True, eq=False)
class Tokens:
    """The loss tokens of one packed row, sequence after sequence; a sequence is never split over rows.

    Example: two sequences, of two and of one loss token: sequence_of [0 0 1], num_sequences 2.
    """

    logprobs: Tensor  # [N], current policy; the gradient flows through them
    proximal: Tensor  # [N], the policy that the ratio compares with; no gradient
    behaviour: Tensor  # [N], the policy that sampled the tokens; no gradient
    advantages: Tensor  # [N]
    entropies: Tensor  # [N], of the policy over what it samples from, in nats; the gradient flows through them too
    sequence_of: Tensor  # [N] int64, non-decreasing
    num_sequences: int

    @property
    def lengths(self) -> Tensor:
        """Loss tokens of each sequence, [S] int64."""
        return torch.bincount(self.sequence_of, minlength=self.num_sequences)


def clamp_log_ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def sequence_sum(values: Tensor, tokens: Tokens) -> Tensor:
    """Sum of `values` [N] over each sequence -> [S].

    Added up in float64, so that neither the length of a sequence nor, on a GPU, the order of the additions shows.
    """
    sums = torch.zeros(tokens.num_sequences, dtype=torch.float64, device=values.device)
    return sums.index_add(0, tokens.sequence_of, values.double()).to(values.dtype)


def sequence_mean(values: Tensor, tokens: Tokens) -> Tensor:
    """Mean of `values` [N] over each sequence -> [S]; 0 for a sequence without loss tokens."""
    return sequence_sum(values, tokens) / tokens.lengths.clamp(min=1)


def spread(per_sequence: Tensor, tokens: Tokens) -> Tensor:
    """A value of each sequence [S] -> the same value for each of its tokens [N]."""
    return per_sequence[tokens.sequence_of]


def no_tokens() -> Tokens:
    """A row without loss, as a rank with nothing to do has."""
    nothing = torch.zeros(0)
    return Tokens(
        logprobs=nothing,
        proximal=nothing,
        behaviour=nothing,
        advantages=nothing,
        entropies=nothing,
        sequence_of=torch.zeros(0, dtype=torch.int64),
        num_sequences=0,
    )
