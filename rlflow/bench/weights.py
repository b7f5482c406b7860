"""`rlflow bench weights`: from the trainer's shards into an engine that samples, beside saving and reloading a file.

    dense    a version through shared memory, after an optimiser step: stage, then load
    reload   the same version: saved as safetensors, then loaded during a pause, as from a checkpoint
    deltas   see `weights_deltas`
    verify   the engine is given zeros, then a version; every parameter is compared

Dense and reload take turns, while requests run. Each weight is copied twice on its way, from the shard to the shared
memory and from there to the engine's tensors; `dense/copy_share` is the rate of these copies over that of one long copy
between two buffers of the same size, and `dense/share` the rate at which weights arrive over the same, which is half of
it. What the engine does to the weights after that, such as packing them for its kernels, is in `dense/load_s`.
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

from rlflow.compute import keep_memory, share_cpu
from rlflow.config import Config, Dtype
from rlflow.errors import ConfigError, RunError
from rlflow.models import resolve_model
from rlflow.rollout.requests import GenerateRequest
from rlflow.types import TrainSample

if TYPE_CHECKING:
    from rlflow.bench.weights_engine import MeasuredEngine, Update
    from rlflow.roles import StagedWeights
    from rlflow.weights.shm_sender import SharedMemorySender
    from rlflow.workers.trainer.base import TrainerBackend

ROUNDS = 5
"""The first is not counted: it pays for first pages, and the workers learn how to load."""
REQUESTS = 4
"""Running all the time."""
REPLY_TOKENS = 512
COPIES = 2
SAMPLES, SAMPLE_TOKENS = 8, 32
"""Of each optimiser step; the model's own replies."""
PROMPT = "Write a short story about a ship that is lost at sea. "

Figures = dict[str, float | list[float]]


@dataclass(kw_only=True, slots=True, frozen=True)
class Round:
    """Seconds of one version by either way."""

    stage_s: float
    place_s: float
    copy_s: float
    """Of one copy between two buffers of as many bytes."""
    update: Update
    save_s: float
    reload_pause_s: float


def weights(overrides: Sequence[str], *, verify: bool) -> Figures:
    """Medians over the rounds; with `verify` also the number of parameters that arrived as they were staged.

    Raises ConfigError for other settings than model.path and model.dtype, RunError when an update fails.
    """
    config = configured(overrides)
    model_path = resolve_model(config.model.path)
    threads = max(1, len(os.sched_getaffinity(0)) // 2)  # trainer and engine compute at the same time
    share_cpu(threads)
    keep_memory()
    with tempfile.TemporaryDirectory(prefix="rlflow-bench-") as folder:
        figures, samples = asyncio.run(_with_engine(config, model_path, threads, Path(folder), verify))
        print("deltas", file=sys.stderr, flush=True)
        from rlflow.bench.weights_deltas import deltas

        return figures | deltas(config, model_path, samples, Path(folder))


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
    config: Config, model_path: str, threads: int, folder: Path, verify: bool
) -> tuple[Figures, list[TrainSample]]:
    """The figures, and samples to train on."""
    from rlflow.bench.weights_engine import MeasuredEngine
    from rlflow.weights.shm_sender import SharedMemorySender
    from rlflow.workers.trainer.fsdp import FsdpTrainer

    engine = MeasuredEngine(config, model_path, index=0, threads=threads)
    # Before this process computes: the engine's processes are copies of it.
    await engine.start()
    try:
        trainer = FsdpTrainer(config, model_path, 0, 1, "")
        sender = SharedMemorySender(trainer, 0, 1, "")
        try:
            side = _Sides(trainer, sender, engine, folder, _prompt(model_path))
            figures, samples = await side.measure()
            return (figures | await side.verify(ROUNDS) if verify else figures), samples
        finally:
            sender.close()
    finally:
        await engine.shutdown()


def _prompt(model_path: str) -> list[int]:
    from transformers import AutoTokenizer

    return list(AutoTokenizer.from_pretrained(model_path)(PROMPT).input_ids)


