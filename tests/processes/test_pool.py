"""Processes that load other people's code, answer calls, and are replaced when they end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from rlflow.errors import ConfigError
from rlflow.processes.frames import FrameTooLong, encode, frame_of, read_frame
from rlflow.processes.pool import Call, CallFailed, HostedCode, HostedProcess, Pool, ProcessLost, payload_of


def code_of(content: object = "") -> HostedCode:
    return HostedCode(
        module="hosted",
        payload=payload_of(content, "the code", "the test process", "do something"),
        process="the test process",
        what="the code",
        cure="do something",
    )


@asynccontextmanager
async def pool_of(content: object = "", size: int = 1) -> AsyncIterator[Pool[HostedProcess]]:
    code = code_of(content)
    pool = Pool(lambda: HostedProcess(code), size, lambda: ProcessLost("the pool was closed"))
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()


async def echo(pool: Pool[HostedProcess], text: str = "") -> dict[str, Any]:
    async with pool.idle() as process:
        return await process.answer_to(Call("echo", text=text))


async def act(pool: Pool[HostedProcess], what: str) -> str:
    async with pool.idle() as process:
        return await process.answer_to(Call("act", what=what))


@pytest.mark.slow
async def test_calls_are_answered_by_processes_that_callers_have_for_themselves() -> None:
    async with pool_of(size=2) as pool:
        answers = await asyncio.gather(*(echo(pool, str(number)) for number in range(6)))
        assert [answer["text"] for answer in answers] == list("012345")
        assert answers[0]["number"] == 0.5
        assert len({answer["pid"] for answer in answers}) == 2


@pytest.mark.slow
async def test_a_handler_that_raises_costs_its_call_and_one_that_dies_its_process() -> None:
    async with pool_of() as pool:
        pid = (await echo(pool))["pid"]
        with pytest.raises(CallFailed, match=r"^ValueError: by design \(hosted.py:"):
            await act(pool, "raise")
        with pytest.raises(CallFailed, match=r"^TypeError: JSON cannot hold <object"):
            await act(pool, "not json")
        assert await act(pool, "fork") == "fork"
        assert (await echo(pool))["pid"] == pid
        for what, reason in {
            "die": "the test process exited with code 3",
            "crash": "the test process was killed by SIGSEGV",
            "meddle": "the test process was killed by SIGKILL, for it sent what it must not "
            "(an answer that is no JSON: b'oops')",
        }.items():
            with pytest.raises(ProcessLost) as caught:
                await act(pool, what)
            assert str(caught.value) == reason
        assert (await echo(pool))["pid"] != pid


@pytest.mark.slow
async def test_a_process_whose_call_is_cancelled_is_killed_and_replaced() -> None:
    async with pool_of() as pool:
        async with pool.idle() as process:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await process.answer_to(Call("act", what="hang"))
            with pytest.raises(ProcessLost, match="the test process was killed, because act was cancelled"):
                await process.answer_to(Call("echo", text=""))
        assert (await echo(pool, "again"))["text"] == "again"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("refuse", r"^my.setting is wrong$"),
        ("raise", r"^the code cannot be loaded in the test process: KeyError: 'key' \(hosted.py:\d+\); do something$"),
        ("die", r"the test process exited with code 7 while it loaded the code; its output may say why"),
    ],
)
async def test_code_that_cannot_be_loaded_stops_the_start(content: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        async with pool_of(content):
            pass


@pytest.mark.slow
async def test_closing_ends_what_is_under_way_and_what_waits_and_the_pool_may_start_again() -> None:
    async with pool_of() as pool:
        calls = [asyncio.create_task(act(pool, "hang")) for _ in range(2)]
        await asyncio.sleep(0.01)
        await pool.close()
        for call in calls:
            with pytest.raises(ProcessLost, match="the pool was closed"):
                await call
        await pool.start()
        assert (await echo(pool, "again"))["text"] == "again"


async def test_what_cannot_be_sent_is_refused_before_any_process_starts() -> None:
    lock = threading.Lock()
    with pytest.raises(ConfigError, match="the code cannot be sent to the test process: cannot pickle.*; do something"):
        code_of(lambda: lock)
    with pytest.raises(ConfigError, match="sent to the test process: 1782.* bytes, more than the 16777216 that one"):
        code_of("x" * (17 << 20))
    with pytest.raises(TypeError, match=r"JSON cannot hold \{1\} \(set\)"):
        Call("echo", text={1})
    with pytest.raises(FrameTooLong):
        Call("echo", text="x" * (17 << 20))


async def test_frames_are_read_whole_or_not_at_all() -> None:
    reader = asyncio.StreamReader()
    reader.feed_data(frame_of(encode({"a": 1})) + frame_of(b"")[:3])
    reader.feed_eof()
    assert await read_frame(reader) == b'{"a":1}'
    with pytest.raises(EOFError):
        await read_frame(reader)
