"""Routing over engines, with engines that answer when told to."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

import pytest

from rlflow.errors import DeadlineError, EngineLost, RunError
from rlflow.rollout.client import MAX_KEYS, MAX_LOSSES, EngineClient, RemoteCalls
from rlflow.rollout.requests import Completion, FinishReason, GenerateRequest, part_seed

Asked = TypeVar("Asked")
DONE = Completion(ids=[1], logprobs=[-0.5], versions=[0], cache_versions=[0], finish_reason="stop")


@dataclass
class Remote(Generic[Asked]):
    call: Callable[[Asked], Awaitable[Completion]]

    def remote(self, asked: Asked, /) -> Awaitable[Completion]:
        return self.call(asked)


@dataclass
class FakeEngine:
    """Shaped like an actor handle: engine.generate.remote(request) -> awaitable."""

    calls: list[asyncio.Future[Completion]] = field(default_factory=list)
    requests: list[GenerateRequest] = field(default_factory=list)

    asked_to_go_on: list[str] = field(default_factory=list)

    @property
    def generate(self) -> Remote[GenerateRequest]:
        return Remote(self._generate)

    @property
    def go_on(self) -> Remote[str]:
        return Remote(self._go_on)

    def _generate(self, request: GenerateRequest) -> Awaitable[Completion]:
        self.requests.append(request)
        return self._call()

    def _go_on(self, reply: str) -> Awaitable[Completion]:
        self.asked_to_go_on.append(reply)
        return self._call()

    def _call(self) -> Awaitable[Completion]:
        self.calls.append(asyncio.get_running_loop().create_future())
        return self.calls[-1]

    async def answer(self, completion: Completion) -> None:
        """Answer the latest call, and let the client act on it."""
        self.calls[-1].set_result(completion)
        await settle()

    async def die(self) -> None:
        for call in self.calls:
            if not call.done():
                call.set_exception(EngineLost("the actor died"))
        await settle()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def client_of(engines: list[FakeEngine], cancelled: list[object] | None = None) -> EngineClient:
    calls = RemoteCalls(
        cancel=lambda call: None if cancelled is None else cancelled.append(call),
        is_lost=lambda error: isinstance(error, EngineLost),
    )
    return EngineClient(engines, calls, patience_s=0.05)


def request(key: str | None = None, engine: int | None = None, max_new_tokens: int = 4) -> GenerateRequest:
    return GenerateRequest(prompt_ids=[7], seed=3, max_new_tokens=max_new_tokens, prefix_key=key, engine=engine)


def part(first: int, count: int, version: int, finish_reason: FinishReason) -> Completion:
    """`count` tokens whose ids count up from `first`."""
    ids = list(range(first, first + count))
    return Completion(
        ids=ids,
        logprobs=[-token / 1000 for token in ids],
        versions=[version] * count,
        cache_versions=[version] * count,
        finish_reason=finish_reason,
        reply="reply 1" if finish_reason == "part" else "",
    )


async def send(client: EngineClient, *keys: str | None) -> list[asyncio.Task[Completion]]:
    tasks = [asyncio.create_task(client.generate(request(key))) for key in keys]
    await settle()
    return tasks


async def send_one(client: EngineClient, asked: GenerateRequest) -> asyncio.Task[Completion]:
    task = asyncio.create_task(client.generate(asked))
    await settle()
    return task


async def test_requests_go_to_the_least_loaded_engine() -> None:
    engines = [FakeEngine(), FakeEngine(), FakeEngine()]
    client = client_of(engines)
    tasks = await send(client, None, None, None, None)
    assert client.outstanding == [2, 1, 1]
    engines[0].calls[0].set_result(DONE)
    engines[0].calls[1].set_result(DONE)
    assert await tasks[0] == DONE
    assert await tasks[3] == DONE
    assert client.outstanding == [0, 1, 1]
    await send(client, None)
    assert client.outstanding == [1, 1, 1]


async def test_a_prefix_key_keeps_its_engine_until_that_is_much_more_loaded() -> None:
    client = client_of([FakeEngine(), FakeEngine()])
    await send(client, *["a"] * 9)
    assert client.outstanding == [9, 0]
    await send(client, "a")
    assert client.outstanding == [9, 1]
    await send(client, "a")
    assert client.outstanding == [9, 2]


async def test_an_engine_error_is_raised_and_frees_the_engine() -> None:
    engine = FakeEngine()
    client = client_of([engine])
    (task,) = await send(client, "a")
    engine.calls[0].set_exception(RuntimeError("engine died"))
    with pytest.raises(RuntimeError, match="engine died"):
        await task
    assert client.outstanding == [0]


async def test_cancelling_the_caller_cancels_the_remote_call() -> None:
    engine = FakeEngine()
    cancelled: list[object] = []
    client = client_of([engine], cancelled)
    (task,) = await send(client, None)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cancelled == [engine.calls[0]]
    assert client.outstanding == [0]


async def test_remembered_keys_are_bounded() -> None:
    client = client_of([FakeEngine()])
    await send(client, *(str(index) for index in range(MAX_KEYS + 5)))
    assert len(client._homes) == MAX_KEYS
    assert "4" not in client._homes and "5" in client._homes


def test_only_the_first_part_keeps_the_seed_of_the_reply() -> None:
    assert (part_seed(7, 0), part_seed(7, 256), part_seed(2**31 - 1, 1)) == (7, 483739, 2147414580)


async def test_a_short_reply_is_one_call_as_it_was_asked_for() -> None:
    engine = FakeEngine()
    task = await send_one(client_of([engine]), request(max_new_tokens=256))
    await engine.answer(part(10, 256, version=1, finish_reason="length"))
    assert await task == part(10, 256, version=1, finish_reason="length")
    assert engine.requests == [request(max_new_tokens=256)]
    assert engine.asked_to_go_on == []


async def test_a_long_reply_is_one_request_that_arrives_in_parts() -> None:
    engines = [FakeEngine(), FakeEngine()]
    client = client_of(engines)
    task = await send_one(client, request(max_new_tokens=600))
    await engines[0].answer(part(0, 256, version=1, finish_reason="part"))
    client.set_serving([1])  # its engine takes new weights, and keeps it
    await engines[0].answer(part(256, 256, version=2, finish_reason="part"))
    assert client.outstanding == [1, 0]
    await engines[0].answer(part(512, 3, version=2, finish_reason="stop"))
    reply = await task
    assert reply.ids == list(range(515))
    assert reply.logprobs == [-token / 1000 for token in range(515)]
    assert reply.versions == [1] * 256 + [2] * 259
    assert (reply.finish_reason, reply.reply) == ("stop", "")
    assert engines[0].requests == [request(max_new_tokens=600)]
    assert engines[0].asked_to_go_on == ["reply 1", "reply 1"]
    assert engines[1].requests == []


async def test_a_long_reply_ends_at_its_limit() -> None:
    engine = FakeEngine()
    task = await send_one(client_of([engine]), request(max_new_tokens=300))
    await engine.answer(part(0, 256, version=1, finish_reason="part"))
    await engine.answer(part(256, 44, version=1, finish_reason="length"))
    assert await task == part(0, 300, version=1, finish_reason="length")


async def test_an_engine_without_room_ends_the_reply() -> None:
    engine = FakeEngine()
    task = await send_one(client_of([engine]), request(max_new_tokens=300))
    await engine.answer(part(0, 20, version=1, finish_reason="length"))
    assert await task == part(0, 20, version=1, finish_reason="length")


async def test_a_reply_that_was_given_up_is_asked_for_again() -> None:
    engine = FakeEngine()
    task = await send_one(client_of([engine]), request(max_new_tokens=300))
    await engine.answer(part(0, 256, version=1, finish_reason="part"))
    await engine.answer(part(256, 0, version=1, finish_reason="abort"))
    assert [asked.num_sampled for asked in engine.requests] == [0, 256]
    await engine.answer(part(256, 1, version=1, finish_reason="stop"))
    assert (await task).ids == list(range(257))


async def test_what_an_engine_gave_back_is_kept_and_continued() -> None:
    engine = FakeEngine()
    task = await send_one(client_of([engine]), request(max_new_tokens=30))
    await engine.answer(part(0, 20, version=1, finish_reason="abort"))
    goes_on = replace(request(max_new_tokens=10), prompt_ids=[7, *range(20)], num_sampled=20)
    assert engine.requests[1] == goes_on
    await engine.answer(part(20, 5, version=2, finish_reason="stop"))
    assert (await task).versions == [1] * 20 + [2] * 5


async def test_a_lost_engine_costs_its_part_only_and_gets_nothing_until_it_serves_again() -> None:
    engines = [FakeEngine(), FakeEngine()]
    client = client_of(engines)
    seen: list[Completion] = []
    task = asyncio.create_task(client.generate(request("key", max_new_tokens=600), seen.append))
    await settle()
    await engines[0].answer(part(0, 256, version=1, finish_reason="part"))
    await engines[0].die()
    assert client.outstanding == [0, 1]
    goes_on = replace(request("key", max_new_tokens=344), prompt_ids=[7, *range(256)], num_sampled=256)
    assert engines[1].requests == [goes_on]
    await engines[1].answer(part(256, 4, version=1, finish_reason="stop"))
    assert (await task).ids == list(range(260))
    assert [len(each.ids) for each in seen] == [256, 4]
    await send(client, "key", None, None)
    assert client.outstanding == [0, 3]
    client.set_serving([0, 1])
    await send(client, None)
    assert client.outstanding == [1, 3]


async def test_a_lost_first_part_is_sent_again_with_its_seed() -> None:
    engines = [FakeEngine(), FakeEngine()]
    task = await send_one(client_of(engines), request())
    await engines[0].die()
    assert engines[1].requests == [request()]
    await engines[1].answer(DONE)
    assert await task == DONE


async def test_requests_wait_for_an_engine_that_serves_and_not_for_ever() -> None:
    engine = FakeEngine()
    client = client_of([engine])
    client.set_serving([])
    task = await send_one(client, request())
    assert engine.requests == []
    client.set_serving([0])
    await settle()
    await engine.answer(DONE)
    assert await task == DONE
    client.set_serving([])
    with pytest.raises(DeadlineError, match="waiting for a rollout engine that serves did not finish"):
        await client.generate(request())


async def test_a_named_engine_is_the_only_one_that_answers() -> None:
    engines = [FakeEngine(), FakeEngine()]
    client = client_of(engines)
    client.set_serving([0])
    task = await send_one(client, request("key", engine=1))
    assert client.outstanding == [0, 1]
    await engines[1].die()
    with pytest.raises(EngineLost, match="rollout engine 1 was lost, and with it the version"):
        await task
    assert engines[0].requests == []


async def test_a_reply_that_loses_engine_after_engine_is_given_up() -> None:
    engines = [FakeEngine() for _ in range(MAX_LOSSES)]
    client = client_of(engines)
    task = await send_one(client, request())
    for engine in engines:
        await engine.die()
    with pytest.raises(RunError, match="5 engine calls in a row gave a reply no token"):
        await task
    assert client.outstanding == [0] * MAX_LOSSES


async def test_losses_are_counted_from_the_last_token() -> None:
    engine = FakeEngine()
    client = client_of([engine])
    task = await send_one(client, request(max_new_tokens=300))
    for first in range(2 * MAX_LOSSES):
        await engine.answer(part(first, 1, version=1, finish_reason="abort"))
        await engine.die()
        client.set_serving([0])
        await settle()
    await engine.answer(part(2 * MAX_LOSSES, 1, version=1, finish_reason="stop"))
    assert (await task).ids == list(range(2 * MAX_LOSSES + 1))
