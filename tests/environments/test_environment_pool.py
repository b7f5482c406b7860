"""Environments in their processes: what they say arrives, what they do to their process stays there."""

from __future__ import annotations

import asyncio
import os
import resource
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import misbehaving
import pytest
from misbehaving import reply_of, task_of

from rlflow.environments import remote as environment_remote
from rlflow.environments.pool import EnvironmentPool
from rlflow.envs.base import Endpoint, Environment, Program, Prompt, Step, ToolSchema
from rlflow.errors import ConfigError, EnvironmentFailure, EnvironmentLost
from rlflow.plugins.loading import load_object
from rlflow.processes.machine_limits import memory_bytes
from rlflow.types import Message, Task

TASK = Task(id="t", prompt=({"role": "user", "content": "hi"},))


@asynccontextmanager
async def pool_of(
    build: Callable[..., Environment | Program] = misbehaving.build, processes: int = 1, leases: Sequence[str] = ()
) -> AsyncIterator[EnvironmentPool]:
    pool = EnvironmentPool(build, processes, leases, lease_timeout_s=0.2, max_memory_bytes=1 << 29)
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()


async def opened(pool: EnvironmentPool, seed: int = 0) -> Environment:
    world = await pool.open(seed, TASK)
    assert isinstance(world, Environment)
    return world


async def play(pool: EnvironmentPool, task: Task) -> Step:
    """One step; the environment is closed."""
    world = await opened(pool, seed=7)
    try:
        await world.reset(task)
        return await world.step(reply_of())
    finally:
        await world.close()


@pytest.mark.slow
async def test_prompts_and_steps_arrive_and_episodes_share_the_processes_out() -> None:
    async with pool_of(processes=2) as pool:
        worlds = [await opened(pool, seed) for seed in range(6)]
        prompts = await asyncio.gather(*(world.reset(task_of()) for world in worlds))
        assert prompts[0].messages == [{"role": "user", "content": "2+2"}]
        assert prompts[0].tools == [{"type": "function", "function": {"name": "f"}}]
        steps = await asyncio.gather(*(world.step(reply_of(str(seed))) for seed, world in enumerate(worlds)))
        assert [step.metrics["seed"] for step in steps] == [0, 1, 2, 3, 4, 5]
        assert [step.messages[0]["content"] for step in steps] == [f"{seed} environment" for seed in range(6)]
        assert (steps[0].reward, steps[0].done, steps[0].context) == (0.5, True, None)
        pids = [step.metrics["pid"] for step in steps]
        assert sorted(pids.count(pid) for pid in set(pids)) == [3, 3]
        assert os.getpid() not in pids
        assert pool.num_open == 6
        await asyncio.gather(*(world.close() for world in worlds))
        assert pool.num_open == 0


class Limited(Environment):
    """Says which process it is in, and how much that may allocate."""

    async def reset(self, task: Task) -> Prompt:
        return Prompt(messages=list(task.prompt))

    async def step(self, reply: Message) -> Step:
        limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
        return Step(done=True, metrics={"pid": float(os.getpid()), "limit": float(limit)})


