"""Episodes of programs, over the gateway: a scripted engine, real HTTP, real processes."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
from letters import LetterRenderer, ScriptedEngine, ids_of, limits

from rlflow.environments.pool import EnvironmentPool
from rlflow.envs.agent.data import sums
from rlflow.envs.agent.env import load
from rlflow.envs.base import Endpoint, Environment, Program, Result
from rlflow.rollout.chat import Chat
from rlflow.rollout.episode import EnvironmentSource, PlayedEpisode, play_episode
from rlflow.rollout.gateway.server import Gateway
from rlflow.types import EpisodeEnd, Message, Task

TASK = Task(id="t/0", prompt=(Message(role="user", content="hi"),))


@dataclass
class OneWorld:
    """Opens the one program that it has, in this process."""

    program: Program

    def lease(self) -> contextlib.AbstractAsyncContextManager[None]:
        return contextlib.nullcontext()

    async def open(self, seed: int, task: Task) -> Environment | Program:
        self.program.seed = seed
        return self.program


class Asks(Program):
    """Asks `times` times with a growing conversation, whatever the answers are, and is content."""

    def __init__(self, times: int, *, hangs: bool = False) -> None:
        self.times = times
        self.hangs = hangs
        """Once a request has failed."""
        self.statuses: list[int] = []
        self.closed = 0

    async def run(self, task: Task, endpoint: Endpoint) -> Result:
        messages: list[Any] = [dict(message) for message in task.prompt]
        async with aiohttp.ClientSession() as http:
            for _ in range(self.times):
                async with http.post(f"{endpoint.base_url}/chat/completions", json={"messages": messages}) as answer:
                    self.statuses.append(answer.status)
                    body = await answer.json()
                if answer.status >= 500 and self.hangs:
                    await asyncio.Event().wait()
                if answer.status == 200:
                    messages += [body["choices"][0]["message"], {"role": "user", "content": "on"}]
        return Result(reward=1.0, metrics={"asked": float(self.times)})

    async def close(self) -> None:
        self.closed += 1


@asynccontextmanager
async def started_gateway() -> AsyncIterator[Gateway]:
    gateway = Gateway()
    await gateway.start()
    try:
        yield gateway
    finally:
        await gateway.stop()


async def play(worlds: EnvironmentSource, task: Task, engine: ScriptedEngine, **changes: Any) -> PlayedEpisode:
    engine.is_open.set()
    chat = Chat(engine, LetterRenderer(), limits(**changes))
    async with started_gateway() as gateway, asyncio.timeout(60):
        return await play_episode(worlds, task, chat, limits(**changes), seed=4, gateway=gateway)


async def test_a_program_is_trained_on_what_it_asked_for() -> None:
    program = Asks(2)
    played = await play(OneWorld(program), TASK, ScriptedEngine(["a.", "bc."]))
    assert played.end is EpisodeEnd.COMPLETED
    assert played.transcript.environment_reward == 1.0
    assert played.transcript.text == "bc"
    (sample,) = played.payload.samples
    assert sample.prompt_ids.tolist() == ids_of("hi.>")
    assert sample.completion_ids.tolist() == ids_of("a.on.>bc.")
    assert sample.completion_ids[sample.loss_mask].tolist() == ids_of("a.bc.")
    assert (program.seed, program.closed, played.metrics["asked"]) == (4, 1, 2.0)


@pytest.mark.parametrize("hangs", [False, True])
async def test_a_failed_engine_ends_the_group_even_if_the_program_does_not_mind(hangs: bool) -> None:
    program = Asks(3, hangs=hangs)
    with pytest.raises(RuntimeError, match="broken"):
        await play(OneWorld(program), TASK, ScriptedEngine(["a.", RuntimeError("broken"), "c."]))
    assert program.statuses.count(200) == 1
    assert program.closed == 1


async def test_a_program_that_asks_for_too_much_is_cut_off() -> None:
    program = Asks(3)
    played = await play(OneWorld(program), TASK, ScriptedEngine(["a.", "b.", "c."]), max_turns=2)
    assert program.statuses == [200, 200, 400]
    assert played.end is EpisodeEnd.MAX_TURNS


@pytest.mark.slow
async def test_the_example_plays_in_a_process_of_an_environment_process() -> None:
    pytest.importorskip("openai")
    spec = load(tasks="rlflow.envs.agent.data:sums", command=["{python}", "-m", "rlflow.envs.agent.calculator"])
    task = sums()[0]
    call = json.dumps({"name": "calculator", "arguments": {"expression": f"{task.data['a']} + {task.data['b']}"}})
    sampled = [f"<tool_call>{call}</tool_call>.", f"{task.answer}."]
    pool = EnvironmentPool(spec.build, 1, ())
    await pool.start()
    try:
        played = await play(pool, task, ScriptedEngine([*sampled]), episode_s=50.0)
        failed = await play(pool, task, ScriptedEngine(["."]), max_length=8, episode_s=50.0)
    finally:
        await pool.close()
    assert (played.end, played.detail) == (EpisodeEnd.COMPLETED, "")
    assert played.transcript.environment_reward == 1.0
    (sample,) = played.payload.samples
    assert sample.completion_ids[sample.loss_mask].tolist() == ids_of("".join(sampled))
    assert (played.metrics["right"], played.metrics["tools/calls"], played.metrics["forks"]) == (1.0, 1.0, 0.0)
    # The command exits with code 1 then, as the `openai` package raises; the reason is the conversation's length.
    assert failed.end is EpisodeEnd.PROMPT_TOO_LONG
