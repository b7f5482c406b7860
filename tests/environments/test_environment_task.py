"""All calls of one episode's environment run in one task of its process: what one call enters, another may leave."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from misbehaving import reply_of
from scoped import Scoped, task_of

from rlflow.environments import remote as environment_remote
from rlflow.environments.pool import EnvironmentPool
from rlflow.envs.base import Environment
from rlflow.errors import EnvironmentFailure

TASK = task_of("unused")
LEFT = "1 task, left\n"


async def noted(file: Path) -> str:
    async with asyncio.timeout(20):
        while not (file.exists() and (text := file.read_text()).endswith("\n")):
            await asyncio.sleep(0.01)
    return text


@pytest.mark.slow
async def test_scopes_and_variables_last_from_reset_to_close_however_the_episode_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment_remote, "GRACE_S", 3.0)
    pool = EnvironmentPool(Scoped)
    await pool.start()

    async def opened(step: str, file: Path) -> Environment:
        world = await pool.open(0, TASK)
        assert isinstance(world, Environment)
        await world.reset(task_of(step, file=file))
        return world

    try:
        # played to its end
        world = await opened("", tmp_path / "played")
        assert (await world.step(reply_of())).messages[0]["content"] == "t"
        await world.close()
        assert await noted(tmp_path / "played") == LEFT

        # a step that overran: cancelled by its deadline, and the next step still runs in the same task
        for how in ("hang", "hang in a scope", "refuse for a while"):
            world = await opened(how, tmp_path / how)
            for _ in range(2):
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.05):
                        await world.step(reply_of())
            await world.close()
            assert await noted(tmp_path / how) == LEFT, how

        # an episode that is abandoned in mid-step: its step is cancelled, and it closes
        world = await opened("hang", tmp_path / "abandoned")

        async def play() -> None:
            try:
                await world.step(reply_of())
            finally:
                await world.close()

        playing = asyncio.create_task(play())
        await asyncio.sleep(0.05)
        playing.cancel()
        await asyncio.wait([playing])
        assert playing.cancelled()
        assert await noted(tmp_path / "abandoned") == LEFT

        # closed beside a step that is under way
        world = await opened("hang", tmp_path / "beside")
        stepping = asyncio.create_task(world.step(reply_of()))
        await asyncio.sleep(0.05)
        await world.close()
        with pytest.raises(EnvironmentFailure, match="^step: CancelledError"):
            await stepping
        assert await noted(tmp_path / "beside") == LEFT
        assert pool.num_open == 0
    finally:
        await pool.close()


@pytest.mark.slow
async def test_a_group_of_tasks_that_breaks_between_steps_fails_the_next_step_and_the_episode_closes(
    tmp_path: Path,
) -> None:
    pool = EnvironmentPool(Scoped)
    try:
        world, beside = await pool.open(0, TASK), await pool.open(1, TASK)
        assert isinstance(world, Environment) and isinstance(beside, Environment)
        await world.reset(task_of("break the group", file=tmp_path / "broken"))
        await beside.reset(task_of(file=tmp_path / "beside"))
        await world.step(reply_of())
        await asyncio.sleep(0.05)
        with pytest.raises(EnvironmentFailure, match=r"^step: .* was cancelled between two calls, by a task group or"):
            await world.step(reply_of())
        assert (await beside.step(reply_of())).done
        with pytest.raises(EnvironmentFailure, match="^close: ExceptionGroup: unhandled errors in a TaskGroup"):
            await world.close()
        await beside.close()
        with pytest.raises(EnvironmentFailure, match="^step: the environment is closed"):
            await beside.step(reply_of())
        await beside.close()
        assert (await noted(tmp_path / "broken")).startswith("1 task, ExceptionGroup(")
        assert await noted(tmp_path / "beside") == LEFT
        assert pool.num_open == 0
    finally:
        await pool.close()