@pytest.mark.slow
async def test_the_runners_of_a_machine_divide_processes_and_memory() -> None:
    """Five processes for three runners are two for each, and the six of them may take half of the memory."""
    pool = EnvironmentPool(Limited, 5, num_runners=3)
    try:
        worlds = [await opened(pool) for _ in range(4)]
        await asyncio.gather(*(world.reset(TASK) for world in worlds))
        steps = [await world.step(reply_of()) for world in worlds]
        assert len({step.metrics["pid"] for step in steps}) == 2
        assert {step.metrics["limit"] for step in steps} == {float(memory_bytes() // 2 // 6)}
    finally:
        await pool.close()


@pytest.mark.slow
async def test_a_program_runs_in_the_process() -> None:
    async with pool_of(partial(misbehaving.build, "program")) as pool:
        program = await pool.open(0, TASK)
        assert isinstance(program, Program)
        result = await program.run(task_of(""), Endpoint(base_url="http://x", api_key="k", model="m"))
        assert (result.reward, result.metrics) == (1.0, {"turns": 8.0})
        await program.close()
        assert pool.num_open == 0


@pytest.mark.slow
async def test_methods_that_are_not_async_run_in_a_thread_of_their_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment_remote, "GRACE_S", 0.5)
    async with pool_of(partial(misbehaving.build, "plain")) as pool:
        worlds = [await opened(pool) for _ in range(2)]
        for world in worlds:
            assert (await world.reset(task_of())).messages == [{"role": "user", "content": "2+2"}]
        # Each step waits for the other one: none of them blocks the process.
        steps = await asyncio.gather(*(world.step(reply_of(each)) for world, each in zip(worlds, "ab", strict=True)))
        assert [step.messages[0]["content"] for step in steps] == ["a", "b"]
        beside, hanging = worlds
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await hanging.step(reply_of("hang"))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await hanging.close()
        await asyncio.wait_for(beside.reset(task_of()), 20)
        await beside.close()
        await gone(int(steps[0].metrics["pid"]))
        await emptied(pool)
    async with pool_of(partial(misbehaving.build, "plain program")) as pool:
        program = await pool.open(0, TASK)
        assert isinstance(program, Program)
        result = await program.run(task_of(), Endpoint(base_url="http://x", api_key="k", model="m"))
        assert result.reward == 0.25
        await program.close()


async def answer(
    messages: Sequence[Message], *, agent: str, tools: Sequence[ToolSchema] = (), trainable: bool = False
) -> Message:
    return Message(role="assistant", content=f"{agent} heard {messages[0]['content']}")


async def engine_is_gone(*_: object, **__: object) -> Message:
    raise ConnectionError("engine 0 is gone")


@pytest.mark.slow
async def test_other_agents_are_asked_in_the_runner_and_their_failures_are_the_runners() -> None:
    async with pool_of() as pool:
        world = await opened(pool)
        world.ask = answer
        await world.reset(task_of("ask"))
        assert (await world.step(reply_of())).messages == [{"role": "user", "content": "user heard hello"}]
        world.ask = engine_is_gone
        with pytest.raises(ConnectionError, match="engine 0 is gone"):
            await world.step(reply_of())
        await world.close()
        assert pool.num_open == 0


FAILURES = {
    "raise": "step: ValueError: by design (misbehaving.py:",
    "raise in a library": "step: JSONDecodeError: Expecting value: line 1 column 1 (char 0) (misbehaving.py:",
    "exit": "step: SystemExit: early (misbehaving.py:",
    "interrupt": "step: KeyboardInterrupt:  (misbehaving.py:",
    "cancel itself": "step: CancelledError:  (misbehaving.py:",
    "memory bomb": "step: MemoryError: Unable to allocate 128. MiB",
    "nothing": "step: expected a Step; got 0 (int)",
    "nan": "step: a reward is None, or a number from -1e+15 to 1e+15; got nan (float)",
    "bad metric": "step: metric 'score' must be a number from -1e+15 to 1e+15; got inf (float)",
    "bad message": "step: a message needs the texts `role` and `content`; got {'role': 'user'} (dict)",
    "bad json": "what the environment said cannot be sent: JSON cannot hold it (JSON cannot hold <object",
    "huge": "what the environment said cannot be sent: 17825",
}


@pytest.mark.slow
async def test_what_an_environment_does_wrong_is_a_failure_and_the_process_goes_on() -> None:
    async with pool_of() as pool:
        pid = (await play(pool, task_of())).metrics["pid"]
        for what, detail in FAILURES.items():
            with pytest.raises(EnvironmentFailure) as caught:
                await play(pool, task_of(what))
            assert str(caught.value).startswith(detail), what
            assert not isinstance(caught.value, EnvironmentLost)
        with pytest.raises(EnvironmentFailure, match=r"^reset: ValueError: by design \(misbehaving.py:"):
            await play(pool, task_of(reset="raise"))
        with pytest.raises(EnvironmentFailure, match=r"^close: ValueError: by design \(misbehaving.py:"):
            await play(pool, task_of(close="raise"))
        assert (await play(pool, task_of("print"))).metrics["pid"] == pid
        assert pool.num_open == 0


@pytest.mark.slow
async def test_an_environment_that_cannot_be_built_is_a_failure() -> None:
    async with pool_of(partial(misbehaving.build, "raises")) as pool:
        with pytest.raises(EnvironmentFailure, match=r"^build: OSError: no licence \(misbehaving.py:"):
            await pool.open(0, TASK)
        await emptied(pool)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "detail"),
    [
        ("die", "the environment process exited with code 3"),
        ("crash", "the environment process was killed by SIGSEGV"),
        (
            "run out of memory",
            "the environment process was killed by SIGKILL; the kernel does that when memory runs out",
        ),
    ],
)
async def test_a_process_that_dies_takes_its_episodes_along_and_is_replaced(what: str, detail: str) -> None:
    async with pool_of(processes=2) as pool:
        worlds = [await opened(pool) for _ in range(4)]
        for world, does in zip(worlds, ("hang", "", what, ""), strict=True):
            await world.reset(task_of(does))
        waiting = asyncio.create_task(worlds[0].step(reply_of()))
        with pytest.raises(EnvironmentLost) as caught:
            await worlds[2].step(reply_of())
        assert str(caught.value) == detail
        with pytest.raises(EnvironmentLost, match=detail):
            await waiting
        assert (await worlds[1].step(reply_of())).reward == 0.5
        for world in worlds:
            await world.close()
        steps = await asyncio.gather(*(play(pool, task_of()) for _ in range(4)))
        assert [step.reward for step in steps] == [0.5] * 4
        assert pool.num_open == 0


