"""DeepResearcher's reward (arXiv:2504.03160): the overlap of words with the answer, -1 for a broken format."""

from __future__ import annotations

from rlflow.envs.rewards.search_f1 import search_f1 as score

__all__ = ["score"]
