"""`rlflow env check`: plays tasks with scripts in place of a model, and says what looks wrong.

    tasks x scripts -> play_episode -> score -> Report

Environments and rewards run in processes of their own, as in a run. The renderer and its tokens are real too; only the
engine is missing.
"""

import asyncio
import json
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

from rlflow.config import Config
from rlflow.environments.find import load_environment
from rlflow.environments.pool import EnvironmentPool
from rlflow.envs.base import POLICY, Environment, EnvironmentSpec, Program
from rlflow.errors import ConfigError
from rlflow.models.images import open_images
from rlflow.models.resolve import resolve_model
from rlflow.rewards.choose import choose_rewards, is_environment_alone
from rlflow.rewards.client import EnvironmentScorer, Scorer
from rlflow.rewards.pool import ScorerPool
from rlflow.rollout.chat import Chat, Reply
from rlflow.rollout.episode import EnvironmentSource, PlayedEpisode, play_episode, summarized
from rlflow.rollout.gateway.server import Gateway
from rlflow.rollout.images import Album
from rlflow.rollout.render import Renderer, open_renderer
from rlflow.rollout.requests import Completion, GenerateRequest
from rlflow.tools.env.template_check import Trial, check_template
from rlflow.types import EpisodeEnd, EpisodeSummary, Message, Task, Verdict

P = ParamSpec("P")
T = TypeVar("T")

MAX_DETAILS = 3
"""Failures that are shown for each kind."""
Script = Callable[[Task, Sequence[Message]], str]
"""(task, the conversation so far) -> the text of the next reply."""

NONSENSE = "I do not know."
BROKEN_CALL = '<tool_call>\n{"name": "no_such_tool", "arguments": {"x": \n</tool_call>'


@dataclass(kw_only=True, slots=True)
class Played:
    """All episodes that one script played."""

    name: str
    episodes: list[EpisodeSummary] = field(default_factory=list)
    cut: list[str] = field(default_factory=list)
    """What each reply that was cut off needed, and which setting is too small for it."""

    @property
    def rewards(self) -> list[float]:
        return [episode.reward for episode in self.episodes if episode.reward is not None]

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.rewards) if self.rewards else None


@dataclass(kw_only=True, slots=True)
class Report:
    played: list[Played]
    slowest: dict[str, float]
    """Phase -> seconds of its slowest call."""
    template: list[Trial]
    problems: list[str]