@pytest.mark.slow
async def test_a_call_that_overran_is_cancelled_and_one_that_blocks_costs_its_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(environment_remote, "GRACE_S", 1.0)
    async with pool_of() as pool:
        beside = await opened(pool)
        await beside.reset(task_of())
        for what in ("hang", "refuse to end", "hang in a thread"):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await play(pool, task_of(what))
        await emptied(pool, left=1)
        assert (await beside.step(reply_of())).reward == 0.5
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await play(pool, task_of("block"))
        with pytest.raises(
            EnvironmentLost, match="killed, for it did not react within 1 s: something in an environment"
        ):
            await beside.step(reply_of())
        await beside.close()
        assert (await play(pool, task_of())).reward == 0.5
        await emptied(pool)


@pytest.mark.slow
async def test_a_process_full_of_threads_that_hang_is_replaced_when_its_episodes_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(environment_remote, "MAX_LEAKED", 2)
    async with pool_of() as pool:
        beside = await opened(pool)
        await beside.reset(task_of())
        for _ in range(3):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await play(pool, task_of("hang in a thread"))
        replaced = await play(pool, task_of())
        old = await beside.step(reply_of())
        assert replaced.metrics["pid"] != old.metrics["pid"]
        assert is_alive(int(old.metrics["pid"]))
        await beside.close()
        await gone(int(old.metrics["pid"]))
        assert pool.num_open == 0


@pytest.mark.slow
async def test_an_environment_that_does_not_close_is_given_up_and_its_process_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(environment_remote, "GRACE_S", 0.5)
    async with pool_of(leases=["a", "b"]) as pool:
        beside = await opened(pool)
        await beside.reset(task_of())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await play(pool, task_of(close="refuse to end"))
        # Its lease is free only when the process that holds it is dead, and that is when its other episodes have ended.
        opening = asyncio.create_task(play(pool, task_of()))
        await asyncio.wait([opening], timeout=1)
        assert not opening.done()
        assert (await beside.step(reply_of())).messages[0]["content"] == "4 a"
        await beside.close()
        assert (await opening).messages[0]["content"] == "4 a"
        await emptied(pool)
        contents = [(await play(pool, task_of())).messages[0]["content"] for _ in range(2)]
        assert sorted(contents) == ["4 a", "4 b"]


@pytest.mark.slow
@pytest.mark.parametrize(("what", "count"), [("fork bomb", 32), ("daemon", 1)])
async def test_all_that_an_environment_starts_ends_with_its_process(what: str, count: int, tmp_path: Path) -> None:
    file = tmp_path / "pids"
    file.touch()
    async with pool_of() as pool:
        playing = asyncio.create_task(play(pool, task_of(what, file=file)))
        async with asyncio.timeout(20):
            while len(file.read_text().split()) < count:
                await asyncio.sleep(0.01)
        pids = [int(line) for line in file.read_text().split()]
        assert all(is_alive(pid) for pid in pids)
    assert not [pid for pid in pids if is_alive(pid)]
    await asyncio.gather(playing, return_exceptions=True)


