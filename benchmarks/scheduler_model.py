"""What an engine does with more replies than its cache holds: vLLM's own scheduler and cache, without a GPU.

    live replies -> slices or requests -> vLLM's Scheduler -> made-up tokens, seconds by a model of one H100

The scheduler, its queue, its preemptions and the prefix cache are vLLM's; only the model runner is made up, which answers
every scheduled request with one token. Three ways to ask for a reply:

    slices    calls of 256 tokens, each of which gives up its cache and queues again; a limit that answers preemptions
    limited   one request a reply, and the same limit
    request   one request a reply, and vLLM's own queue: what rlflow does

    python benchmarks/scheduler_model.py [--ways slices,request] [--rows 0,1,2,3,4] [--seconds 120]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.update(VLLM_LOGGING_LEVEL="ERROR", VLLM_CPU_KVCACHE_SPACE="1", PYTHONHASHSEED="0")

SLICE_TOKENS = 256
BLOCK_TOKENS = 16
CACHE_TOKENS = 899_000
"""48 GiB at 57,344 bytes a token: 28 layers, 4 heads of keys and values, 128 elements, bfloat16 (Qwen2.5-7B)."""
STEP_TOKENS = 8192
MAX_RUNNING = 512
PROMPT_TOKENS = 500
GROUP_SIZE = 16
MAX_LENGTH = 32_768
ROWS = ((128, 4500), (256, 6500), (384, 6500), (640, 4500), (128, 14_000))
"""Live replies, and the mean length of prompt and reply when a reply is done."""

WEIGHT_BYTES = 15.2e9
CACHE_BYTES_PER_TOKEN = 57_344
FLOPS_PER_TOKEN = 15.2e9
BYTES_PER_S = 3.35e12 * 0.7
FLOPS_PER_S = 989e12 * 0.45
STEP_OVERHEAD_S = 0.002


def step_seconds(num_tokens: int, num_cached: int) -> float:
    """Seconds of one step on one H100: it reads all weights and the cache of what runs, and computes each token."""
    read_s = (WEIGHT_BYTES + num_cached * CACHE_BYTES_PER_TOKEN) / BYTES_PER_S
    return STEP_OVERHEAD_S + max(read_s, num_tokens * FLOPS_PER_TOKEN / FLOPS_PER_S)


class RunningLimit:
    """How many run at the same time: falls to three quarters of them at a preemption, rises by one when there is room."""

    def __init__(self, maximum: int) -> None:
        self.value = maximum
        self._maximum = maximum
        self._is_settling = False
        self._steps_with_room = 0

    def step(self, running: int, usage: float, preempted: int) -> None:
        self._is_settling = self._is_settling and running > self.value
        if preempted:
            self._steps_with_room = 0
            if not self._is_settling:
                self.value = max(1, min(self.value, int((running + preempted) * 0.75)))
                self._is_settling = running > self.value
        elif usage < 0.85 and running >= self.value:
            self._steps_with_room += 1
            if self._steps_with_room == 64:
                self._steps_with_room = 0
                self.value = min(self._maximum, self.value + 1)


@dataclass(slots=True, eq=False)
class Reply:
    tokens: list[int]
    """Prompt and what was sampled."""
    length: int
    """Tokens when it is done."""
    computed: int = 0
    """Tokens whose keys and values were computed at least once."""


@dataclass(slots=True)
class Counts:
    seconds: float = 0.0
    decoded: int = 0
    recomputed: int = 0
    preempted: int = 0
    running: int = 0
    steps: int = 0


class Replies:
    """Prompts that GROUP_SIZE replies share; prompt and reply together have half to one and a half of the mean length."""

    def __init__(self, mean_length: int) -> None:
        self._random = random.Random(7)
        self._mean = mean_length
        self._number = itertools.count()

    def next(self) -> Reply:
        group = next(self._number) // GROUP_SIZE
        prompt = [group * PROMPT_TOKENS + place for place in range(PROMPT_TOKENS)]
        return Reply(tokens=prompt, length=int(self._mean * self._random.uniform(0.5, 1.5)))

    def under_way(self) -> Reply:
        """As found in the middle of a run: long replies more often than short ones, and each anywhere in its course."""
        while True:
            reply = self.next()
            if self._random.uniform(0, 1.5 * self._mean) < reply.length:
                break
        sampled = self._random.randrange(reply.length - PROMPT_TOKENS)
        reply.tokens += [-self._random.randrange(1, 1 << 40) for _ in range(sampled)]
        return reply


@dataclass
class Engine:
    """vLLM's scheduler, and what is asked of it."""

    scheduler: Any
    hasher: Any
    way: str
    replies: Replies
    limit: RunningLimit = field(default_factory=lambda: RunningLimit(MAX_RUNNING))
    waiting: deque[Reply] = field(default_factory=deque)
    open: dict[str, Reply] = field(default_factory=dict)
    total: Counts = field(default_factory=Counts)
    _names: Any = field(default_factory=itertools.count)

    def admit(self) -> None:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        while self.waiting and (self.way == "request" or len(self.open) < self.limit.value):
            reply = self.waiting.popleft()
            left = reply.length - len(reply.tokens)
            asked = min(left, SLICE_TOKENS) if self.way == "slices" else left
            name = str(next(self._names))
            self.open[name] = reply
            sampling = SamplingParams(max_tokens=asked, ignore_eos=True)
            self.scheduler.add_request(Request(name, list(reply.tokens), sampling, None, block_hasher=self.hasher))

    def step(self) -> None:
        from vllm.v1.outputs import ModelRunnerOutput

        scheduled = self.scheduler.schedule()
        names = list(scheduled.num_scheduled_tokens)
        requests = self.scheduler.requests
        sampled: list[list[int]] = []
        cached = recomputed = decoded = 0
        for name in names:
            request, reply = requests[name], self.open[name]
            end, count = request.num_computed_tokens, scheduled.num_scheduled_tokens[name]
            recomputed += max(0, min(end, reply.computed) - (end - count))
            reply.computed = max(reply.computed, end)
            cached += end
            is_complete = end >= request.num_tokens
            sampled.append([-len(reply.tokens) - 100_000 * int(name)] if is_complete else [])
            decoded += is_complete
        preempted = len(scheduled.preempted_req_ids or ())
        output = ModelRunnerOutput(names, {name: index for index, name in enumerate(names)}, sampled)
        ended = self.scheduler.update_from_output(scheduled, output)
        for name, ids in zip(names, sampled, strict=True):
            self.open[name].tokens += ids
        for each in itertools.chain.from_iterable(outputs.outputs for outputs in ended.values()):
            if each.finish_reason is not None:
                self.finish(each.request_id)
        self.limit.step(len(self.scheduler.running), self.scheduler.kv_cache_manager.usage, preempted)
        total = self.total
        total.seconds += step_seconds(sum(scheduled.num_scheduled_tokens.values()), cached)
        total.decoded += decoded
        total.recomputed += recomputed
        total.preempted += preempted
        total.running += len(names)
        total.steps += 1

    def finish(self, name: str) -> None:
        reply = self.open.pop(name)
        self.waiting.append(reply if len(reply.tokens) < reply.length else self.replies.next())


