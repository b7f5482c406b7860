"""What keeping the cache across updates changes (rollout.keep_cache): log-probabilities, and tokens a second.

    python benchmarks/keep_cache.py [--folder DIR] [--updates 20]

    versions   SmolLM2 learns sums as in grpo_arithmetic, on one group a step to be quick; one step a version
    replies    long replies to questions of the same kind; the same versions arrive in the middle, with and without it
    figures    |the trainer's log-probability at the version that sampled - what the engine recorded|, by version

A stage whose files are in the folder is not done again. The folder takes 0.6 GB a version.

`of its own version` is the difference by the age of the cache: the versions between the oldest weights that computed
it and those that sampled. Without keep_cache every token counts at the age that its reply has, and only rounding is
left. `of later versions` says for scale how far the policy itself moves: the difference of a token that was sampled
without keep_cache to what the trainer says so many versions later, which is what a correction meets at that staleness.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from rlflow.config import Config
from rlflow.groups.sampler import TaskSampler
from rlflow.models.resolve import resolve_model
from rlflow.recipes.minimal_grpo import MinimalGrpo
from rlflow.rollout.requests import GenerateRequest
from rlflow.workers.engine.engine import RolloutEngine

LIVE = 8
"""Replies that are sampled at the same time."""
REPLY_TOKENS = 120
TOKENS_PER_UPDATE = 24 * LIVE
"""Between two updates, so that a reply meets four or five."""
AGES = range(5)
EVALUATED = 12
"""Replies of each way that the trainer computes."""
QUESTION = "Explain in detail and step by step how to add {} and {}, with an example from daily life for each step."


@dataclass(kw_only=True)
class Counts:
    """What vLLM's scheduler reports: one of the `stat_loggers` of its AsyncLLM."""

    sampled: int = 0
    recomputed: int = 0
    """Tokens of replies under way whose keys and values were computed once more."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def record(self, scheduler: Any, iteration: Any, *_: Any, **__: Any) -> None:
        if iteration is not None:
            self.sampled += iteration.num_generation_tokens
        if scheduler is not None and (found := scheduler.prefix_cache_stats) is not None:
            self.recomputed += found.preempted_queries - found.preempted_hits
        self.changed.set()

    async def until_sampled(self, number: int) -> None:
        while self.sampled < number:
            self.changed.clear()
            await self.changed.wait()


class CountingEngine(RolloutEngine):
    async def start(self) -> None:
        await super().start()
        self.counts = Counts()
        manager: Any = self._engine.logger_manager
        manager.stat_loggers.append(self.counts)


@dataclass(kw_only=True, slots=True, frozen=True)
class Reply:
    prompt_ids: list[int]
    ids: list[int]
    logprobs: list[float]
    versions: list[int]
    cache_versions: list[int]


def settings(updates: int) -> Config:
    """grpo_arithmetic_async, without its correction, which the minimal loop does not have."""
    config = Config()
    config.run.steps = updates
    config.model.max_length = 512
    config.rollout.max_new_tokens = 8
    config.algorithm.groups_per_step = 1
    config.staleness.max_versions = 4
    config.trainer.learning_rate = 1e-5
    config.trainer.warmup_steps = 2
    return config


class Benchmark:
    def __init__(self, folder: Path, updates: int) -> None:
        self._folder, self._updates = folder, updates
        config = settings(updates)
        self._loop = MinimalGrpo(config)
        self._engine = CountingEngine(config, resolve_model(config.model.path), index=0, threads=2)
        self._loop.engine = self._engine

    async def sample(self) -> None:
        """The first two stages."""
        await self._engine.start()
        try:
            await self._make_versions()
            for keeps in (True, False):
                if not self._replies_file(keeps).exists():
                    await self._sample_across_updates(keeps)
        finally:
            await self._engine.shutdown()
            self._loop.arena.close()

    async def _make_versions(self) -> None:
        if self._version_file(self._updates).exists():
            return
        sampler = TaskSampler(self._loop.spec.tasks(), 0)
        group_ids = count(1)
        for version in range(self._updates + 1):
            parameters = {name: each.detach() for name, each in self._loop.model.named_parameters()}
            await self._load(version, parameters)
            save_file(parameters, self._version_file(version))
            if version < self._updates:
                group = await self._loop.play(next(group_ids), sampler.next()[0])
                while len(set(group.rewards)) == 1:  # nothing to learn
                    group = await self._loop.play(next(group_ids), sampler.next()[0])
                update = self._loop.update(version, [group])
                print(f"version {version + 1}: reward {update.reward:.2f}", file=sys.stderr, flush=True)

    async def _sample_across_updates(self, keeps: bool) -> None:
        """Replies of one way; version v of the weights is version v + `base` of the engine, which only goes up."""
        self._loop.config.rollout.keep_cache = keeps
        base = 1000 * (1 + (not keeps))
        await self._load(base, load_file(self._version_file(0)))
        counts, replies, seeds = self._engine.counts, [], count()
        is_over = False

        async def keep_sampling() -> None:
            while not is_over:
                replies.append(await self._reply(next(seeds), base))

        sampling = [asyncio.create_task(keep_sampling()) for _ in range(LIVE)]
        await counts.until_sampled(counts.sampled + TOKENS_PER_UPDATE)
        started, sampled, recomputed = time.perf_counter(), counts.sampled, counts.recomputed
        for version in range(1, self._updates + 1):
            await self._load(base + version, load_file(self._version_file(version)))
            await counts.until_sampled(sampled + version * TOKENS_PER_UPDATE)
            print(f"{'kept' if keeps else 'recomputed'}: update {version}", file=sys.stderr, flush=True)
        speed = (counts.sampled - sampled) / (time.perf_counter() - started)
        found = {
            "tokens_per_s": speed,
            "recomputed": counts.recomputed - recomputed,
            "sampled": counts.sampled - sampled,
        }
        is_over = True
        await asyncio.gather(*sampling)
        self._replies_file(keeps).write_text(json.dumps({**found, "replies": [asdict(reply) for reply in replies]}))

    async def _reply(self, seed: int, base: int) -> Reply:
        conversation = [{"role": "user", "content": QUESTION.format(2 + seed % 7, 3 + seed % 5)}]
        text = self._loop.tokenizer.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
        prompt_ids = self._loop.tokenizer.encode(str(text), add_special_tokens=False)
        request = GenerateRequest(prompt_ids=prompt_ids, seed=seed, max_new_tokens=REPLY_TOKENS, prefix_key=None)
        reply = await self._engine.generate(request)
        return Reply(
            prompt_ids=prompt_ids,
            ids=reply.ids,
            logprobs=reply.logprobs,
            versions=[version - base for version in reply.versions],
            cache_versions=[version - base for version in reply.cache_versions],
        )

    async def _load(self, version: int, parameters: dict[str, torch.Tensor]) -> None:
        ordered = ((name, parameters[name]) for name, _ in self._loop.model.named_parameters())
        await self._engine.load_weights(self._loop.arena.stage(version, ordered))

    def figures(self) -> str:
        """The last stage: a table."""
        both = {keeps: json.loads(self._replies_file(keeps).read_text()) for keeps in (True, False)}
        replies = {keeps: _spread([Reply(**each) for each in both[keeps]["replies"]]) for keeps in both}
        own: dict[bool, dict[int, list[float]]] = {keeps: defaultdict(list) for keeps in both}
        later: dict[int, list[float]] = defaultdict(list)
        for version in range(self._updates + 1):
            self._loop.model.load_state_dict(load_file(self._version_file(version)), strict=False)
            for keeps in both:
                for reply in replies[keeps]:
                    self._add(keeps, version, reply, own[keeps], later)
            print(f"figures: version {version}", file=sys.stderr, flush=True)
        lines = ["| versions | kept | recomputed | of later versions | tokens |", "|---|---|---|---|---|"]
        for age in AGES:
            columns = (own[True][age], own[False][age], later[age])
            cells = [f"{np.mean(each):.2g} ({np.quantile(each, 0.99):.2g})" if each else "-" for each in columns]
            lines.append(f"| {age} | {' | '.join(cells)} | {', '.join(str(len(each)) for each in columns)} |")
        for keeps, found in both.items():
            rest = (
                f"{found['tokens_per_s']:.1f} tokens/s, {found['recomputed']} recomputed for {found['sampled']} sampled"
            )
            lines.append(f"{'kept' if keeps else 'recomputed'}: {rest}")
        return "\n".join(lines)

    def _add(
        self, keeps: bool, version: int, reply: Reply, own: dict[int, list[float]], later: dict[int, list[float]]
    ) -> None:
        """The differences of a reply to the model, which holds `version`."""
        ages = [version - sampled for sampled in reply.versions]
        if not any(age == 0 or (age in AGES and not keeps) for age in ages):
            return
        for token, gap in enumerate(_gaps(self._loop.model, reply)):
            if ages[token] == 0:
                own[version - (reply.cache_versions[token] if keeps else reply.versions[0])].append(gap)
            if ages[token] in AGES and not keeps:
                later[ages[token]].append(gap)

    def _version_file(self, version: int) -> Path:
        return self._folder / f"version_{version}.safetensors"

    def _replies_file(self, keeps: bool) -> Path:
        return self._folder / f"replies_{'kept' if keeps else 'recomputed'}.json"


def _spread(replies: Sequence[Reply]) -> list[Reply]:
    """EVALUATED of them, from the first to the last."""
    return [replies[int(index)] for index in np.linspace(0, len(replies) - 1, EVALUATED)]


def _gaps(model: PreTrainedModel, reply: Reply) -> list[float]:
    """|log-probability under the model - what the engine recorded| of each token."""
    start = len(reply.prompt_ids)
    ids = torch.tensor([reply.prompt_ids + reply.ids])
    with torch.no_grad():
        logits = model(ids[:, :-1]).logits[0, start - 1 :]
    found = logits.log_softmax(-1).gather(-1, ids[0, start:, None])[:, 0]
    return (found - torch.tensor(reply.logprobs)).abs().tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where the stages leave their files; a temporary one by default")
    parser.add_argument("--updates", type=int, default=20, help="optimiser steps (%(default)s)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rlflow-bench-") as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        benchmark = Benchmark(folder, arguments.updates)
        asyncio.run(benchmark.sample())
        print(benchmark.figures())


if __name__ == "__main__":
    main()
