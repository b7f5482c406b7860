"""Learning from the tokens at which the policy chooses (arXiv:2506.01939): what it is sure of is left out."""

from torch import Tensor

from rlflow.algorithms.base import Traits, require_positive
from rlflow.algorithms.tokens import Tokens


@Traits(is_mask=True)
def low_entropy(tokens: Tokens, target: Tensor, *, threshold: float = 0.67) -> Tensor:
    """0 where the entropy of the token is below `threshold` nats, otherwise 1; [N].

    The paper trains on the fifth of a batch's tokens with the highest entropies. Which these are depends on all of the
    batch, so here a bound stands for the share: 0.67 nats, which is what the paper found for Qwen3-8B.
    `correction/rejected` says what share is left out.
    """
    require_positive("threshold", threshold)
    return (tokens.entropies.detach() >= threshold).to(target.dtype)