@pytest.mark.slow
async def test_leases_are_exclusive_and_come_back_whatever_happens() -> None:
    async with pool_of(leases=["a", "b"]) as pool:
        first, second = await opened(pool), await opened(pool)
        for world in (first, second):
            await world.reset(task_of("raise"))
        opening = asyncio.create_task(pool.open(0, TASK))
        await asyncio.wait([opening], timeout=0.1)
        assert not opening.done()
        opening.cancel()
        await first.close()
        third = await opened(pool)
        await third.reset(task_of("die"))
        with pytest.raises(EnvironmentLost):
            await third.step(reply_of())
        contents = [(await play(pool, task_of())).messages[0]["content"] for _ in range(4)]
        assert set(contents) == {"4 a", "4 b"}


@pytest.mark.slow
async def test_who_waits_for_a_lease_in_vain_is_told() -> None:
    async with pool_of(leases=["a"]) as pool, pool.lease():
        with pytest.raises(EnvironmentFailure, match=r"^lease: no lease came free within 0.2 s"):
            async with pool.lease():
                pass


@pytest.mark.slow
async def test_an_opening_that_is_cancelled_leaves_nothing_open() -> None:
    async with pool_of() as pool:
        openings = []
        for turns in range(8):
            openings.append(asyncio.create_task(pool.open(0, TASK)))
            for _ in range(turns):
                await asyncio.sleep(0)
            openings[-1].cancel()
        await asyncio.wait(openings)
        # The process may have been quick enough to open the last one before.
        for opening in openings:
            if not opening.cancelled():
                await opening.result().close()
        assert openings[0].cancelled()
        await emptied(pool)
        assert (await play(pool, task_of())).reward == 0.5


@pytest.mark.slow
async def test_closing_the_pool_ends_what_is_under_way_and_it_may_start_again() -> None:
    pool = EnvironmentPool(misbehaving.build)
    for _ in range(2):
        world = await opened(pool)
        await world.reset(task_of("hang"))
        waiting = asyncio.create_task(world.step(reply_of()))
        await asyncio.sleep(0)
        await pool.close()
        with pytest.raises(EnvironmentLost, match="the environment processes were closed"):
            await waiting


@pytest.mark.slow
async def test_an_environment_that_cannot_be_used_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "dies.py").write_text("import os\nif os.environ.get('DIES'):\n    os._exit(7)\ndef build(): ...\n")
    build: Any = load_object(f"{tmp_path}/dies.py:build")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DIES", "1")
        with pytest.raises(ConfigError, match="the environment process exited with code 7 while it loaded the environ"):
            await EnvironmentPool(build).start()
    (tmp_path / "dies.py").unlink()
    with pytest.raises(ConfigError, match="there is no file .*dies.py on this machine"):
        await EnvironmentPool(build).start()


async def test_a_build_that_does_not_pickle_is_refused() -> None:
    lock = threading.Lock()
    with pytest.raises(ConfigError, match=r"cannot be sent to its process.*at the top level of an importable module"):
        EnvironmentPool(lambda: (lock, misbehaving.build())[1])


@pytest.mark.slow
async def test_a_task_that_json_cannot_hold_is_a_mistake_in_the_settings() -> None:
    bad = Task(id="t/9", prompt=(), data={"image": b"x"})  # pyright: ignore[reportArgumentType]
    async with pool_of() as pool:
        with pytest.raises(
            ConfigError, match=r"task 't/9' cannot be sent to the environment's process \(reset\): JSON"
        ):
            await play(pool, bad)


async def emptied(pool: EnvironmentPool, left: int = 0) -> None:
    async with asyncio.timeout(20):
        while pool.num_open > left:
            await asyncio.sleep(0.01)


async def gone(pid: int) -> None:
    async with asyncio.timeout(20):
        while is_alive(pid):
            await asyncio.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