def env_check(config: Config, *, num_tasks: int, as_json: bool) -> int:
    """Print what was found; the exit code is 1 when something is wrong. Raises ConfigError."""
    if config.reward.model is not None:
        raise ConfigError(
            "env check does not load reward.model, whose scores would differ from the environment's; add "
            "reward.model=null, or a reward.function"
        )
    spec = load_environment(config.env, config.reward)
    tasks = spec.tasks()
    step = max(1, len(tasks) // num_tasks)  # tasks from all over the data set
    report = asyncio.run(_check(config, spec, tasks[::step][:num_tasks]))
    print(json.dumps(_as_json(report)) if as_json else "\n".join(_lines(report)))
    return int(bool(report.problems))


async def _check(config: Config, spec: EnvironmentSpec, tasks: Sequence[Task]) -> Report:
    folder = resolve_model(config.model.path)
    renderer, images = open_renderer(config, folder), open_images(folder, trust=config.model.trust_remote_code)
    slowest: dict[str, float] = {}
    rewards = choose_rewards(config.reward, spec.reward)
    async with AsyncExitStack() as stack:
        scorer: Scorer
        if is_environment_alone(rewards):
            scorer = EnvironmentScorer(rewards[0])
        else:
            scorer = ScorerPool(rewards, workers=config.reward.workers, timeout_s=config.reward.timeout_s)
            await scorer.start()
            stack.push_async_callback(scorer.close)
        pool = EnvironmentPool(spec.build, config.env.processes, spec.leases)
        await pool.start()
        stack.push_async_callback(pool.close)
        gateway = Gateway()
        await gateway.start()
        stack.push_async_callback(gateway.stop)
        worlds, score = _TimedSource(pool, slowest), _timed(scorer.score, "scoring", slowest)

        cut: dict[str, list[str]] = {}

        async def play(task: Task, name: str) -> tuple[PlayedEpisode, Verdict | None]:
            chat = ScriptedChat(task, scripts[name], renderer, config, Album(images))
            episode = await play_episode(worlds, task, chat, config, gateway=gateway)
            if episode.end is EpisodeEnd.TRUNCATED_LENGTH:
                cut.setdefault(name, []).append(chat.cut or "a conversation needs more than model.max_length")
            return episode, None if episode.end.is_error else await score(episode.transcript)

        async def play_all(task: Task) -> list[EpisodeSummary]:
            """One episode for each script; together they are the group of a reward that sees one."""
            return await summarized(scorer, await asyncio.gather(*(play(task, name) for name in scripts)))

        scripts: dict[str, Script] = {
            "nonsense": lambda task, messages: NONSENSE,
            "broken call": lambda task, messages: BROKEN_CALL,
        }
        if spec.expert is not None:
            scripts = {"expert": spec.expert, **scripts}
        elif all(task.answer is not None for task in tasks):
            scripts = {"expert": lambda task, messages: str(task.answer), **scripts}
        groups = await asyncio.gather(*(play_all(task) for task in tasks))
        played = [
            Played(name=name, episodes=list(episodes), cut=cut.get(name, []))
            for name, episodes in zip(scripts, zip(*groups, strict=True), strict=True)
        ]
    template = check_template(renderer)
    return Report(played=played, slowest=slowest, template=template, problems=_problems(played, template))


class _TimedSource:
    """Environments whose calls are timed."""

    def __init__(self, worlds: EnvironmentSource, slowest: dict[str, float]) -> None:
        self._open = _timed(worlds.open, "build", slowest)
        self._slowest = slowest
        self.lease = worlds.lease

    async def open(self, seed: int, task: Task) -> Environment | Program:
        world = await self._open(seed, task)
        for phase in ("run",) if isinstance(world, Program) else ("reset", "step", "close"):
            setattr(world, phase, _timed(getattr(world, phase), phase, self._slowest))
        return world


def _timed(call: Callable[P, Awaitable[T]], phase: str, slowest: dict[str, float]) -> Callable[P, Awaitable[T]]:
    """The same call; its time goes into `slowest`, if it is the longest of the phase so far."""

    async def timed(*arguments: P.args, **options: P.kwargs) -> T:
        started_s = time.perf_counter()
        try:
            return await call(*arguments, **options)
        finally:
            slowest[phase] = max(slowest.get(phase, 0.0), time.perf_counter() - started_s)

    return timed


class ScriptedChat(Chat):
    """The policy says what the script says; other agents say `NONSENSE`."""

    def __init__(self, task: Task, script: Script, renderer: Renderer, config: Config, album: Album) -> None:
        super().__init__(self._complete, renderer, config, album=album)
        self._task = task
        self._script = script
        self._scripted_renderer = renderer
        self._text = NONSENSE
        self._limit = config.rollout.max_new_tokens
        self.cut = ""
        """Why a reply was cut off."""

    async def reply(self, messages: Sequence[Message], *arguments: Any, agent: str = POLICY, **options: Any) -> Reply:
        self._text = self._script(self._task, messages) if agent == POLICY else NONSENSE
        return await super().reply(messages, *arguments, agent=agent, **options)

    async def _complete(self, request: GenerateRequest, /) -> Completion:
        ids = self._scripted_renderer.as_sampled(self._text)
        kept = ids[: request.max_new_tokens]
        if len(kept) < len(ids):
            limit = "rollout.max_new_tokens" if len(kept) == self._limit else "model.max_length"
            self.cut = f"a reply has {len(ids)} tokens, and {limit} leaves it {len(kept)}"
        return Completion(
            ids=kept,
            logprobs=[0.0] * len(kept),
            versions=[0] * len(kept),
            cache_versions=[0] * len(kept),
            finish_reason="stop" if len(kept) == len(ids) else "length",
        )


def _problems(played: Sequence[Played], template: Sequence[Trial]) -> list[str]:
    problems = []
    for one in played:
        failed = [episode for episode in one.episodes if not episode.is_trainable]
        for end, count in Counter(episode.end for episode in failed).items():
            shown = _different([episode.detail for episode in failed if episode.end is end])
            problems.append(f"{one.name}: {count} of {len(one.episodes)} episodes ended as {end.value}: {shown}")
        if failures := [episode.close_failure for episode in one.episodes if episode.close_failure]:
            shown = _different(failures)
            problems.append(f"{one.name}: {len(failures)} of {len(one.episodes)} environments did not close: {shown}")
        if one.name == "expert" and one.cut:
            example = f"{len(one.cut)} of {len(one.episodes)} episodes were cut off, such as: {one.cut[0]}"
            problems.append(f"expert: {example}; raise that setting, or choose a recipe with more room")
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


def _different(details: Sequence[str]) -> str:
    """The first of each kind. Of one kind are those whose first and last lines differ in paths and numbers only."""
    kinds: dict[tuple[str, ...], str] = {}
    for detail in details:
        lines = detail.strip().splitlines() or [""]
        words = f"{lines[0]} {lines[-1]}".split()
        varies = [any(character.isdigit() or character == "/" for character in word) for word in words]
        kinds.setdefault(tuple(word for word, does in zip(words, varies, strict=True) if not does), detail)
    return "; ".join(list(kinds.values())[:MAX_DETAILS])


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
