"""Processes killed, and stopped, under a real fleet: two vLLM engines, a runner, a trainer. No episode is lost."""

from __future__ import annotations

import asyncio
import os
import re
import select
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import ray

from rlflow.cluster.start import Fleet, ray_cluster, start_fleet
from rlflow.config import Config, Update
from rlflow.environments.find import load_environment
from rlflow.errors import RunError, StaleGroup
from rlflow.models.resolve import resolve_model
from rlflow.rundir.killed import KilledLog
from rlflow.runtime import scratch
from rlflow.types import EpisodeEnd, GroupOrder, PlayedGroup, Task

pytestmark = pytest.mark.slow

TIMEOUT_S = 240.0
GROUPS = 8


def config(run_dir: Path) -> Config:
    config = Config()
    config.run.dir, config.deadlines.heartbeat_s = str(run_dir), 5.0
    config.model.path, config.model.max_length = "tiny", 512
    config.reward.function = "rlflow.envs.arithmetic.reward:share_of_digits"
    config.rollout.engines, config.rollout.kv_cache_gb = 2, 0.1
    config.rollout.max_new_tokens = 300
    config.rollout.update = Update.all
    config.trainer.micro_batch_tokens = 512
    config.cluster.cpu_threads = 1
    return config


class Stage:
    """A fleet that holds version 1, and what a test does with it."""

    def __init__(self, fleet: Fleet, task: Task, alarms: list[str]) -> None:
        self.alarms = alarms
        self.fleet = fleet
        self.engines = fleet.engine_fleet
        self.task = task
        self.num_ordered = 0

    async def load(self, version: int) -> float:
        staged = await self.fleet.workers.trainer.stage_weights(version)
        return (await self.engines.load_weights(staged)).pause_s

    def play(self, engine: int | None = None) -> asyncio.Task[PlayedGroup]:
        self.num_ordered += 1
        order = GroupOrder(
            group_id=self.num_ordered, task=self.task, num_episodes=4, seed=self.num_ordered, engine=engine
        )
        playing = self.fleet.workers.runners.play(order)
        return asyncio.create_task(asyncio.wait_for(playing, TIMEOUT_S))  # pyright: ignore[reportArgumentType]

    async def until_sampling(self, engine: int) -> None:
        while (await self.fleet.engines[engine].stats.remote()).running == 0:
            await asyncio.sleep(0)

    async def until(self, condition: Callable[[list[str]], bool]) -> None:
        """Wait for a state of the engines, by what they say of themselves."""
        waiting = self.engines._wait_until(lambda: condition(self.engines.describe()))
        await asyncio.wait_for(waiting, TIMEOUT_S)

    async def process(self, engine: int) -> int:
        return await self.fleet.engines[engine].__ray_call__.remote(lambda actor: os.getpid())


def is_healthy(line: str) -> bool:
    return "healthy" in line


@asynccontextmanager
async def stage(run_dir: Path) -> AsyncIterator[Stage]:
    settings = config(run_dir)
    spec = load_environment(settings.env, settings.reward)
    alarms: list[str] = []
    with ray_cluster(settings):
        fleet = await start_fleet(settings, resolve_model("tiny"), spec, alarms.append, tell=print)
        try:
            on = Stage(fleet, next(iter(spec.tasks())), alarms)
            await on.load(1)
            yield on
        finally:
            await fleet.stop()


def vllm_of(engine: int) -> int:
    """The process in which the engine of this process id runs vLLM."""
    titles: dict[int, str] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            title = (folder / "cmdline").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended meanwhile
        if parent == engine:
            titles[int(folder.name)] = title
    # Now and then the title that vLLM gives its process does not take, and the command that started it is seen.
    found = [process for process, title in titles.items() if "EngineCore" in title or "spawn_main" in title]
    assert len(found) == 1, titles
    return found[0]


async def gone(process: int) -> bool:
    """Wait until a process has ended that is no child of this one."""
    handle = os.pidfd_open(process)
    try:
        return bool((await asyncio.to_thread(select.select, [handle], [], [], 30.0))[0])
    finally:
        os.close(handle)


