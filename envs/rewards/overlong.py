"""Soft punishment of long episodes, as a function beside others; `algorithm.overlong_tokens` does it for any reward."""

from rlflow.algorithms.overlong import overlong_penalty


def overlong(num_sampled: int, *, max_length: int, cache: int) -> float:
    """0 up to max_length - cache tokens of all replies, falling to -1 at max_length (DAPO, arXiv:2503.14476)."""
    return overlong_penalty(num_sampled, max_length=max_length, cache=cache)
