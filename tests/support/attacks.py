"""Environments that break one episode of a group, and what becomes of the episode, the group and the next group.

Everything is as in a run, but for the engine, whose replies say what the environment is to do.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import misbehaving

from rlflow.config import Config
from rlflow.environments import remote as environment_remote
from rlflow.environments.pool import EnvironmentPool
from rlflow.envs.base import Environment, Prompt, Step
from rlflow.envs.tools import ToolSet
from rlflow.rewards.client import Scorer
from rlflow.rollout.chat import episode_seed
from rlflow.rollout.client import RemoteCalls
from rlflow.rollout.requests import Completion, GenerateRequest
from rlflow.types import (
    EpisodeEnd,
    EpisodeSummary,
    FunctionCall,
    GroupOrder,
    Json,
    Message,
    PlayedGroup,
    Task,
    Transcript,
    Verdict,
)
from rlflow.workers.runner import EpisodeRunner

GROUP_SIZE = 4
ATTACKED, UNHARMED = 1, 2
"""Seeds of groups."""
PROCESSES = 2
STEP_TIMEOUT_S = 2.5
GRACE_S = 1.0
RECOVERY_TIMEOUT_S = 30.0
WELL, WELL_AND_SLOW = "well", "well and slow"
_STOP = 0


@dataclass(kw_only=True, slots=True, frozen=True)
class Attack:
    """What the first reply of a group does, and how its episode and those beside it end."""

    name: str
    reply: str
    end: EpisodeEnd
    detail: str
    """Beginning of the episode's."""
    beside: EpisodeEnd = EpisodeEnd.COMPLETED
    """End of the other episodes in the same process."""


LOST = EpisodeEnd.ENVIRONMENT_ERROR
LATE = EpisodeEnd.STEP_TIMEOUT
TOO_LATE = f"step 1 took longer than {STEP_TIMEOUT_S:g} s (env.step_timeout_s)"

ATTACKS = (
    Attack(name="hang, waiting", reply="hang", end=LATE, detail=TOO_LATE),
    Attack(name="hang, waiting, ignores cancellation", reply="refuse to end", end=LATE, detail=TOO_LATE),
    Attack(name="hang in a thread", reply="hang in a thread", end=LATE, detail=TOO_LATE),
    Attack(name="hang, blocking the event loop", reply="block", end=LATE, detail=TOO_LATE, beside=LATE),
    Attack(name="endless output", reply="print without end", end=LATE, detail=TOO_LATE),
    Attack(name="fork bomb", reply="fork bomb", end=LATE, detail=TOO_LATE, beside=LATE),
    Attack(name="exception", reply="raise", end=LOST, detail="step: ValueError: by design (misbehaving.py:"),
    Attack(name="exit", reply="exit", end=LOST, detail="step: SystemExit: early (misbehaving.py:"),
    Attack(
        name="crash (SIGSEGV)",
        reply="crash",
        end=LOST,
        detail="the environment process was killed by SIGSEGV",
        beside=LOST,
    ),
    Attack(name="memory bomb", reply="memory bomb", end=LOST, detail="step: MemoryError: Unable to allocate 128. MiB"),
    Attack(
        name="killed by the kernel, out of memory",
        reply="run out of memory",
        end=LOST,
        detail="the environment process was killed by SIGKILL; the kernel does that when memory runs out",
        beside=LOST,
    ),
    Attack(
        name="observation of 17 MB",
        reply="huge",
        end=LOST,
        detail="what the environment said cannot be sent: 178",
    ),
    Attack(name="observation of 1 MB", reply="long", end=EpisodeEnd.COMPLETED, detail=""),
    Attack(name="garbage as a tool call", reply="!garbage", end=EpisodeEnd.COMPLETED, detail=""),
    Attack(
        name="NaN as a reward of the environment",
        reply="nan",
        end=LOST,
        detail="step: a reward is None, or a number from -1e+15 to 1e+15; got nan (float)",
    ),
    Attack(
        name="dead server",
        reply="dead server",
        end=LOST,
        detail="step: ConnectionRefusedError: [Errno 111]",
    ),
)


def add(a: int, b: int) -> int:
    """
    Add two numbers.

    Args:
        a: The first one.
        b: The second one.
    """
    return a + b


@cache
def tools() -> ToolSet:
    return ToolSet([add])


class Attacked(Environment):
    """Does what the reply says."""

    def __init__(self, file: Path) -> None:
        self._file = file

    async def reset(self, task: Task) -> Prompt:
        if task.data["needs_tools"]:
            await asyncio.to_thread(tools)  # imports much
        return Prompt(messages=list(task.prompt))

    async def step(self, reply: Message) -> Step:
        what = reply["content"]
        if calls := reply.get("tool_calls"):
            return await tools().answer(calls)
        if what == WELL_AND_SLOW:
            await asyncio.sleep(0.3)  # so that it is under way when the other one breaks
        if what in (WELL, WELL_AND_SLOW):
            return Step(done=True, reward=1.0, metrics={"pid": os.getpid()})
        if what == "long":
            return Step(done=True, reward=1.0, messages=[Message(role="user", content="x" * (1 << 20))])
        if what == "dead server":
            with socket.socket() as unused:
                unused.bind(("127.0.0.1", 0))
                port = unused.getsockname()[1]
            await asyncio.open_connection("127.0.0.1", port)
        if what in misbehaving.ANSWERS:
            return misbehaving.ANSWERS[what]()
        await misbehaving.act(what, str(self._file))
        raise AssertionError(f"nothing is known of {what!r}")


