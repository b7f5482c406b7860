"""A thousand episodes at once on one runner: `rlflow bench envs`.

    EpisodeRunner, its environment process, chat template and tokenizer   as in a run
    engine                                                                replies after REPLY_S, costs nothing
    tools                                                                 take TOOL_S; every tenth one blocks its thread

What is measured is how late each of the two event loops comes to what is due: a wait of the runner's that starts again
every PROBE_S, and the tools that wait on the environment's loop. Lateness adds to every episode's time.
"""

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn, Self

from rlflow.config import Config
from rlflow.environments.pool import EnvironmentPool
from rlflow.envs.base import Environment, Prompt, Step
from rlflow.models.resolve import resolve_model
from rlflow.rewards.client import Scorer
from rlflow.rollout.client import RemoteCalls
from rlflow.rollout.requests import Completion, GenerateRequest
from rlflow.types import GroupOrder, Message, PlayedGroup, Task, Transcript, Verdict
from rlflow.workers.runner import EpisodeRunner

NUM_EPISODES = 1000
GROUP_SIZE = 8
NUM_STEPS = 4
"""Tool calls of one episode."""
TOOL_S = (0.1, 2.0)
REPLY_S = (0.05, 0.5)
REPLY_TOKENS = 32
PROBE_S = 0.01
QUESTION = "Find out who wrote the first program, and when. Use the search as often as you need to. "
FOUND = "Ada Lovelace published her notes on the analytical engine, among them a program, in 1843. " * 5


class SlowTools(Environment):
    """Each reply calls a tool; metric `late_<step>` says how many seconds too late an answer came."""

    def __init__(self, tool_s: tuple[float, float]) -> None:
        self._tool_s = tool_s
        self._random = random.Random()
        self._num_steps = 0

    async def reset(self, task: Task) -> Prompt:
        return Prompt(messages=list(task.prompt))

    async def step(self, reply: Message) -> Step:
        self._num_steps += 1
        wait_s = self._random.uniform(*self._tool_s)
        done = self._num_steps == NUM_STEPS
        messages = [] if done else [Message(role="user", content=FOUND)]
        if self._random.random() < 0.1:
            await asyncio.to_thread(time.sleep, wait_s)
            return Step(messages=messages, done=done)
        start_s = time.perf_counter()
        await asyncio.sleep(wait_s)
        late_s = time.perf_counter() - start_s - wait_s
        return Step(messages=messages, done=done, metrics={f"late_{self._num_steps}": late_s})


class _Engine:
    """Shaped like an actor's handle, so that no Ray is needed."""

    def __init__(self) -> None:
        self.num_tokens = 0

    @property
    def generate(self) -> Self:
        return self

    async def remote(self, request: GenerateRequest, /) -> Completion:
        await asyncio.sleep(random.uniform(*REPLY_S))
        self.num_tokens += REPLY_TOKENS
        ids = [5 + number % 50 for number in range(REPLY_TOKENS)]
        logprobs, versions = [-1.0] * REPLY_TOKENS, [0] * REPLY_TOKENS
        return Completion(ids=ids, logprobs=logprobs, versions=versions, cache_versions=versions, finish_reason="stop")

    @property
    def go_on(self) -> NoReturn:
        raise AssertionError("every reply is one part")


class _Scorer(Scorer):
    async def score(self, transcript: Transcript) -> Verdict:
        return Verdict(reward=1.0)


async def measure(num_episodes: int, tool_s: tuple[float, float] = TOOL_S) -> dict[str, Any]:
    """Event-loop lag in milliseconds, episodes a second, and the episodes that were lost or are still open.

    `num_episodes` is a multiple of GROUP_SIZE; `tool_s` are the shortest and the longest time of a tool.
    """
    pool = EnvironmentPool(partial(SlowTools, tool_s))
    await pool.start()
    try:
        config = Config()
        config.model.max_length = 8192
        calls = RemoteCalls(cancel=lambda call: None, is_lost=lambda error: False)
        runner = EpisodeRunner(config, resolve_model("tiny"), pool, _Scorer(), _Engine(), calls=calls)
        await _play(runner, GROUP_SIZE)  # first imports, first templates
        late_s: list[float] = []
        probe = asyncio.create_task(_probe(late_s))
        start_s = time.perf_counter()
        groups = await _play(runner, num_episodes)
        seconds = time.perf_counter() - start_s
        probe.cancel()
        return figures(groups, late_s, seconds, pool.num_open)
    finally:
        await pool.close()


async def _play(runner: EpisodeRunner, num_episodes: int) -> list[PlayedGroup]:
    prompt = (Message(role="system", content=FOUND), Message(role="user", content=QUESTION))
    orders = [
        GroupOrder(group_id=number, task=Task(id=f"t{number}", prompt=prompt), num_episodes=GROUP_SIZE, seed=number)
        for number in range(num_episodes // GROUP_SIZE)
    ]
    played = await asyncio.gather(*(runner.play(order) for order in orders))
    return [group[0] for group in played if isinstance(group[0], PlayedGroup)]


async def _probe(late_s: list[float]) -> None:
    while True:
        start_s = time.perf_counter()
        await asyncio.sleep(PROBE_S)
        late_s.append(time.perf_counter() - start_s - PROBE_S)


def figures(groups: Sequence[PlayedGroup], late_s: Sequence[float], seconds: float, num_open: int) -> dict[str, Any]:
    episodes = [episode for group in groups for episode in group.episodes]
    process_late_s = [
        value for episode in episodes for name, value in episode.metrics.items() if name.startswith("late_")
    ]
    return {
        "episodes": len(episodes),
        "seconds": seconds,
        "episodes_per_s": len(episodes) / seconds,
        "steps_per_s": len(episodes) * NUM_STEPS / seconds,
        **_percentiles("runner_lag", late_s),
        **_percentiles("environments_lag", process_late_s),
        "lost": sum(episode.end.is_error for episode in episodes),
        "open_at_end": num_open,
    }


def _percentiles(name: str, late_s: Sequence[float]) -> dict[str, float]:
    """In milliseconds."""
    cuts = statistics.quantiles(late_s, n=100)
    found = {"p50": cuts[49], "p99": cuts[98], "max": max(late_s)}
    return {f"{name}_{rank}_ms": 1000 * value for rank, value in found.items()}
