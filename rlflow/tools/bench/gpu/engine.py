"""The engine's stages: replies through rlflow's engine, the same through plain vLLM, and an engine that sleeps.

Each starts vLLM in the stage's own process. The weights come from the model's files, through shared memory.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from rlflow.config import Config, Placement
from rlflow.roles import StagedWeights
from rlflow.rollout.client import EngineClient, EngineHandle, RemoteCalls
from rlflow.rollout.requests import GenerateRequest
from rlflow.tools.bench.gpu.plan import Plan, Report
from rlflow.weights.shm.arena import Arena
from rlflow.workers.engine.engine import RolloutEngine
from rlflow.workers.engine.setup import cache_shape, check_engine, engine_arguments, set_environment, stop_token_ids
from rlflow.workers.trainer.policy import torch_dtype

PLAIN = ("worker_extension_cls", "logprobs_mode", "disable_log_stats", "enable_sleep_mode")
"""Arguments of our engine that a user of plain vLLM would not give."""
CALLS = RemoteCalls(cancel=lambda call: None, is_lost=lambda error: False)


class _Local:
    """An engine in this process, shaped like an actor's handle."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=getattr(self._engine, name))


def prompts(plan: Plan) -> tuple[list[list[int]], int]:
    """Prompts of random tokens, and how many tokens each reply has at most."""
    count, length, reply = (256, 512, 1024) if plan.on_gpu else (8, 32, 48)
    random = np.random.default_rng(0)
    return [random.integers(5, 250, length).tolist() for _ in range(count)], reply


def stream(plan: Plan, report: Report) -> None:
    """Tokens a second of all replies at once, as a runner asks for them, with log-probabilities and versions."""
    asyncio.run(_stream(plan, report))


async def _stream(plan: Plan, report: Report) -> None:
    asked, reply = prompts(plan)
    config = plan.config()
    async with _engine(config, plan, report) as (engine, _):
        client = EngineClient([cast(EngineHandle, _Local(engine))], CALLS, config.deadlines.start_s)
        await client.generate(_request(asked[0], 8))  # first kernels
        started = time.perf_counter()
        answers = await asyncio.gather(*(client.generate(_request(each, reply)) for each in asked))
        seconds = time.perf_counter() - started
    tokens = sum(len(answer.ids) for answer in answers)
    report.tell({"tokens_per_s": tokens / seconds, "tokens": tokens, "requests": len(asked)})


def plain(plan: Plan, report: Report) -> None:
    """The same prompts through vLLM's `LLM.generate`, without log-probabilities."""
    config = plan.config()
    set_environment(config, len(os.sched_getaffinity(0)), plan.on_gpu)
    from vllm import LLM, SamplingParams

    arguments: dict[str, Any] = engine_arguments(config, plan.model_path, 0, plan.on_gpu)
    arguments = {name: value for name, value in arguments.items() if name not in PLAIN}
    arguments["load_format"] = "auto"
    asked, reply = prompts(plan)
    stops = stop_token_ids(plan.model_path)
    started = time.perf_counter()
    llm = LLM(**arguments)
    report.tell({"start_s": time.perf_counter() - started})

    def generate(ids: list[list[int]], most: int) -> int:
        given: Any = [{"prompt_token_ids": each} for each in ids]
        sampling = SamplingParams(temperature=1.0, max_tokens=most, stop_token_ids=stops, detokenize=False)
        answers = llm.generate(given, sampling, use_tqdm=False)
        return sum(len(answer.outputs[0].token_ids) for answer in answers)

    generate(asked[:1], 8)  # first kernels
    started = time.perf_counter()
    tokens = generate(asked, reply)
    report.tell({"tokens_per_s": tokens / (time.perf_counter() - started), "tokens": tokens, "requests": len(asked)})


def sleep(plan: Plan, report: Report) -> None:
    """Seconds to sleep and to wake with new weights, and what a sleeping engine gives back of its GPU."""
    asyncio.run(_sleep(plan, report))


async def _sleep(plan: Plan, report: Report) -> None:
    config = plan.config()
    config.cluster.placement = Placement.colocated
    async with _engine(config, plan, report) as (engine, weights):
        for version in (1, 2):
            before = _free(plan)
            started = time.perf_counter()
            await engine.sleep()
            slept_s, freed = time.perf_counter() - started, _free(plan) - before
            staged = weights(version)
            started = time.perf_counter()
            await engine.load_weights(staged)
            report.tell({"sleep_s": slept_s, "wake_s": time.perf_counter() - started, "freed_gb": freed / 1e9})
        answer = await engine.generate(_request([7, 8, 9], 4))
        assert set(answer.versions) == {2}, "an engine that woke samples under what it was given"


@asynccontextmanager
async def _engine(config: Config, plan: Plan, report: Report) -> AsyncIterator[tuple[RolloutEngine, Any]]:
    """An engine that serves version 0, and what stages another version."""
    check_engine(config, cache_shape(config, plan.model_path), plan.model_path, plan.on_gpu)
    started = time.perf_counter()
    engine = RolloutEngine(config, plan.model_path, 0, len(os.sched_getaffinity(0)))
    specs = [(name, torch_dtype(config), tuple(tensor.shape)) for name, tensor in tensors_of(plan.model_path)]
    arena = Arena(specs)

    def staged(version: int) -> StagedWeights:
        return arena.stage(version, tensors_of(plan.model_path))

    try:
        await engine.start()
        report.tell({"start_s": time.perf_counter() - started})
        await engine.load_weights(staged(0))
        yield engine, staged
    finally:
        await engine.shutdown()
        arena.close()


def tensors_of(folder: str) -> Iterator[tuple[str, Tensor]]:
    """The model's parameters on disk."""
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                yield name, file.get_tensor(name)


def _request(prompt_ids: list[int], most: int) -> GenerateRequest:
    return GenerateRequest(prompt_ids=prompt_ids, seed=None, max_new_tokens=most, prefix_key=None)


def _free(plan: Plan) -> int:
    """Bytes of the GPU that no process holds."""
    return torch.cuda.mem_get_info()[0] if plan.on_gpu else 0
