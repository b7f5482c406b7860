"""What keeping the cache across updates changes (rollout.keep_cache): log-probabilities, and tokens a second.

    python benchmarks/keep_cache.py [--folder DIR] [--updates 20]

    versions   SmolLM2 learns sums with the optimiser settings of grpo_arithmetic_async, one step a version
    replies    long replies to questions of the same kind; the same versions arrive in the middle, with and without it
    figures    |the trainer's log-probability at the version that sampled - what the engine recorded|, by version

A stage whose files are in the folder is not done again. The folder takes 0.6 GB a version.

`kept` is the difference by the age of the cache: the versions between the oldest weights that computed it and those
that sampled. `recomputed` is the same without keep_cache, by the age of the reply's first token: only rounding is left.
`later` says for scale how far the policy itself moves: the difference of tokens that were sampled without keep_cache to
what the trainer says so many versions later, which is what a correction meets at that staleness.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from rlflow.config import Config
from rlflow.environments.find import load_environment
from rlflow.envs.arithmetic.reward import is_right
from rlflow.models.resolve import resolve_model
from rlflow.rollout.requests import GenerateRequest
from rlflow.types import Message, Sample, Task, TrainSample
from rlflow.weights.shm.arena import Arena
from rlflow.workers.engine.engine import RolloutEngine
from rlflow.workers.trainer.fsdp import FsdpTrainer

GROUPS_PER_STEP, GROUP_SIZE = 1, 8
LIVE = 8
"""Replies that are sampled at the same time."""
REPLY_TOKENS = 80
TOKENS_PER_UPDATE = 16 * LIVE
"""Between two updates, so that a reply meets four or five."""
AGES = range(5)
EVALUATED = 6
"""Replies of each way that the trainer computes."""
QUESTION = "Explain in detail and step by step how to add {} and {}, with an example from daily life for each step."

Parameters = Mapping[str, torch.Tensor]
Gaps = defaultdict[int, list[float]]
"""Versions -> |log-probability difference| of tokens."""


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

    def sample(self) -> Sample:
        return Sample(
            prompt_ids=np.array(self.prompt_ids, np.int32),
            completion_ids=np.array(self.ids, np.int32),
            loss_mask=np.ones(len(self.ids), np.bool_),
            logprobs=np.array(self.logprobs, np.float32),
            versions=np.array(self.versions, np.int32),
            cache_versions=np.array(self.cache_versions, np.int32),
        )


def settings(updates: int) -> Config:
    """grpo_arithmetic_async, with room for long replies."""
    config = Config()
    config.run.steps = updates
    config.model.max_length = 256
    config.staleness.max_versions = 4
    config.algorithm.corrections = {"tis": {}}
    config.trainer.learning_rate = 1e-5
    config.trainer.warmup_steps = 2
    config.trainer.micro_batch_tokens = 2048
    return config


class Benchmark:
    def __init__(self, folder: Path, updates: int) -> None:
        self._folder, self._updates = folder, updates
        self._config = settings(updates)
        self._model_path = resolve_model(self._config.model.path)
        self._tokenizer = AutoTokenizer.from_pretrained(self._model_path)
        self._engine = CountingEngine(self._config, self._model_path, index=0, threads=2)

    async def sample(self) -> None:
        """The first two stages."""
        missing = [keeps for keeps in (True, False) if not self._replies_file(keeps).exists()]
        if not missing:
            return
        # Before this process computes: vLLM may fork its own from it.
        await self._engine.start()
        trainer = FsdpTrainer(self._config, self._model_path, rank=0, world_size=1, rendezvous="")
        self._arena = Arena(trainer.parameter_specs())
        try:
            if not self._version_file(self._updates).exists():
                await self._make_versions(trainer)
            for keeps in missing:
                await self._sample_across_updates(keeps)
        finally:
            await self._engine.shutdown()
            trainer.close()
            self._arena.close()

    async def _make_versions(self, trainer: FsdpTrainer) -> None:
        tasks = iter(load_environment(self._config.env, self._config.reward).tasks())
        for version in range(self._updates + 1):
            parameters = {name: each.detach().clone() for name, each in trainer.full_parameters()}
            save_file(parameters, self._version_file(version))
            if version < self._updates:
                await self._load(version, parameters)
                groups = [await self._informative(tasks) for _ in range(GROUPS_PER_STEP)]
                trainer.version = version
                trainer.accumulate([groups])
                assert trainer.step().applied, "the gradient is finite"
                print(f"version {version + 1}", file=sys.stderr, flush=True)

    async def _informative(self, tasks: Iterator[Task]) -> list[TrainSample]:
        """A group of the next task that has right and wrong replies."""
        while True:
            task = next(tasks)
            replies = await asyncio.gather(*(self._reply(task.prompt, seed, 8) for seed in range(GROUP_SIZE)))
            texts = [str(self._tokenizer.decode(reply.ids, skip_special_tokens=True)) for reply in replies]
            rewards = np.array([is_right(task, text) for text in texts], np.float64)
            if rewards.std():
                advantages = (rewards - rewards.mean()) / rewards.std(ddof=1)
                return [
                    TrainSample(sample=reply.sample(), advantage=float(advantage))
                    for reply, advantage in zip(replies, advantages, strict=True)
                ]

    async def _sample_across_updates(self, keeps: bool) -> None:
        """Replies of one way. Version v of the weights is `base` + v of the engine, whose versions only go up."""
        self._config.rollout.keep_cache = keeps
        base = 1000 if keeps else 2000
        await self._load(base, load_file(self._version_file(0)))
        counts, replies, seeds, is_over = self._engine.counts, list[Reply](), count(), False

        async def keep_sampling() -> None:
            while not is_over:
                seed = next(seeds)
                prompt = Message(role="user", content=QUESTION.format(2 + seed % 7, 3 + seed % 5))
                replies.append(await self._reply([prompt], seed, REPLY_TOKENS, base))

        sampling = [asyncio.create_task(keep_sampling()) for _ in range(LIVE)]
        await counts.until_sampled(counts.sampled + TOKENS_PER_UPDATE)
        started, sampled, recomputed = time.perf_counter(), counts.sampled, counts.recomputed
        for version in range(1, self._updates + 1):
            await self._load(base + version, load_file(self._version_file(version)))
            await counts.until_sampled(sampled + version * TOKENS_PER_UPDATE)
            print(f"keep_cache={keeps}, update {version}", file=sys.stderr, flush=True)
        seconds, sampled = time.perf_counter() - started, counts.sampled - sampled
        found = {"seconds": seconds, "sampled": sampled, "recomputed": counts.recomputed - recomputed}
        is_over = True
        await asyncio.gather(*sampling)
        self._replies_file(keeps).write_text(json.dumps(found | {"replies": [asdict(reply) for reply in replies]}))

    async def _reply(self, prompt: Sequence[Message], seed: int, max_new_tokens: int, base: int = 0) -> Reply:
        conversation = [{"role": each["role"], "content": each["content"]} for each in prompt]
        text = self._tokenizer.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
        prompt_ids = self._tokenizer.encode(str(text), add_special_tokens=False)
        request = GenerateRequest(prompt_ids=prompt_ids, seed=seed, max_new_tokens=max_new_tokens, prefix_key=None)
        reply = await self._engine.generate(request)
        return Reply(
            prompt_ids=prompt_ids,
            ids=reply.ids,
            logprobs=reply.logprobs,
            versions=[version - base for version in reply.versions],
            cache_versions=[version - base for version in reply.cache_versions],
        )

    async def _load(self, version: int, parameters: Parameters) -> None:
        staged = await asyncio.to_thread(self._arena.stage, version, parameters.items())
        await self._engine.load_weights(staged)

    def figures(self) -> str:
        """The last stage: a table, the 99th percentile in brackets."""
        model = AutoModelForCausalLM.from_pretrained(self._model_path, dtype=torch.float32)
        found = {keeps: json.loads(self._replies_file(keeps).read_text()) for keeps in (True, False)}
        replies = {keeps: _spread([Reply(**each) for each in found[keeps]["replies"]]) for keeps in found}
        kept, recomputed, later = Gaps(list), Gaps(list), Gaps(list)
        for version in range(self._updates + 1):
            model.load_state_dict(load_file(self._version_file(version)), strict=False)
            for reply, now in _with_tokens_of(range(version, version + 1), replies[True]):
                for token, gap in _gaps(model, reply, now):
                    kept[version - reply.cache_versions[token]].append(gap)
            for reply, now in _with_tokens_of(range(version - AGES[-1], version + 1), replies[False]):
                for token, gap in _gaps(model, reply, now):
                    later[version - reply.versions[token]].append(gap)
                    if reply.versions[token] == version:
                        recomputed[version - reply.versions[0]].append(gap)
            print(f"figures of version {version}", file=sys.stderr, flush=True)
        columns = {"kept": kept, "recomputed": recomputed, "later": later}
        lines = [f"| versions | {' | '.join(columns)} | tokens |", "|---|---|---|---|---|"]
        for age in AGES:
            gaps = [column[age] for column in columns.values()]
            cells = [f"{np.mean(each):.2g} ({np.quantile(each, 0.99):.2g})" if each else "-" for each in gaps]
            lines.append(f"| {age} | {' | '.join(cells)} | {', '.join(str(len(each)) for each in gaps)} |")
        for keeps, each in found.items():
            sampled, recomputed_tokens = each["sampled"], each["recomputed"]
            speed = f"{sampled / each['seconds']:.1f} tokens/s"
            lines.append(f"keep_cache={keeps}: {speed}, {recomputed_tokens} recomputed for {sampled} sampled")
        return "\n".join(lines)

    def _version_file(self, version: int) -> Path:
        return self._folder / f"version_{version}.safetensors"

    def _replies_file(self, keeps: bool) -> Path:
        return self._folder / f"replies_{'kept' if keeps else 'recomputed'}.json"


def _spread(replies: Sequence[Reply]) -> list[Reply]:
    """EVALUATED of them, from the first to the last."""
    return [replies[int(index)] for index in np.linspace(0, len(replies) - 1, EVALUATED)]


def _with_tokens_of(versions: range, replies: Sequence[Reply]) -> Iterator[tuple[Reply, list[int]]]:
    """The replies with tokens that these versions sampled, and which tokens these are."""
    for reply in replies:
        if tokens := [index for index, version in enumerate(reply.versions) if version in versions]:
            yield reply, tokens


def _gaps(model: PreTrainedModel, reply: Reply, tokens: Sequence[int]) -> Iterator[tuple[int, float]]:
    """Each of the tokens, and |its log-probability under the model - what the engine recorded|."""
    start = len(reply.prompt_ids)
    ids = torch.tensor([reply.prompt_ids + reply.ids[: tokens[-1] + 1]])
    with torch.no_grad():
        logits = model(ids[:, :-1]).logits[0, start - 1 :]
    logprobs = logits.log_softmax(-1).gather(-1, ids[0, start:, None])[:, 0].tolist()
    for token in tokens:
        yield token, abs(logprobs[token] - reply.logprobs[token])


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
