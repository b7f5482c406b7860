"""Group sequence policy optimisation (GSPO, arXiv:2507.18071): one ratio for the whole sequence."""

from rlflow.algorithms.loss.base import TokenLoss, check_clips, clipped_surrogate
from rlflow.algorithms.tokens import Tokens, clamp_log_ratio, sequence_mean, spread


def gspo(tokens: Tokens, *, clip_low: float | None = 3e-4, clip_high: float | None = 4e-4) -> TokenLoss:
    """max(-A s, -A clip(s, 1 - clip_low, 1 + clip_high)), s = exp(mean over the sequence of log(policy / proximal)).

    Each token has the loss of its sequence, and the gradient of s through its own log-probability alone: averaged over
    the tokens of a sequence (`seq_mean_token_mean`) value and gradient are the paper's. Other aggregations weigh
    sequences by their length. Where the tokens of a sequence differ in advantage this is the paper's GSPO-token.
    """
    check_clips(clip_low, clip_high)
    log_ratio = clamp_log_ratio(tokens.logprobs.detach() - tokens.proximal)
    sequence_ratio = spread(sequence_mean(log_ratio, tokens), tokens).exp()
    ratio = sequence_ratio * (tokens.logprobs - tokens.logprobs.detach()).exp()
    loss, is_clipped = clipped_surrogate(ratio, tokens.advantages, clip_low, clip_high)
    return TokenLoss(loss=loss, is_clipped=is_clipped)