def build(file: Path) -> Environment:
    return Attacked(file)


class _Letters:
    """One token a letter."""

    def prompt(self, messages: Sequence[Message], tools: Sequence[dict[str, Json]] = ()) -> list[int]:
        return [ord(letter) for message in messages for letter in message["content"]]

    def extend(
        self,
        held_ids: Sequence[int],
        messages_so_far: Sequence[Message],
        new_messages: Sequence[Message],
        tools: Sequence[dict[str, Json]] = (),
    ) -> list[int] | None:
        return self.prompt(new_messages)

    def given(self, messages: Sequence[Message], reply: Message, tools: Sequence[dict[str, Json]] = ()) -> list[int]:
        raise AssertionError("no reply is given here")

    def parse(self, ids: Sequence[int]) -> str:
        return "".join(chr(token) for token in ids if token != _STOP)

    def calls(self, text: str, tools: Sequence[dict[str, Json]] = ()) -> list[FunctionCall]:
        return [FunctionCall(name="add", arguments='{"a": 1, "b"')] if text == "!garbage" else []


@dataclass
class _Engine:
    """Replies to one request with the attack, to all others with `reply`."""

    attack: str = WELL
    attacked_seed: int = -1
    reply: str = WELL

    @property
    def generate(self) -> _Engine:
        return self

    async def remote(self, request: GenerateRequest, /) -> Completion:
        ids = [*map(ord, self.attack if request.seed == self.attacked_seed else self.reply), _STOP]
        return Completion(
            ids=ids,
            logprobs=[-1.0] * len(ids),
            versions=[0] * len(ids),
            cache_versions=[0] * len(ids),
            finish_reason="stop",
        )

    @property
    def go_on(self) -> NoReturn:
        raise AssertionError("every reply is one part")


class _Scorer(Scorer):
    async def score(self, transcript: Transcript) -> Verdict:
        return Verdict(reward=transcript.environment_reward)


@dataclass(kw_only=True, slots=True, frozen=True)
class Aftermath:
    attack: Attack
    episodes: list[EpisodeSummary]
    """Of the attacked group; the attacked one first."""
    recovery_s: float
    """From the end of the attacked group, until a group has been played well in all processes."""
    num_open: int


async def play_all(attacks: Sequence[Attack], folder: Path) -> list[Aftermath]:
    """One attack after the other, on the same runner and pool."""
    pool = EnvironmentPool(partial(build, folder / "pids"), PROCESSES, max_memory_bytes=1 << 29)
    config = Config()
    config.env.step_timeout_s = STEP_TIMEOUT_S
    engine: Any = _Engine()
    calls = RemoteCalls(cancel=lambda call: None, is_lost=lambda error: False)
    runner = EpisodeRunner(config, "", pool, _Scorer(), engine, renderer=_Letters(), calls=calls)
    with patch.object(environment_remote, "GRACE_S", GRACE_S):
        await pool.start()
        try:
            return [await _play_attack(runner, pool, engine, each) for each in attacks]
        finally:
            await pool.close()


async def _play_attack(runner: EpisodeRunner, pool: EnvironmentPool, engine: _Engine, attack: Attack) -> Aftermath:
    engine.attack, engine.attacked_seed, engine.reply = attack.reply, episode_seed(ATTACKED, 0), WELL_AND_SLOW
    episodes = await _play(runner, ATTACKED, needs_tools=attack.reply.startswith("!"))
    engine.reply = WELL
    start_s = time.perf_counter()
    async with asyncio.timeout(RECOVERY_TIMEOUT_S):
        while not _is_whole(await _play(runner, UNHARMED)):
            pass
    recovery_s = time.perf_counter() - start_s
    return Aftermath(attack=attack, episodes=episodes, recovery_s=recovery_s, num_open=pool.num_open)


def _is_whole(episodes: Sequence[EpisodeSummary]) -> bool:
    """Whether all went well, in as many processes as there should be."""
    pids = {episode.metrics.get("pid") for episode in episodes}
    return len(pids) == PROCESSES and all(episode.reward == 1.0 for episode in episodes)


async def _play(runner: EpisodeRunner, seed: int, needs_tools: bool = False) -> list[EpisodeSummary]:
    task = Task(id="t0", prompt=(Message(role="user", content="do"),), data={"needs_tools": needs_tools})
    group, *_ = await runner.play(GroupOrder(group_id=seed, task=task, num_episodes=GROUP_SIZE, seed=seed))
    assert isinstance(group, PlayedGroup)
    return group.episodes
