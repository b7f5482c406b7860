"""Routing over engines, with engines that answer when told to."""

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass, field

import pytest

from rlflow.rollout.client import MAX_KEYS, EngineClient
from rlflow.rollout.requests import Completion, GenerateRequest

DONE = Completion(ids=[1], logprobs=[-0.5], versions=[0], finish_reason="stop")


@dataclass
class FakeEngine:
    """Shaped like an actor handle: engine.generate.remote(request) -> awaitable."""

    calls: list[asyncio.Future[Completion]] = field(default_factory=list)

    @property
    def generate(self) -> "FakeEngine":
        return self

    def remote(self, request: GenerateRequest) -> Awaitable[Completion]:
        self.calls.append(asyncio.get_running_loop().create_future())
        return self.calls[-1]


def request(key: str | None = None) -> GenerateRequest:
    return GenerateRequest(prompt_ids=[7], seed=None, max_new_tokens=4, prefix_key=key)


async def send(client: EngineClient, *keys: str | None) -> list[asyncio.Task[Completion]]:
    tasks = [asyncio.create_task(client.generate(request(key))) for key in keys]
    await asyncio.sleep(0)
    return tasks


async def test_requests_go_to_the_least_loaded_engine() -> None:
    engines = [FakeEngine(), FakeEngine(), FakeEngine()]
    client = EngineClient(engines)
    tasks = await send(client, None, None, None, None)
    assert client.outstanding == [2, 1, 1]
    engines[0].calls[0].set_result(DONE)
    engines[0].calls[1].set_result(DONE)
    assert await tasks[0] is DONE
    assert await tasks[3] is DONE
    assert client.outstanding == [0, 1, 1]
    await send(client, None)
    assert client.outstanding == [1, 1, 1]


async def test_a_prefix_key_keeps_its_engine_until_that_is_much_more_loaded() -> None:
    client = EngineClient([FakeEngine(), FakeEngine()])
    await send(client, *["a"] * 9)
    assert client.outstanding == [9, 0]
    await send(client, "a")
    assert client.outstanding == [9, 1]
    await send(client, "a")
    assert client.outstanding == [9, 2]


async def test_an_engine_error_is_raised_and_frees_the_engine() -> None:
    engine = FakeEngine()
    client = EngineClient([engine])
    (task,) = await send(client, "a")
    engine.calls[0].set_exception(RuntimeError("engine died"))
    with pytest.raises(RuntimeError, match="engine died"):
        await task
    assert client.outstanding == [0]


async def test_cancelling_the_caller_cancels_the_remote_call() -> None:
    engine = FakeEngine()
    cancelled: list[object] = []
    client = EngineClient([engine], cancel=cancelled.append)
    (task,) = await send(client, None)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cancelled == [engine.calls[0]]
    assert client.outstanding == [0]


async def test_remembered_keys_are_bounded() -> None:
    client = EngineClient([FakeEngine()])
    await send(client, *(str(index) for index in range(MAX_KEYS + 5)))
    assert len(client._homes) == MAX_KEYS
    assert "4" not in client._homes and "5" in client._homes


def test_no_engine_is_an_error() -> None:
    with pytest.raises(ValueError, match="engines must not be empty"):
        EngineClient([])
