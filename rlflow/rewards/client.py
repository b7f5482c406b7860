"""Whom an episode runner asks for a verdict: the reward process with the fewest requests, of those that are there.

What a process had when it died is asked again, a few times only, for it may be this very reply that it dies of; then
there is no verdict, as when scoring fails otherwise. A process that died gets nothing until it is back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from rlflow.errors import DeadlineError, RewardLost
from rlflow.rewards.call import ChosenReward, combine, environment_verdict
from rlflow.runtime.deadlines import within
from rlflow.types import EpisodeEnd, Transcript, Verdict

MAX_ASKED = 3
"""Processes that one reply may outlive."""


class Scorer(Protocol):
    """What an episode runner knows of rewards."""

    async def score(self, transcript: Transcript) -> Verdict: ...


class EnvironmentScorer:
    """Implements Scorer where only what the environment gave counts: no process is needed to add that up."""

    def __init__(self, reward: ChosenReward) -> None:
        self._reward = reward

    async def score(self, transcript: Transcript) -> Verdict:
        return combine([self._reward], [environment_verdict(transcript)])


class RewardProcess(Protocol):
    """One process that scores; it may die and come back."""

    async def score(self, transcript: Transcript) -> Verdict:
        """Raises RewardLost when the process ends meanwhile."""
        ...

    async def wait_until_ready(self) -> None:
        """Returns when a process that died is there again. Raises RewardLost when it will not be."""
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
        lost = ""
        for _ in range(MAX_ASKED):
            try:
                index = await within("waiting for a process that scores", self._patience_s, self._choose())
                return await self._ask(index, transcript)
            except RewardLost as error:
                lost = str(error)
            except DeadlineError as error:
                return Verdict(reward=None, end=EpisodeEnd.REWARD_ERROR, detail=str(error))
        return Verdict(reward=None, end=EpisodeEnd.REWARD_ERROR, detail=lost)

    async def _ask(self, index: int, transcript: Transcript) -> Verdict:
        self._num_open[index] += 1
        try:
            return await self._processes[index].score(transcript)
        except RewardLost:
            if index not in self._returning:
                self._returning[index] = asyncio.create_task(self._return(index))
            raise
        finally:
            self._num_open[index] -= 1

    async def _choose(self) -> int:
        """The process with the fewest open requests; they take turns where several have as few."""
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
            return  # for good, so that it stays among those that are not there
        del self._returning[index]
