"""Whom a reply is sent to for its score, and what becomes of it when that process dies."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from transcripts import said

from rlflow.errors import ConfigError, DeadlineError, RewardLost
from rlflow.rewards.call import ChosenReward
from rlflow.rewards.client import MAX_ASKED, EnvironmentScorer, RewardClient
from rlflow.types import EpisodeEnd, Transcript, Verdict

EPISODE = said("4")


@dataclass
class FakeProcess:
    """Answers when told to."""

    asked: list[asyncio.Future[Verdict]] = field(default_factory=list)
    is_back: asyncio.Event = field(default_factory=asyncio.Event)
    is_gone: bool = False

    async def score(self, transcript: Transcript) -> Verdict:
        self.asked.append(asyncio.get_running_loop().create_future())
        return await self.asked[-1]

    async def score_group(self, transcripts: Sequence[Transcript]) -> list[Verdict]:
        return [await self.score(transcript) for transcript in transcripts]

    async def wait_until_ready(self) -> None:
        if self.is_gone:
            raise RewardLost("it cannot start")
        await self.is_back.wait()

    def answer(self, reward: float) -> None:
        self.asked.pop(0).set_result(Verdict(reward=reward))

    def die(self) -> None:
        for each in self.asked:
            each.set_exception(RewardLost("the process died"))
        self.asked.clear()


async def send(client: RewardClient, count: int = 1) -> list[asyncio.Task[Verdict]]:
    tasks = [asyncio.create_task(client.score(EPISODE)) for _ in range(count)]
    await settle()
    return tasks


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_reply_goes_to_the_process_with_the_fewest() -> None:
    one, two = FakeProcess(), FakeProcess()
    client = RewardClient([one, two], patience_s=30.0)
    tasks = await send(client, 5)
    assert sorted([len(one.asked), len(two.asked)]) == [2, 3]
    for _ in range(2):
        one.answer(1.0)
    await settle()
    held = len(one.asked)
    tasks += await send(client)
    assert len(one.asked) == held + 1
    while one.asked:
        one.answer(1.0)
    while two.asked:
        two.answer(2.0)
    assert {verdict.reward for verdict in await asyncio.gather(*tasks)} == {1.0, 2.0}


async def test_idle_processes_take_turns() -> None:
    processes = [FakeProcess(), FakeProcess(), FakeProcess()]
    client = RewardClient(processes, patience_s=30.0)
    seen: list[int] = []
    for _ in range(6):
        (task,) = await send(client)
        (asked,) = [index for index, each in enumerate(processes) if each.asked]
        seen.append(asked)
        processes[asked].answer(0.0)
        await task
    assert sorted(seen[:3]) == [0, 1, 2]
    assert seen[:3] == seen[3:]


async def test_what_a_process_had_when_it_died_goes_to_another_and_it_gets_nothing_until_it_is_back() -> None:
    one, two = FakeProcess(), FakeProcess()
    client = RewardClient([one, two], patience_s=30.0)
    tasks = await send(client, 2)
    one.die()
    await settle()
    assert not any(task.done() for task in tasks)
    assert (len(one.asked), len(two.asked)) == (0, 2)
    await send(client, 2)
    assert (len(one.asked), len(two.asked)) == (0, 4)
    one.is_back.set()
    await settle()
    await send(client, 2)
    assert (len(one.asked), len(two.asked)) == (2, 4)


async def test_a_reply_that_processes_die_of_has_no_verdict() -> None:
    processes = [FakeProcess() for _ in range(MAX_ASKED + 1)]
    client = RewardClient(processes, patience_s=30.0)
    (task,) = await send(client)
    for _ in range(MAX_ASKED):
        (asked,) = [each for each in processes if each.asked]
        asked.die()
        await settle()
    assert task.result() == Verdict(reward=None, end=EpisodeEnd.REWARD_ERROR, detail="the process died")
    assert not any(each.asked for each in processes)


async def test_replies_wait_while_no_process_is_there() -> None:
    one = FakeProcess()
    client = RewardClient([one], patience_s=30.0)
    (lost,) = await send(client)
    one.die()
    await settle()
    (waiting,) = await send(client)
    assert not lost.done() and not waiting.done()
    one.is_back.set()
    await settle()
    for reward in (0.5, 0.25):
        one.answer(reward)
    assert {(await lost).reward, (await waiting).reward} == {0.5, 0.25}


@pytest.mark.parametrize(
    ("is_gone", "error", "detail"),
    [
        (True, RewardLost, "every process that scores is gone for good"),
        (False, DeadlineError, "waiting for a process that scores did not finish within its deadline of 0.01 s"),
    ],
)
async def test_without_a_process_the_group_fails(is_gone: bool, error: type[Exception], detail: str) -> None:
    """Which puts its task back; to have no verdict would be the end of the task."""
    one = FakeProcess(is_gone=is_gone)
    client = RewardClient([one], patience_s=0.01)
    await send(client)
    one.die()
    await settle()
    with pytest.raises(error, match=f"^{detail}$"):
        await client.score(EPISODE)


async def test_what_is_no_death_is_raised() -> None:
    one = FakeProcess()
    client = RewardClient([one], patience_s=30.0)
    (task,) = await send(client)
    one.asked[0].set_exception(ConfigError("cannot be sent"))
    with pytest.raises(ConfigError, match="cannot be sent"):
        await task
    await send(client)
    assert len(one.asked) == 2


@pytest.mark.parametrize(
    ("given", "verdict"),
    [
        (0.25, Verdict(reward=0.5, metrics={"rewards/environment": 0.25})),
        (
            None,
            Verdict(
                reward=None,
                end=EpisodeEnd.NO_VERDICT,
                detail="environment: the environment gave no reward in its steps",
            ),
        ),
        (
            float("nan"),
            Verdict(
                reward=None,
                end=EpisodeEnd.REWARD_INVALID,
                detail="environment: a reward is None, or a number from -1e+15 to 1e+15; got nan (float)",
            ),
        ),
    ],
)
async def test_what_an_environment_gave_needs_no_process(given: float | None, verdict: Verdict) -> None:
    scorer = EnvironmentScorer(ChosenReward(name="environment", function=None, weight=2.0))
    assert await scorer.score(said("4", environment_reward=given)) == verdict
