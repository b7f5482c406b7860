"""The turns of an episode in the order of time, and what each of them earned. Pure."""

from collections.abc import Sequence

from rlflow.types import TurnSummary


def in_time(turns: Sequence[TurnSummary]) -> list[int]:
    """The indices of `turns`, the turn that was played first first.

    Example: places 0, 2 and 1, because two conversations took turns, give [0, 2, 1].
    """
    return sorted(range(len(turns)), key=lambda index: turns[index].place)


def earned(turns: Sequence[TurnSummary], reward: float) -> list[float]:
    """The reward of each turn, in the order of `turns`; they add up to `reward`, the episode's.

    A turn has what the environment gave for it, and the last one in time what is left besides: the whole verdict of a
    reward function, or the penalty for a long reply.
    """
    order = in_time(turns)
    rewards = [turn.reward for turn in turns]
    rewards[order[-1]] += reward - sum(rewards[index] for index in order)
    return rewards