def scheduler_of(folder: Path) -> tuple[Any, Any]:
    """vLLM's scheduler as on a GPU, and what hashes the blocks of a request."""
    import torch
    from transformers import LlamaConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        num_hidden_layers=1,
        hidden_size=64,
        num_attention_heads=2,
        max_position_embeddings=MAX_LENGTH,
    ).save_pretrained(folder)
    config = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        max_model_len=MAX_LENGTH,
        max_num_seqs=MAX_RUNNING,
        max_num_batched_tokens=STEP_TOKENS,
        enable_chunked_prefill=True,
        enable_prefix_caching=True,
        async_scheduling=False,
        load_format="dummy",
    ).create_engine_config()
    blocks = CACHE_TOKENS // BLOCK_TOKENS
    config.cache_config.block_size, config.cache_config.num_gpu_blocks = BLOCK_TOKENS, blocks
    spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=4, head_size=128, dtype=torch.bfloat16)
    cache = KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)])
    hash_function = get_hash_fn_by_name("sha256")
    init_none_hash(hash_function)
    scheduler = Scheduler(config, cache, StructuredOutputManager(config), block_size=BLOCK_TOKENS, log_stats=False)
    return scheduler, get_request_block_hasher(BLOCK_TOKENS, hash_function)


def measure(way: str, num_live: int, mean_length: int, seconds: float) -> dict[str, float]:
    """Rates over `seconds` of an engine's time, after as many to warm up."""
    with tempfile.TemporaryDirectory() as folder:
        scheduler, hasher = scheduler_of(Path(folder))
    replies = Replies(mean_length)
    engine = Engine(scheduler, hasher, way, replies)
    engine.waiting.extend(replies.under_way() for _ in range(num_live))
    for _ in range(2):
        engine.total = Counts()
        while engine.total.seconds < seconds:
            engine.admit()
            engine.step()
    total = engine.total
    return {
        "tokens_per_s": total.decoded / total.seconds,
        "recomputed_per_token": total.recomputed / total.decoded,
        "preempted_per_minute": 60 * total.preempted / total.seconds,
        "running": total.running / total.steps,
        "limit": engine.limit.value,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", default="slices,request")
    parser.add_argument("--rows", default="0,1,2,3,4")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(arguments)
    print("| live, mean length | way | tokens/s | recomputed a token | preemptions a minute | running |")
    print("|---|---|---|---|---|---|", flush=True)
    for row in map(int, asked.rows.split(",")):
        num_live, mean_length = ROWS[row]
        for way in asked.ways.split(","):
            started_s = time.perf_counter()
            found = measure(way, num_live, mean_length, asked.seconds)
            if asked.json:
                print(json.dumps({"way": way, "live": num_live, "mean_length": mean_length} | found), flush=True)
            print(
                f"| {num_live}, {mean_length:,} | {way} | {found['tokens_per_s']:,.0f} "
                f"| {found['recomputed_per_token']:.2f} | {found['preempted_per_minute']:.0f} "
                f"| {found['running']:.0f} |" + f" <!-- {time.perf_counter() - started_s:.0f} s -->",
                flush=True,
            )


if __name__ == "__main__":
    main()
