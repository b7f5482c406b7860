"""`rlflow env check`: plays tasks with scripts in place of a model, and says what does not look right.

Environments run in their process and rewards in theirs, as in a run; only the engine is missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field

from rlflow.config import Config
from rlflow.environments.find import load_environment
from rlflow.environments.pool import EnvironmentPool
from rlflow.envs.base import Endpoint, Environment, EnvironmentSpec, Program, Prompt, Result, Step
from rlflow.errors import ConfigError
from rlflow.models.resolve import resolve_model
from rlflow.rewards.choose import choose_rewards, is_environment_alone
from rlflow.rewards.client import EnvironmentScorer, Scorer
from rlflow.rewards.pool import ScorerPool
from rlflow.rollout.episode import EnvironmentSource, play_episode, summarize
from rlflow.rollout.gateway.server import Gateway
from rlflow.rollout.limits import EpisodeLimits
from rlflow.rollout.render import Renderer
from rlflow.rollout.template_check import Trial, check_template
from rlflow.tools.env_tools.scripts import Script, ScriptedChat, scripts_of
from rlflow.types import EpisodeSummary, Message, Task

NUM_TASKS = 20
MAX_DETAILS = 3
"""Failures that are shown for each kind."""


@dataclass(kw_only=True, slots=True)
class Played:
    """What one script came to."""

    name: str
    episodes: list[EpisodeSummary] = field(default_factory=list)

    @property
    def rewards(self) -> list[float]:
        return [episode.reward for episode in self.episodes if episode.reward is not None]

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.rewards) if self.rewards else None


@dataclass(kw_only=True, slots=True)
class Report:
    """What `rlflow env check` found."""

    played: list[Played]
    slowest: dict[str, float]
    """Phase -> seconds of its slowest call."""
    template: list[Trial]
    problems: list[str]


def env_check(config: Config, *, num_tasks: int = NUM_TASKS, as_json: bool = False) -> int:
    """Print what was found; the exit code is 1 when something is wrong. Raises ConfigError."""
    if config.reward.model is not None:
        raise ConfigError(
            "env check does not load reward.model, whose scores would differ from the environment's; add "
            "reward.model=null, or a reward.function"
        )
    spec = load_environment(config.env, config.reward)
    tasks = _spread(spec.tasks(), num_tasks)
    report = asyncio.run(_check(config, spec, tasks))
    print(json.dumps(_as_json(report)) if as_json else "\n".join(_lines(report)))
    return int(bool(report.problems))


def _spread(tasks: Sequence[Task], count: int) -> list[Task]:
    """At most `count` tasks, from all over the data set."""
    step = max(1, len(tasks) // count)
    return list(tasks[::step][:count])


async def _check(config: Config, spec: EnvironmentSpec, tasks: Sequence[Task]) -> Report:
    from transformers import AutoTokenizer

    renderer = Renderer(AutoTokenizer.from_pretrained(resolve_model(config.model.path)))
    limits = EpisodeLimits.of(config)
    slowest: dict[str, float] = {}
    played = []
    async with _scorer(config, spec) as scorer, _worlds(config, spec) as worlds, _gateway() as gateway:
        timed = _TimedWorlds(worlds, slowest)
        for name, script in scripts_of(spec, tasks).items():
            playing = (_play(task, script, renderer, limits, timed, gateway, scorer, slowest) for task in tasks)
            played.append(Played(name=name, episodes=await asyncio.gather(*playing)))
    template = check_template(renderer)
    return Report(played=played, slowest=slowest, template=template, problems=_problems(played, template))


async def _play(
    task: Task,
    script: Script,
    renderer: Renderer,
    limits: EpisodeLimits,
    worlds: EnvironmentSource,
    gateway: Gateway,
    scorer: Scorer,
    slowest: dict[str, float],
) -> EpisodeSummary:
    chat = ScriptedChat(task, script, renderer, limits)
    played = await play_episode(worlds, task, chat, limits, gateway=gateway)
    if played.end.is_error:
        return summarize(played, None)
    with _clock(slowest, "scoring"):
        return summarize(played, await scorer.score(played.transcript))


@asynccontextmanager
async def _scorer(config: Config, spec: EnvironmentSpec) -> AsyncIterator[Scorer]:
    rewards = choose_rewards(config.reward, spec.reward)
    if is_environment_alone(rewards):
        yield EnvironmentScorer(rewards[0])
        return
    pool = ScorerPool(rewards, workers=config.reward.workers, timeout_s=config.reward.timeout_s)
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()


@asynccontextmanager
async def _worlds(config: Config, spec: EnvironmentSpec) -> AsyncIterator[EnvironmentPool]:
    pool = EnvironmentPool(spec.build, config.env.processes, spec.leases)
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()


@asynccontextmanager
async def _gateway() -> AsyncIterator[Gateway]:
    gateway = Gateway()
    await gateway.start()
    try:
        yield gateway
    finally:
        await gateway.stop()


@contextlib.contextmanager
def _clock(slowest: dict[str, float], phase: str):
    started_s = time.perf_counter()
    try:
        yield
    finally:
        slowest[phase] = max(slowest.get(phase, 0.0), time.perf_counter() - started_s)


class _TimedWorlds:
    """EnvironmentSource whose calls are timed."""

    def __init__(self, worlds: EnvironmentSource, slowest: dict[str, float]) -> None:
        self._worlds = worlds
        self._slowest = slowest

    def lease(self) -> AbstractAsyncContextManager[None]:
        return self._worlds.lease()

    async def open(self, seed: int) -> Environment | Program:
        with _clock(self._slowest, "build"):
            world = await self._worlds.open(seed)
        return _TimedProgram(world, self._slowest) if isinstance(world, Program) else _Timed(world, self._slowest)


class _Timed(Environment):
    def __init__(self, world: Environment, slowest: dict[str, float]) -> None:
        self._world = world
        self._slowest = slowest

    async def reset(self, task: Task) -> Prompt:
        self._world.ask = self.ask
        with _clock(self._slowest, "reset"):
            return await self._world.reset(task)

    async def step(self, reply: Message) -> Step:
        with _clock(self._slowest, "step"):
            return await self._world.step(reply)

    async def close(self) -> None:
        with _clock(self._slowest, "close"):
            await self._world.close()


class _TimedProgram(Program):
    def __init__(self, program: Program, slowest: dict[str, float]) -> None:
        self._program = program
        self._slowest = slowest

    async def run(self, task: Task, endpoint: Endpoint) -> Result:
        with _clock(self._slowest, "run"):
            return await self._program.run(task, endpoint)

    async def close(self) -> None:
        await self._program.close()


def _problems(played: Sequence[Played], template: Sequence[Trial]) -> list[str]:
    problems = []
    for one in played:
        failed = [episode for episode in one.episodes if not episode.is_trainable]
        for end, count in Counter(episode.end for episode in failed).items():
            details = {episode.detail: None for episode in failed if episode.end is end}
            shown = "; ".join(list(details)[:MAX_DETAILS])
            problems.append(f"{one.name}: {count} of {len(one.episodes)} episodes ended as {end.value}: {shown}")
    means = {one.name: one.mean for one in played}
    expert, nonsense = means.get("expert"), means.get("nonsense")
    if expert is not None and nonsense is not None and expert <= nonsense:
        problems.append(
            f"the expert earns {expert:.3g} on average and nonsense {nonsense:.3g}: the reward does not tell them "
            "apart; where a task's answer alone is not a good reply, give the EnvironmentSpec an `expert`"
        )
    problems += [
        f"the chat template refuses a conversation ({one.name}): {one.refused}" for one in template if one.refused
    ]
    return problems


def _lines(report: Report) -> list[str]:
    lines = ["script        episodes  reward: mean    min    max   turns  forks  ends"]
    for one in report.played:
        rewards = one.rewards
        figures = (one.mean, min(rewards), max(rewards)) if rewards else ()
        shown = " ".join(f"{figure:6.3g}" for figure in figures) or "no verdict".rjust(20)
        turns = statistics.fmean(episode.metrics.get("turns", 0.0) for episode in one.episodes)
        forks = sum(episode.metrics.get("forks", 0.0) for episode in one.episodes)
        ends = ", ".join(f"{end.value} {count}" for end, count in Counter(each.end for each in one.episodes).items())
        lines.append(f"{one.name:12}  {len(one.episodes):8}        {shown} {turns:7.1f} {forks:6.0f}  {ends}")
    lines.append("slowest call: " + ", ".join(f"{name} {value:.3f} s" for name, value in report.slowest.items()))
    kept = ", ".join(
        f"{one.name} {'refused' if one.refused else 'kept' if not one.forks else f'{one.forks} forks'}"
        for one in report.template
    )
    lines.append(f"chat template, conversations of {report.template[0].turns} replies: {kept}")
    lines += [f"problem: {problem}" for problem in report.problems] or ["no problem found"]
    return lines


def _as_json(report: Report) -> dict[str, object]:
    return {
        "scripts": {
            one.name: {
                "episodes": len(one.episodes),
                "reward": one.mean,
                "ends": dict(Counter(episode.end.value for episode in one.episodes)),
            }
            for one in report.played
        },
        "slowest_s": report.slowest,
        "template_forks": {trial.name: trial.forks for trial in report.template},
        "problems": report.problems,
    }
