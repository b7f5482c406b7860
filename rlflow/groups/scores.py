"""The figures of an evaluation. Pure.

    the episodes of each task -> a Score for all tasks and one for each kind, sampled and greedy -> one flat record

Rule: an episode without a verdict is counted as failed and is in no other figure.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rlflow.types import EpisodeSummary, Task

SOLVED = 1.0
"""A reward from which on an episode counts as passed."""
NORMAL_95 = 1.96
"""Standard errors to each side of a mean in its 95 % confidence interval."""
FIGURES = ("reward", "reward_low", "reward_high", "tasks", "episodes", "failed", "truncated")
"""Beside `pass_at_K`."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Score:
    """How well some tasks were done."""

    kind: str | None = None
    """`Task.kind`; None: all tasks."""
    is_greedy: bool = False
    """Whether every token was the likeliest, or tokens were sampled as in training."""
    reward: float | None = None
    """Mean over the episodes with a verdict; None when there is none."""
    error: float | None = None
    """Half of the 95 % confidence interval of `reward`; None with fewer than two tasks."""
    passes: Mapping[int, float] = field(default_factory=dict)
    """k -> pass@k, for powers of two: the chance that one of k episodes of a task passes, as a mean over the tasks with
    at least k verdicts."""
    num_tasks: int
    num_episodes: int = 0
    """Episodes with a verdict."""
    num_failed: int = 0
    """Episodes without one."""
    truncated: float | None = None
    """Share of the episodes with a verdict that were cut off."""

    def record(self) -> dict[str, float | int | None]:
        """Example: eval/reward, eval/greedy/reward, eval/kind/sums/reward."""
        group = "eval/" + ("greedy/" if self.is_greedy else "") + ("" if self.kind is None else f"kind/{self.kind}/")
        bounds = [None if self.reward is None or self.error is None else self.reward + s * self.error for s in (-1, 1)]
        values = (self.reward, *bounds, self.num_tasks, self.num_episodes, self.num_failed, self.truncated)
        named = dict(zip(FIGURES, values, strict=True)) | {f"pass_at_{k}": share for k, share in self.passes.items()}
        return {f"{group}{name}": value for name, value in named.items()}


def scores_of(tasks: Sequence[Task], played: Sequence[Sequence[EpisodeSummary]], *, is_greedy: bool) -> list[Score]:
    """The score of all tasks, then, with several kinds of tasks, one for each kind. `played`: each task's episodes."""
    kinds = sorted({task.kind for task in tasks})
    scores = [_score(played, None, is_greedy=is_greedy)]
    for kind in kinds if len(kinds) > 1 else ():
        of_kind = [episodes for task, episodes in zip(tasks, played, strict=True) if task.kind == kind]
        scores.append(_score(of_kind, kind, is_greedy=is_greedy))
    return scores


def _score(played: Sequence[Sequence[EpisodeSummary]], kind: str | None, *, is_greedy: bool) -> Score:
    judged = [[each for each in episodes if each.is_trainable] for episodes in played]
    rewards = [[each.reward for each in episodes if each.reward is not None] for episodes in judged]
    flat = [each for episodes in judged for each in episodes]
    most = max(map(len, rewards), default=0)
    mean = sum(map(sum, rewards)) / len(flat) if flat else None
    return Score(
        kind=kind,
        is_greedy=is_greedy,
        reward=mean,
        error=None if mean is None else _error(rewards, mean),
        passes={k: pass_at(k, rewards) for k in (1 << power for power in range(most.bit_length()))},
        num_tasks=len(played),
        num_episodes=len(flat),
        num_failed=sum(map(len, played)) - len(flat),
        truncated=sum(each.end.is_truncated for each in flat) / len(flat) if flat else None,
    )


def pass_at(k: int, rewards: Sequence[Sequence[float]]) -> float:
    """Unbiased pass@k from at least k rewards a task (Chen et al. 2021, arXiv:2107.03374). Tasks with fewer do not
    count; one task at least has enough.

    Example: pass_at(2, [[1.0, 0.0, 0.0]]) == 1 - C(2, 2) / C(3, 2) == 2 / 3
    """
    enough = [(len(each), sum(reward >= SOLVED for reward in each)) for each in rewards if len(each) >= k]
    return sum(1 - math.comb(n - passed, k) / math.comb(n, k) for n, passed in enough) / len(enough)


def _error(rewards: Sequence[Sequence[float]], mean: float) -> float | None:
    """Half of the 95 % confidence interval. Episodes of one task are alike, so that the standard error is clustered by
    task (Miller 2024, arXiv:2411.00640)."""
    sums = [sum(reward - mean for reward in each) for each in rewards if each]
    if len(sums) < 2:
        return None
    count = sum(map(len, rewards))
    return NORMAL_95 * math.sqrt(len(sums) / (len(sums) - 1) * sum(each**2 for each in sums)) / count
