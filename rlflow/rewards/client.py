"""Picks the reward process for each episode: the one with the fewest open requests.

If that process dies, the request is retried elsewhere, at most 3 times, because the reply itself may be what kills it;
then there is no verdict, as when scoring fails otherwise. A process that died gets nothing until it is back. When none
is there, that says nothing about the reply: the group fails, and is played again.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Protocol

from rlflow.errors import RewardLost
from rlflow.rewards.call import ChosenReward, added, combine, environment_verdict
from rlflow.runtime.concurrency import all_or_none
from rlflow.runtime.deadlines import within
from rlflow.types import EpisodeEnd, Transcript, Verdict

MAX_ASKED = 3
"""Processes that one reply may outlive."""


class Scorer(Protocol):
    """What an episode runner needs of rewards."""

    async def score(self, transcript: Transcript) -> Verdict: ...

    async def score_group(self, transcripts: Sequence[Transcript]) -> list[Verdict]:
        """What the functions say that see a whole group, of a group with a verdict that `awaits_group`."""
        raise AssertionError("no verdict awaits the group")


async def with_group(scorer: Scorer, episodes: Sequence[tuple[Transcript, Verdict]]) -> list[Verdict]:
    """The verdicts on a group's episodes, complete with what functions say that see all of it, if there are any.

    They see every episode that was played to its end, also those that another function failed on.
    """
    parts = [part for _, part in episodes]
    if not any(part.awaits_group for part in parts):
        return parts
    said = await scorer.score_group([transcript for transcript, _ in episodes])
    return [added([part, group]) for part, group in zip(parts, said, strict=True)]


class EnvironmentScorer(Scorer):
    """Implements Scorer for runs in which only what the environment gave counts; that takes no process."""

    def __init__(self, reward: ChosenReward, *, is_needed: bool = True) -> None:
        """`is_needed`: whether an episode that was completed without a reward has failed."""
        self._reward = reward
        self._is_needed = is_needed

    async def score(self, transcript: Transcript) -> Verdict:
        has_none = transcript.environment_reward is None and not transcript.end.is_truncated
        if has_none and not self._is_needed:
            return _unscored(transcript)
        return combine([self._reward], [environment_verdict(transcript)])


class NoScorer(Scorer):
    """Implements Scorer for runs in which nothing gives a reward, because a teacher alone decides."""

    async def score(self, transcript: Transcript) -> Verdict:
        return _unscored(transcript)


def _unscored(transcript: Transcript) -> Verdict:
    return Verdict(reward=None, end=transcript.end)


class ModelScorer(Scorer):
    """Implements Scorer for reward models with weights, beside functions if there are any."""

    def __init__(self, models: Sequence[tuple[ChosenReward, Scorer]], functions: Scorer | None) -> None:
        """Each of `models` with the weight of its score, and with the processes that hold it."""
        self._models = models
        self._functions = functions

    async def score(self, transcript: Transcript) -> Verdict:
        """The weighted sum; if one of them fails, there is none."""
        scorers = [scorer for _, scorer in self._models] + ([self._functions] if self._functions else [])
        said = await all_or_none([scorer.score(transcript) for scorer in scorers])
        parts = [combine([one], [verdict]) for (one, _), verdict in zip(self._models, said, strict=False)]
        # Of an episode without a reward where none is needed, which is no failure beside the score of a model.
        by_functions = [
            replace(each, end=EpisodeEnd.NO_VERDICT) if each.end is transcript.end else each
            for each in said[len(parts) :]
        ]
        return replace(added([*by_functions, *parts]), awaits_group=any(each.awaits_group for each in by_functions))

    async def score_group(self, transcripts: Sequence[Transcript]) -> list[Verdict]:
        assert self._functions is not None, "no verdict awaits the group"
        return await self._functions.score_group(transcripts)


class RewardProcess(Protocol):
    """One actor that scores; it may die and come back."""

    async def score(self, transcript: Transcript) -> Verdict:
        """Raises RewardLost when the process ends meanwhile."""
        ...

    async def score_group(self, transcripts: Sequence[Transcript]) -> list[Verdict]: ...

    async def wait_until_ready(self) -> None:
        """Wait for a process that died to be back. Raises RewardLost when it will not be."""
        ...


class RewardClient:
    """Implements Scorer for several processes that score alike."""

    def __init__(self, processes: Sequence[RewardProcess], patience_s: float) -> None:
        """Waits `patience_s` at most for one of them to be there."""
        self._processes = processes
        self._patience_s = patience_s
        self._num_open = [0] * len(processes)
        self._num_asked = 0
        self._returning: dict[int, asyncio.Task[None]] = {}
        """The processes that died, each with the wait for its return."""

    async def score(self, transcript: Transcript) -> Verdict:
        """Raises RewardLost when every process is gone for good, DeadlineError when none is there in time."""
        (verdict,) = await self._ask(lambda process: _one(process.score(transcript)), 1)
        return verdict

    async def score_group(self, transcripts: Sequence[Transcript]) -> list[Verdict]:
        """As `score`."""
        return await self._ask(lambda process: process.score_group(transcripts), len(transcripts))

    async def _ask(self, ask: Callable[[RewardProcess], Awaitable[list[Verdict]]], count: int) -> list[Verdict]:
        problem = ""
        for _ in range(MAX_ASKED):
            index = await within("waiting for a process that scores", self._patience_s, self._choose())
            self._num_open[index] += 1
            try:
                return await ask(self._processes[index])
            except RewardLost as error:
                problem = str(error)
                if index not in self._returning:
                    self._returning[index] = asyncio.create_task(self._return(index))
            finally:
                self._num_open[index] -= 1
        return [Verdict(reward=None, end=EpisodeEnd.REWARD_ERROR, detail=problem)] * count

    async def _choose(self) -> int:
        """The process with the fewest open requests; if several have as few, they take turns."""
        while True:
            number = len(self._processes)
            there = [index for index in range(number) if index not in self._returning]
            if there:
                self._num_asked += 1
                first = self._num_asked
                return min(there, key=lambda index: (self._num_open[index], (index - first) % number))
            waits = [wait for wait in self._returning.values() if not wait.done()]
            if not waits:
                raise RewardLost("every process that scores is gone for good")
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)

    async def _return(self, index: int) -> None:
        try:
            await self._processes[index].wait_until_ready()
        except RewardLost:
            return  # it is gone for good, so it stays among those that are not there
        del self._returning[index]


async def _one(verdict: Awaitable[Verdict]) -> list[Verdict]:
    return [await verdict]
