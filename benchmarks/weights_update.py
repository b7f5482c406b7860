"""`rlflow bench weights`: from the trainer's shards into an engine that samples, beside saving and reloading a file.

    dense    versions through shared memory, each after an optimiser step: stage, then load
    reload   versions saved as safetensors, each loaded during a pause, as from a checkpoint
    deltas   versions on disk, of which only what changed is written: see `weights_on_disk`
    verify   the engine is given zeros, then a version; every parameter is compared

Requests run all the time. Dense and reload do not take turns: each would disturb the memory that the other keeps.

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

from weights_on_disk import Figures, deltas, take_step

from rlflow.config import Config, Dtype
from rlflow.errors import ConfigError, RunError
from rlflow.models.resolve import resolve_model
from rlflow.rollout.requests import GenerateRequest
from rlflow.rollout.samples import sample_of_reply
from rlflow.runtime.deadlines import within
from rlflow.runtime.environment import keep_memory, share_cpu
from rlflow.types import TrainSample

if TYPE_CHECKING:
    from weights_engine import MeasuredEngine, UpdateTimes

    from rlflow.roles import StagedWeights
    from rlflow.weights.shm.sender import SharedMemorySender
    from rlflow.workers.trainer.packed import TrainerBackend

ROUNDS = 6
"""The first is not counted: it pays for first pages."""
REQUESTS = 4
"""Running all the time."""
RUNNING_S = 60.0
"""Most seconds until all of them run. An engine that needs longer does not keep up."""
REPLY_TOKENS = 512
COPIES = 2
SAMPLES, SAMPLE_TOKENS = 8, 32
"""Replies of the model that each optimiser step trains on, and their length."""
PROMPT = "Write a short story about a ship that is lost at sea. "


@dataclass(kw_only=True, slots=True, frozen=True)
class DenseRound:
    """Seconds of one version through shared memory."""

    stage_s: float
    place_s: float
    """Copying from the shared memory to the engine's tensors; see `MeasuredWorker.bench_place`."""
    update: UpdateTimes


@dataclass(kw_only=True, slots=True, frozen=True)
class ReloadRound:
    """Seconds of one version through a file."""

    save_s: float
    pause_s: float


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
    from weights_engine import MeasuredEngine

    from rlflow.weights.shm.sender import SharedMemorySender
    from rlflow.workers.trainer.fsdp import FsdpTrainer

    engine = MeasuredEngine(config, model_path, index=0, threads=threads)
    # Before this process computes: vLLM may fork its own from it.
    await engine.start()
    try:
        trainer = FsdpTrainer(config, model_path, 0, 1, f"file://{folder}/dense")
        sender = SharedMemorySender(trainer, 0, 1)
        try:
            side = _Sides(trainer, sender, engine, folder, _prompt(model_path))
            figures, samples = await side.measure()
            return (figures | await side.verify(ROUNDS) if verify else figures), samples
        finally:
            trainer.close()
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
        self._trainer, self._sender, self._engine = trainer, sender, engine
        self._file = folder / "model.safetensors"
        self._prompt_ids = prompt_ids

    async def measure(self) -> tuple[Figures, list[TrainSample]]:
        """The figures of all rounds, and the model's replies, on which it was trained."""
        from weights_engine import sampling

        staged = _stage(self._sender, 0)
        await self._engine.update(staged)
        samples = await self._samples()
        copies_s = _copies(staged.num_bytes)
        dense: list[DenseRound] = []
        reloads: list[ReloadRound] = []
        async with sampling(self._engine, [self._request(seed, REPLY_TOKENS) for seed in range(REQUESTS)]):
            for version in range(1, ROUNDS + 1):
                await asyncio.to_thread(take_step, self._trainer, samples)
                dense.append(await self._dense(version))
            for _ in range(ROUNDS):
                await asyncio.to_thread(take_step, self._trainer, samples)
                reloads.append(await self._reload())
        return summarize(dense[1:], reloads[1:], copies_s[1:], staged.num_bytes), samples

    async def _dense(self, version: int) -> DenseRound:
        print(f"shared memory, round {version} of {ROUNDS}", file=sys.stderr, flush=True)
        started = time.perf_counter()
        staged = await asyncio.to_thread(_stage, self._sender, version)
        stage_s = time.perf_counter() - started
        await self._until_all_run()
        update = await self._engine.update(staged)
        return DenseRound(stage_s=stage_s, place_s=await self._engine.place(staged), update=update)

    async def _reload(self) -> ReloadRound:
        print("save and reload", file=sys.stderr, flush=True)
        started = time.perf_counter()
        await asyncio.to_thread(self._save)
        save_s = time.perf_counter() - started
        await self._until_all_run()
        return ReloadRound(save_s=save_s, pause_s=await self._engine.reload(self._file))

    async def _until_all_run(self) -> None:
        """A request whose reply has just ended is about to be sent again."""
        await within(f"waiting until {REQUESTS} requests run", RUNNING_S, self._all_run())

    async def _all_run(self) -> None:
        while (await self._engine.stats()).running < REQUESTS:
            await asyncio.sleep(0.01)

    def _save(self) -> None:
        from safetensors.torch import save_file

        dtypes = {name: dtype for name, dtype, _ in self._trainer.parameter_specs()}
        whole = {name: each.to(dtypes[name]).contiguous() for name, each in self._trainer.full_parameters()}
        save_file(whole, self._file)

    def _request(self, seed: int, tokens: int) -> GenerateRequest:
        return GenerateRequest(prompt_ids=self._prompt_ids, seed=seed, max_new_tokens=tokens, prefix_key=None)

    async def _samples(self) -> list[TrainSample]:
        """Replies of the model; every second one counts as better than the mean."""
        requests = [self._request(seed, SAMPLE_TOKENS) for seed in range(SAMPLES)]
        replies = await asyncio.gather(*map(self._engine.generate, requests))
        return [
            TrainSample(advantage=float(1 - 2 * (index % 2)), sample=sample_of_reply(request, reply))
            for index, (request, reply) in enumerate(zip(requests, replies, strict=True))
        ]

    async def verify(self, version: int) -> Figures:
        """Give the engine zeros, then a version, and compare every parameter, bit for bit.

        Raises RunError when the engine has not taken the zeros: then nothing would be proven.
        """
        import torch

        from rlflow.weights.shm.arena import Arena

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


def _stage(sender: SharedMemorySender, version: int) -> StagedWeights:
    staged = sender.stage(version)
    assert staged is not None, "a single rank writes the arena"
    return staged


def summarize(
    dense: Sequence[DenseRound], reloads: Sequence[ReloadRound], copies_s: Sequence[float], num_bytes: int
) -> Figures:
    """Medians over the rounds; the ratios are of medians, and of reload to dense."""
    median = statistics.median
    megabytes, copy_s = num_bytes / 1e6, median(copies_s)
    stage_s, place_s = median([each.stage_s for each in dense]), median([each.place_s for each in dense])
    updates = [each.update for each in dense]
    load_s, pauses = median([each.total_s for each in updates]), [each.pause_s for each in updates]
    save_s, reload_pause_s = median([each.save_s for each in reloads]), median([each.pause_s for each in reloads])
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
        "reload/save_s": save_s,
        "reload/pause_s": reload_pause_s,
        "reload/total_s": save_s + reload_pause_s,
        "reload/pause_ratio": reload_pause_s / median(pauses),
        "reload/total_ratio": (save_s + reload_pause_s) / (stage_s + load_s),
    }