class _Sides:
    """A trainer and an engine with what is between them."""

    def __init__(
        self,
        trainer: TrainerBackend,
        sender: SharedMemorySender,
        engine: MeasuredEngine,
        folder: Path,
        prompt_ids: list[int],
    ) -> None:
        import torch

        self._trainer, self._sender, self._engine = trainer, sender, engine
        self._file = folder / "model.safetensors"
        self._prompt_ids = prompt_ids
        num_bytes = _stage(sender, 0).num_bytes
        self._buffers = torch.zeros(2, num_bytes, dtype=torch.uint8).fill_(1)

    async def measure(self) -> tuple[Figures, list[TrainSample]]:
        """The figures of all rounds, and the model's replies, which it was trained on."""
        await self._engine.update(_stage(self._sender, 0))
        requests = [self._request(seed, REPLY_TOKENS) for seed in range(REQUESTS)]
        samples = await self._samples()
        rounds: list[Round] = []
        # Imported here and not above, because it imports vLLM's setup.
        from rlflow.bench.weights_engine import sampling

        async with sampling(self._engine, requests):
            for version in range(1, ROUNDS + 1):
                print(f"round {version} of {ROUNDS}", file=sys.stderr, flush=True)
                await asyncio.to_thread(take_step, self._trainer, samples)
                rounds.append(await self._round(version))
        staged_bytes = self._buffers.shape[1]
        return summarize(rounds[1:], staged_bytes), samples

    async def _round(self, version: int) -> Round:
        started = time.perf_counter()
        staged = await asyncio.to_thread(_stage, self._sender, version)
        stage_s = time.perf_counter() - started
        copy_s = await asyncio.to_thread(self._copy)
        if (await self._engine.stats()).running < REQUESTS:
            raise RunError("the requests that should run during an update have ended; their error is above")
        update = await self._engine.update(staged)
        place_s = await self._engine.place(staged)
        started = time.perf_counter()
        await asyncio.to_thread(self._save)
        save_s = time.perf_counter() - started
        reload_pause_s = await self._engine.reload(self._file)
        return Round(
            stage_s=stage_s,
            place_s=place_s,
            copy_s=copy_s,
            update=update,
            save_s=save_s,
            reload_pause_s=reload_pause_s,
        )

    def _copy(self) -> float:
        """Seconds."""
        started = time.perf_counter()
        self._buffers[0].copy_(self._buffers[1])
        return time.perf_counter() - started

    def _save(self) -> None:
        from safetensors.torch import save_file

        dtypes = {name: dtype for name, dtype, _ in self._trainer.parameter_specs()}
        whole = {name: each.to(dtypes[name]).contiguous() for name, each in self._trainer.full_parameters()}
        save_file(whole, self._file)

    def _request(self, seed: int, tokens: int) -> GenerateRequest:
        return GenerateRequest(prompt_ids=self._prompt_ids, seed=seed, max_new_tokens=tokens, prefix_key=None)

    async def _samples(self) -> list[TrainSample]:
        """Replies of the model; every second one was better than the mean."""
        import numpy as np

        from rlflow.types import Sample

        requests = [self._request(seed, SAMPLE_TOKENS) for seed in range(SAMPLES)]
        replies = await asyncio.gather(*map(self._engine.generate, requests))
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

    async def verify(self, version: int) -> Figures:
        """Give the engine zeros, then a version, and compare every parameter, bit for bit.

        Raises RunError when the engine has not taken the zeros: then nothing would be proven.
        """
        import torch

        from rlflow.weights.arena import Arena

        specs = self._trainer.parameter_specs()
        arena = Arena(specs)
        try:
            zeros = arena.stage(version + 1, ((name, torch.zeros(shape)) for name, _, shape in specs))
            await self._engine.update(zeros)
            if different := (await self._engine.compare_weights(zeros))["different"]:
                raise RunError(f"{len(different)} parameters of the engine are not zero after zeros were loaded")
        finally:
            arena.close()
        staged = _stage(self._sender, version + 2)
        zeroed = await self._engine.compare_weights(staged)
        await self._engine.update(staged)
        report = await self._engine.compare_weights(staged)
        return {
            "verify/parameters": len(staged.slots),
            "verify/different_before": len(zeroed["different"]),
            "verify/equal": report["num_equal"],
            "verify/different": len(report["different"]),
            "verify/unverified": len(report["unverified"]),
        }


def _stage(sender: SharedMemorySender, version: int) -> StagedWeights:
    staged = sender.stage(version)
    assert staged is not None, "a single rank writes the arena"
    return staged


def take_step(trainer: TrainerBackend, samples: Sequence[TrainSample]) -> None:
    """Raises RunError when the gradient was not finite, so that nothing changed."""
    trainer.accumulate([[samples]])
    if not trainer.step().applied:
        raise RunError("an optimiser step of the measurement was not applied: its gradient is not finite")


def summarize(rounds: Sequence[Round], num_bytes: int) -> Figures:
    """Medians; the ratios are of medians, and above 1 where we are better."""

    def median(values: Sequence[float]) -> float:
        return statistics.median(values)

    stage_s, place_s = median([each.stage_s for each in rounds]), median([each.place_s for each in rounds])
    copy_s = median([each.copy_s for each in rounds])
    load_s, pauses = median([each.update.total_s for each in rounds]), [each.update.pause_s for each in rounds]
    reload_pause_s = median([each.reload_pause_s for each in rounds])
    save_s = median([each.save_s for each in rounds])
    megabytes = num_bytes / 1e6
    return {
        "rounds": len(rounds),
        "dense/mb": megabytes,
        "dense/stage_s": stage_s,
        "dense/stage_mb_per_s": megabytes / stage_s,
        "dense/place_s": place_s,
        "dense/mb_per_s": megabytes / (stage_s + place_s),
        "copy_mb_per_s": megabytes / copy_s,
        "dense/share": copy_s / (stage_s + place_s),
        "dense/copy_share": COPIES * copy_s / (stage_s + place_s),
        "dense/load_s": load_s,
        "dense/prepare_s": median([sum(each.update.buckets_s) for each in rounds]),
        "dense/longest_bucket_s": max(max(each.update.buckets_s, default=0.0) for each in rounds),
        "dense/total_s": stage_s + load_s,
        "pause/median_s": median(pauses),
        "pause/worst_s": max(pauses),
        "pause/vllm_s": median([each.update.vllm_s for each in rounds]),
        "pause/swap_s": median([each.update.swap_s for each in rounds]),
        "pause/verify_s": median([each.update.verify_s for each in rounds]),
        "reload/save_s": save_s,
        "reload/pause_s": reload_pause_s,
        "reload/total_s": save_s + reload_pause_s,
        "reload/pause_ratio": reload_pause_s / median(pauses),
        "reload/total_ratio": (save_s + reload_pause_s) / (stage_s + load_s),
    }
