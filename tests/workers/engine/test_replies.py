"""Replies under way: parts, versions, seeds, and what happens to those that nobody fetches."""

import asyncio

import pytest

from rlflow.errors import EngineLost
from rlflow.rollout.requests import FinishReason, GenerateRequest, part_seed
from rlflow.workers.engine import replies
from rlflow.workers.engine.load import Pressure
from rlflow.workers.engine.replies import Replies, Reply, versions_between


def reply_of(max_new_tokens: int = 600, num_sampled: int = 0, seed: int | None = 3) -> Reply:
    request = GenerateRequest(
        prompt_ids=[7] * 10, seed=seed, max_new_tokens=max_new_tokens, prefix_key=None, num_sampled=num_sampled
    )
    return Reply(request, max_length=1000)


def sampling(reply: Reply) -> asyncio.Future[FinishReason]:
    """Lets the test decide when sampling ends."""
    ended: asyncio.Future[FinishReason] = asyncio.get_running_loop().create_future()

    async def sample() -> FinishReason:
        return await ended

    reply.start(asyncio.create_task(sample()))
    return ended


def deliver(reply: Reply, count: int) -> None:
    """The next `count` tokens, whose ids count up."""
    ids = range(len(reply.ids), len(reply.ids) + count)
    reply.add(list(ids), [-token / 1000 for token in ids])


@pytest.mark.parametrize(
    ("starts", "first", "last", "expected"),
    [
        ([(0, 3), (5, 4)], 4, 7, [3, 4, 4]),
        ([(0, 3), (5, 4)], 0, 3, [3, 3, 3]),
        ([(0, 3), (5, 4)], 5, 7, [4, 4]),
        ([(0, None), (0, 4)], 0, 2, [4, 4]),  # it began to wait when there were no weights
        ([(0, 3), (2, 4), (2, 5), (3, 6)], 1, 5, [3, 5, 6, 6]),  # no token between two updates
        ([(0, 3)], 2, 2, []),
    ],
)
def test_each_token_has_the_version_that_sampled_it(
    starts: list[tuple[int, int | None]], first: int, last: int, expected: list[int]
) -> None:
    assert versions_between(starts, first, last) == expected


async def test_whole_parts_are_handed_out_and_all_that_is_left_at_the_end() -> None:
    reply = reply_of()
    ended = sampling(reply)
    reply.begin(1, None)
    deliver(reply, 1)
    waiting = asyncio.create_task(reply.take_part())
    await asyncio.sleep(0)
    assert not waiting.done()
    reply.mark(2, 200)  # an update meets the reply after 200 tokens, of which 199 are delivered later
    deliver(reply, 256)
    part = await waiting
    assert (part.ids, part.finish_reason, part.reply) == (list(range(256)), "part", reply.name)
    assert part.logprobs == [-token / 1000 for token in range(256)]
    assert part.versions == [1] * 200 + [2] * 56
    deliver(reply, 100)
    ended.set_result("stop")
    part = await reply.take_part()
    assert (part.ids, part.finish_reason, part.reply) == (list(range(256, 357)), "stop", "")
    assert part.versions == [2] * 101


async def test_a_token_is_as_old_as_its_cache() -> None:
    reply = reply_of(max_new_tokens=4)
    ended = sampling(reply)
    reply.begin(3, 2)
    reply.mark(4, 1)
    deliver(reply, 3)
    reply.begin(4, 4)
    deliver(reply, 1)
    ended.set_result("length")
    part = await reply.take_part()
    assert (part.versions, part.cache_versions) == ([3, 4, 4, 4], [2, 2, 2, 4])


async def test_parts_that_nobody_fetched_in_time_come_together() -> None:
    reply = reply_of()
    sampling(reply)
    reply.begin(1, None)
    deliver(reply, 515)
    assert len((await reply.take_part()).ids) == 512


async def test_a_reply_that_goes_on_here_keeps_the_boundaries_and_the_seeds_of_its_parts() -> None:
    reply = reply_of(max_new_tokens=580, num_sampled=20)
    assert (reply.seed, reply.num_left, reply.num_left_of_part) == (part_seed(3, 20), 580, 236)
    sampling(reply)
    reply.begin(1, None)
    deliver(reply, 240)
    assert len((await reply.take_part()).ids) == 236
    deliver(reply, 252 - 240 + 240)
    assert len(reply.ids) == 492
    assert (reply.seed, reply.num_left, reply.num_left_of_part) == (part_seed(3, 512), 88, 88)
    assert reply_of(seed=None).seed is None


async def test_each_request_to_vllm_has_a_cache_of_its_own() -> None:
    reply = reply_of()
    sampling(reply)
    reply.begin(3, cache_version=3)
    deliver(reply, 2)
    reply.mark(4, 3)
    deliver(reply, 254)
    reply.begin(4, cache_version=4)
    deliver(reply, 256)
    assert reply.versions == [3] * 3 + [4] * 509
    assert (await reply.take_part()).cache_versions == [3] * 256 + [4] * 256


def test_a_reply_ends_where_the_model_has_no_room() -> None:
    assert reply_of(max_new_tokens=5000).num_left == 990


async def test_what_ends_sampling_reaches_whoever_asks_next() -> None:
    reply = reply_of()
    ended = sampling(reply)
    reply.begin(1, None)
    deliver(reply, 10)
    waiting = asyncio.create_task(reply.take_part())
    await asyncio.sleep(0)
    ended.set_exception(EngineLost("vLLM died"))
    with pytest.raises(EngineLost, match="vLLM died"):
        await waiting


async def test_an_update_marks_the_replies_that_vllm_still_samples() -> None:
    under_way, one, two, three = Replies(), reply_of(), reply_of(), reply_of()
    for reply in (one, two, three):
        sampling(reply)
        reply.begin(1, None)
        under_way.add(reply)
    deliver(two, 5)
    under_way.mark(2, {one.vllm_name: 3})  # vLLM has sampled all of the second, and has not got the third yet
    for reply in (one, three):
        deliver(reply, 5)
    assert one.versions == [1, 1, 1, 2, 2]
    assert two.versions == [1] * 5
    assert three.versions == [2] * 5


async def test_a_reply_that_nobody_asks_for_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replies, "ABANDONED_S", 0.01)
    under_way, left, wanted = Replies(), reply_of(), reply_of()
    tasks = []
    for reply in (left, wanted):
        sampling(reply)
        tasks.append(reply._sampling)
        under_way.add(reply)
        under_way.leave(reply)
    assert under_way.take(wanted.name) is wanted
    await asyncio.wait(tasks[:1])
    assert tasks[0].cancelled()
    assert under_way.take(left.name) is None
    assert not tasks[1].done()
    assert list(under_way) == [wanted]
    await under_way.stop()
    assert tasks[1].cancelled()
    assert list(under_way) == []


def test_an_engine_is_full_if_requests_waited_in_most_steps_of_a_part() -> None:
    pressure = Pressure(num_steps=10, num_full_steps=6)
    assert pressure.was_full_since(0, 0)
    assert pressure.was_full_since(5, 3)  # 3 of 5
    assert not pressure.was_full_since(2, 2)  # 4 of 8
    assert not pressure.was_full_since(10, 6)  # no step