def check_whole(groups: list[PlayedGroup], newest: int) -> None:
    for group in groups:
        assert len(group.episodes) == 4
        for episode in group.episodes:
            assert episode.end in (EpisodeEnd.COMPLETED, EpisodeEnd.TRUNCATED_LENGTH), episode.detail
            assert episode.reward is not None
            assert 1 <= episode.oldest_version <= episode.newest_version <= newest


async def kill_and_recover(on: Stage, kill: Callable[[], Awaitable[None]], engine: int, version: int) -> None:
    """Play, kill in the middle, load the next version meanwhile; all groups end whole and the engine comes back."""
    playing = [on.play() for _ in range(GROUPS)]
    await on.until_sampling(engine)
    started = time.perf_counter()
    await kill()
    await on.until(lambda lines: not is_healthy(lines[engine]))
    noticed = time.perf_counter()
    await on.load(version)
    check_whole(await asyncio.gather(*playing), newest=version)
    await on.until(lambda lines: all(map(is_healthy, lines)))
    print(
        f"engine {engine}: death noticed after {noticed - started:.2f} s, full strength after "
        f"{time.perf_counter() - started:.1f} s"
    )
    (group,) = await asyncio.gather(on.play(engine))
    check_whole([group], newest=version)
    assert {episode.oldest_version for episode in group.episodes} == {version}


async def test_lost_engines_come_back_with_the_current_weights_and_lose_no_episode(
    tmp_path: Path,
) -> None:
    killed = KilledLog(tmp_path)
    async with stage(tmp_path) as on:
        actor = await on.process(0)
        core = vllm_of(actor)

        async def kill_actor() -> None:
            os.kill(actor, signal.SIGKILL)
            assert await gone(core), "vLLM outlived its engine"

        await kill_and_recover(on, kill_actor, engine=0, version=2)
        other = vllm_of(await on.process(1))

        async def stop_vllm() -> None:
            os.kill(other, signal.SIGSTOP)

        await kill_and_recover(on, stop_vllm, engine=1, version=3)
        assert await on.process(0) != actor
        # What each engine's predecessor left is gone; its own meeting place is there.
        assert [len([*scratch.folder().glob(f"rollout-engine-{index}/vllm_dist_*")]) for index in (0, 1)] == [1, 1]
        (line,) = killed.news()
        assert f"process {other} of rollout engine 1 (" in line
        assert ") was stopped for 5 s" in line
        first, again, second, _ = on.alarms
        assert "rollout engine 0 died" in first
        assert re.search("^rollout engine 0 serves again, [0-9]+ s after it was lost$", again)
        assert re.search("vLLM's process ended; the cause is in .*[.]err; it is started again$", second)
        await check_updates(on)
        await check_runner(on)


async def check_updates(on: Stage) -> None:
    """Pauses under load, a pinned engine, and stale groups; in one test, because a fleet takes long to start."""
    pauses: dict[str, float] = {}
    for version, update in ((4, Update.all), (5, Update.rolling)):
        on.engines._is_rolling = update is Update.rolling
        playing = [on.play() for _ in range(GROUPS)]
        await on.until_sampling(0)
        pauses[update.value] = await on.load(version)
        check_whole(await asyncio.gather(*playing), newest=version)
    print("longest pause:", ", ".join(f"{name} {1000 * pause_s:.0f} ms" for name, pause_s in pauses.items()))
    pinned = await on.engines.pin()
    kept, stale = on.play(pinned), on.play()
    first = on.play(pinned)
    await on.load(6)
    group = await first
    assert {(episode.oldest_version, episode.newest_version) for episode in group.episodes} == {(5, 5)}
    await kept
    await on.engines.unpin(pinned)
    await stale
    doomed = on.play()
    await on.until_sampling(1 - pinned)
    while not doomed.done():
        await on.fleet.workers.runners.cancel_stale(7)
    with pytest.raises(StaleGroup):
        await doomed


async def check_runner(on: Stage) -> None:
    """A runner that was killed knows again which engines serve."""
    (runner,) = on.fleet.runners
    lost = on.play()
    ray.kill(runner, no_restart=False)
    with pytest.raises(RunError, match="episode runner"):
        await lost
    ready: Any = runner.__ray_ready__.options(max_task_retries=-1).remote()
    await ready
    check_whole([await on.play()], newest=6)
