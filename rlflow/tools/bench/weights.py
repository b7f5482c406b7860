"""`rlflow bench weights`: new weights for an engine that samples, from the trainer's shards through shared memory.

    dense    versions, each after an optimiser step: stage, then load, while requests run
    verify   the engine is given zeros, then a version; every parameter is compared

In a checkout, `benchmarks/weights_beside.py` adds saving and reloading a file, and versions on disk.

Each weight is copied twice: from the shard to the shared memory, and from there to the engine's tensors. Neither copy
can be faster than one long copy between two buffers of the same size, by as many threads, while nothing else runs.
`dense/copy_share` is the rate of our copies over the rate of that one. `dense/share` is the rate at which weights
arrive over the same: half as much, because the two copies follow each other. What the engine does to the weights after
that, such as packing them for its kernels, is in `dense/prepare_s` and `dense/load_s`.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlflow.config import Config, Dtype
from rlflow.errors import ConfigError, RunError
from rlflow.models.resolve import resolve_model
from rlflow.rollout.requests import GenerateRequest
from rlflow.runtime.environment import keep_memory, share_cpu
from rlflow.types import Sample, TrainSample

if TYPE_CHECKING:
    from rlflow.roles import StagedWeights
    from rlflow.tools.bench.weights_engine import MeasuredEngine, UpdateTimes
    from rlflow.weights.shm.sender import SharedMemorySender
    from rlflow.workers.trainer.base import TrainerBackend

ROUNDS = 6
"""The first is not counted: it pays for first pages."""
REQUESTS = 4
"""Running all the time."""
REPLY_TOKENS = 512
COPIES = 2
SAMPLES, SAMPLE_TOKENS = 8, 32
"""Replies of the model that each optimiser step trains on, and their length."""
PROMPT = "Write a short story about a ship that is lost at sea. "

Figures = dict[str, float | list[float]]


@dataclass(kw_only=True, slots=True, frozen=True)
class DenseRound:
    """Seconds of one version through shared memory."""

    stage_s: float
    place_s: float
    """Copying from the shared memory to the engine's tensors; see `MeasuredWorker.bench_place`."""
    update: UpdateTimes


