"""Soft punishment of long completions (DAPO, arXiv:2503.14476)."""

from __future__ import annotations

from rlflow.algorithms.base import require


def overlong_penalty(length: int, *, max_length: int, cache: int) -> float:
    """What is added to the reward of a completion of `length` tokens, from 0 to -1.

    0 up to max_length - cache, then falling linearly to -1 at max_length, and -1 beyond it. The paper takes 20480 and
    4096.
    """
    require(0 < cache <= max_length, "cache", f"from 1 to max_length, {max_length}", cache)
    return -min(max(length - (max_length - cache), 0) / cache, 1.0)
