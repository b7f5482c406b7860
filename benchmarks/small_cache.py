"""An engine whose cache holds a third of the replies under way, on this machine: slices against one request a reply.

    python benchmarks/small_cache.py [--model smollm2-135m]

A slice is a quarter of a part, and the replies are in proportion, so that it takes minutes on a CPU. Both ways
sample the same number of tokens; neither is seeded. Recomputed tokens are what vLLM computed of prompts and replies
beyond the first time, by its own statistics.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from transformers import AutoModelForCausalLM

from rlflow.config import Config
from rlflow.models.resolve import resolve_model
from rlflow.rollout.requests import Completion, GenerateRequest
from rlflow.weights.shm.arena import Arena
from rlflow.workers.engine import engine as engine_module
from rlflow.workers.engine.engine import RolloutEngine
from rlflow.workers.engine.load import Pressure, pressure_gauge

NUM_REPLIES = 18
PROMPT_TOKENS = 32
REPLY_TOKENS = 224
SLICE_TOKENS = 64
CACHE_GB = 0.072
"""About 1,600 tokens of SmolLM2 in float32: six whole replies."""


class Counts:
    """What vLLM looked up in its cache, did not find, and so computed."""

    def __init__(self) -> None:
        self.computed = 0

    def gauge(self, pressure: Pressure) -> Any:
        counts = self

        class Gauge(pressure_gauge(pressure)):  # pyright: ignore[reportGeneralTypeIssues, reportUntypedBaseClass]
            def record(self, scheduler_stats: Any, *arguments: Any, **named: Any) -> None:
                super().record(scheduler_stats, *arguments, **named)
                if scheduler_stats is not None:
                    found = scheduler_stats.prefix_cache_stats
                    counts.computed += found.queries - found.hits + found.preempted_queries - found.preempted_hits

        return Gauge


async def sliced(engine: RolloutEngine, request: GenerateRequest) -> Completion:
    """The reply in calls of SLICE_TOKENS, each after the tokens so far."""
    reply = Completion(ids=[], logprobs=[], versions=[], cache_versions=[], finish_reason="length")
    while left := request.max_new_tokens - len(reply.ids):
        asked = replace(request, prompt_ids=request.prompt_ids + reply.ids, max_new_tokens=min(SLICE_TOKENS, left))
        reply.add(await engine.generate(asked))
    return reply


async def whole(engine: RolloutEngine, request: GenerateRequest) -> Completion:
    return await engine.generate(request)


async def measure(model_path: str) -> list[dict[str, Any]]:
    config = Config()
    config.model.max_length = 512
    config.rollout.kv_cache_gb = CACHE_GB
    counts, found = Counts(), []
    with patch.object(engine_module, "pressure_gauge", counts.gauge):
        engine = RolloutEngine(config, model_path, index=0, threads=2)
        await engine.start()
    engine._stop_token_ids = []  # replies of a fixed length: the same work for both
    model = AutoModelForCausalLM.from_pretrained(model_path)
    arena = Arena([(name, value.dtype, tuple(value.shape)) for name, value in model.named_parameters()])
    ways: list[tuple[str, Callable[[RolloutEngine, GenerateRequest], Awaitable[Completion]]]] = [
        ("slices", sliced),
        ("one request", whole),
    ]
    try:
        for version, (name, way) in enumerate(ways, start=1):
            # Also forgets the cache.
            await engine.load_weights(arena.stage(version, model.named_parameters()))
            before, computed = await engine.stats(), counts.computed
            requests = [
                GenerateRequest(
                    prompt_ids=[100 + 40 * number + place for place in range(PROMPT_TOKENS)],
                    seed=None,
                    max_new_tokens=REPLY_TOKENS,
                    prefix_key=None,
                )
                for number in range(NUM_REPLIES)
            ]
            started_s = time.perf_counter()
            replies = await asyncio.gather(*(way(engine, request) for request in requests))
            seconds = time.perf_counter() - started_s
            tokens, after = sum(len(reply.ids) for reply in replies), await engine.stats()
            found.append(
                {
                    "way": name,
                    "tokens": tokens,
                    "tokens_per_s": tokens / seconds,
                    "recomputed_per_token": (counts.computed - computed - NUM_REPLIES * PROMPT_TOKENS) / tokens,
                    "preempted": after.taken_back - before.taken_back,
                }
            )
    finally:
        await engine.shutdown()
        arena.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    for line in asyncio.run(measure(resolve_model(parser.parse_args().model))):
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