def weights(overrides: Sequence[str], *, verify: bool, session: type[Session] | None = None) -> Figures:
    """Medians over the rounds; with `verify` also the number of parameters that arrived as they were staged.

    Raises ConfigError for other settings than model.path and model.dtype, RunError when an update fails.
    """
    session = session or Session
    config = configured(overrides)
    model_path = resolve_model(config.model.path)
    threads = max(1, len(os.sched_getaffinity(0)) // 2)  # trainer and engine compute at the same time
    share_cpu(threads)
    keep_memory()
    with tempfile.TemporaryDirectory(prefix="rlflow-bench-") as folder:
        figures, samples = asyncio.run(_with_engine(session, config, model_path, threads, Path(folder), verify))
        return figures | session.afterwards(config, model_path, samples, Path(folder))


def configured(overrides: Sequence[str]) -> Config:
    config = Config()
    for override in overrides:
        key, _, value = override.partition("=")
        if key == "model.path":
            config.model.path = value
        elif key == "model.dtype" and value in list(Dtype):
            config.model.dtype = Dtype(value)
        else:
            raise ConfigError(f"bench weights takes model.path and model.dtype ({', '.join(Dtype)}); got {override}")
    return config


async def _with_engine(
    session: type[Session], config: Config, model_path: str, threads: int, folder: Path, verify: bool
) -> tuple[Figures, list[TrainSample]]:
    """The figures, and samples to train on."""
    from transformers import AutoTokenizer

    from rlflow.weights.shm.sender import SharedMemorySender
    from rlflow.workers.trainer.fsdp import FsdpTrainer

    engine = session.make_engine(config, model_path, threads)
    # Before this process computes: vLLM may fork its own from it.
    await engine.start()
    try:
        trainer = FsdpTrainer(config, model_path, 0, 1, f"file://{folder}/dense")
        sender = SharedMemorySender(trainer, 0, 1)
        try:
            prompt_ids = list(AutoTokenizer.from_pretrained(model_path)(PROMPT).input_ids)
            one = session(trainer, sender, engine, folder, prompt_ids)
            figures = await one.measure()
            return (figures | await one.verify(ROUNDS) if verify else figures), one.samples
        finally:
            trainer.close()
            sender.close()
    finally:
        await engine.shutdown()


class Session:
    """A trainer and an engine, with the weights between them."""

    def __init__(
        self,
        trainer: TrainerBackend,
        sender: SharedMemorySender,
        engine: MeasuredEngine,
        folder: Path,
        prompt_ids: list[int],
    ) -> None:
        self.trainer, self.engine, self.folder = trainer, engine, folder
        self.samples: list[TrainSample] = []
        """The model's own replies, which each step trains on."""
        self._sender = sender
        self._prompt_ids = prompt_ids

    @staticmethod
    def make_engine(config: Config, model_path: str, threads: int) -> MeasuredEngine:
        from rlflow.tools.bench.weights_engine import MeasuredEngine

        return MeasuredEngine(config, model_path, index=0, threads=threads)

    async def beside(self, dense: Figures) -> Figures:
        """Another way to the same weights, measured while the same requests run; here there is none."""
        return {}

    @staticmethod
    def afterwards(config: Config, model_path: str, samples: Sequence[TrainSample], folder: Path) -> Figures:
        """What is measured without an engine, when it has ended; here nothing is."""
        return {}

    async def measure(self) -> Figures:
        from rlflow.tools.bench.weights_engine import sampling

        staged = self._stage(0)
        await self.engine.update(staged)
        self.samples = await self._sample()
        copies_s = _copies(staged.num_bytes)
        dense: list[DenseRound] = []
        async with sampling(self.engine, [self._request(seed, REPLY_TOKENS) for seed in range(REQUESTS)]):
            for version in range(1, ROUNDS + 1):
                await asyncio.to_thread(take_step, self.trainer, self.samples)
                dense.append(await self._dense_round(version))
            figures = summarize(dense[1:], copies_s[1:], staged.num_bytes)
            return figures | await self.beside(figures)

    async def check_running(self) -> None:
        if (running := (await self.engine.stats()).running) < REQUESTS:
            raise RunError(f"{REQUESTS} requests must run during an update; {running} do: the engine does not keep up")

    async def verify(self, version: int) -> Figures:
        """Give the engine zeros, then a version, and compare every parameter, bit for bit.

        Raises RunError when the engine has not taken the zeros: then nothing would be proven.
        """
        import torch

        from rlflow.weights.shm.arena import Arena

        specs = self.trainer.parameter_specs()
        arena = Arena(specs)
        try:
            zeros = arena.stage(version + 1, ((name, torch.zeros(shape)) for name, _, shape in specs))
            await self.engine.update(zeros)
            if different := (await self.engine.compare_weights(zeros))["different"]:
                raise RunError(f"{len(different)} parameters of the engine are not zero after zeros were loaded")
        finally:
            arena.close()
        staged = self._stage(version + 2)
        zeroed = await self.engine.compare_weights(staged)
        await self.engine.update(staged)
        report = await self.engine.compare_weights(staged)
        return {
            "verify/parameters": len(staged.slots),
            "verify/different_before": len(zeroed["different"]),
            "verify/equal": report["num_equal"],
            "verify/different": len(report["different"]),
            "verify/unverified": len(report["unverified"]),
        }

    async def _dense_round(self, version: int) -> DenseRound:
        print(f"shared memory, round {version} of {ROUNDS}", file=sys.stderr, flush=True)
        started = time.perf_counter()
        staged = await asyncio.to_thread(self._stage, version)
        stage_s = time.perf_counter() - started
        await self.check_running()
        update = await self.engine.update(staged)
        return DenseRound(stage_s=stage_s, place_s=await self.engine.place(staged), update=update)

    def _stage(self, version: int) -> StagedWeights:
        staged = self._sender.stage(version)
        assert staged is not None, "a single rank writes the arena"
        return staged

    def _request(self, seed: int, tokens: int) -> GenerateRequest:
        return GenerateRequest(prompt_ids=self._prompt_ids, seed=seed, max_new_tokens=tokens, prefix_key=None)

    async def _sample(self) -> list[TrainSample]:
        """Replies of the model; every second one counts as better than the mean."""
        import numpy as np

        requests = [self._request(seed, SAMPLE_TOKENS) for seed in range(SAMPLES)]
        replies = await asyncio.gather(*map(self.engine.generate, requests))
        return [
            TrainSample(
                advantage=float(1 - 2 * (index % 2)),
                sample=Sample(
                    prompt_ids=np.array(self._prompt_ids, np.int32),
                    completion_ids=np.array(reply.ids, np.int32),
                    loss_mask=np.ones(len(reply.ids), np.bool_),
                    logprobs=np.array(reply.logprobs, np.float32),
                    versions=np.array(reply.versions, np.int32),
                ),
            )
            for index, reply in enumerate(replies)
        ]


def _copies(num_bytes: int) -> list[float]:
    """Seconds of each copy from one buffer to another."""
    import torch

    # Filled, so that all their pages are there.
    source, target = torch.full((num_bytes,), 1, dtype=torch.uint8), torch.full((num_bytes,), 2, dtype=torch.uint8)
    seconds: list[float] = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - started)
    return seconds


def take_step(trainer: TrainerBackend, samples: Sequence[TrainSample]) -> None:
    """Raises RunError when the gradient was not finite, so that nothing changed."""
    trainer.accumulate([[samples]])
    if not trainer.step().applied:
        raise RunError("an optimiser step of the measurement was not applied: its gradient is not finite")


def summarize(dense: Sequence[DenseRound], copies_s: Sequence[float], num_bytes: int) -> Figures:
    """Medians over the rounds; the shares are of medians."""
    median = statistics.median
    megabytes, copy_s = num_bytes / 1e6, median(copies_s)
    stage_s, place_s = median([each.stage_s for each in dense]), median([each.place_s for each in dense])
    updates = [each.update for each in dense]
    load_s, pauses = median([each.total_s for each in updates]), [each.pause_s for each in updates]
    return {
        "rounds": len(dense),
        "copy_mb_per_s": megabytes / copy_s,
        "dense/mb": megabytes,
        "dense/stage_s": stage_s,
        "dense/stage_mb_per_s": megabytes / stage_s,
        "dense/place_s": place_s,
        "dense/mb_per_s": megabytes / (stage_s + place_s),
        "dense/share": copy_s / (stage_s + place_s),
        "dense/copy_share": COPIES * copy_s / (stage_s + place_s),
        "dense/prepare_s": median([sum(each.buckets_s) for each in updates]),
        "dense/longest_bucket_s": max(max(each.buckets_s, default=0.0) for each in updates),
        "dense/load_s": load_s,
        "dense/total_s": stage_s + load_s,
        "pause/median_s": median(pauses),
        "pause/worst_s": max(pauses),
        "pause/vllm_s": median([each.vllm_s for each in updates]),
        "pause/swap_s": median([each.swap_s for each in updates]),
        "pause/verify_s": median([each.verify_s for each in updates]),
    }
