"""`rlflow bench train`: one optimiser step on one process, packed, against a padded loop over the same samples.

Each side runs in a process of its own, in turn, so that each has its own peak of memory and meets the same machine.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rlflow.errors import RunError
from rlflow.types import Sample, TrainSample

if TYPE_CHECKING:
    from rlflow.batching import PackedBatch
    from rlflow.config import Config

ROUNDS = 3
STEPS = 3
"""Timed steps of a round, after one that is not."""
TIMEOUT_S = 1800.0
MATMUL_SIZE = 2048
VOCABULARY = 49152


@dataclass(kw_only=True, slots=True, frozen=True)
class Workload:
    groups: int
    group_size: int
    prompt: int
    """Tokens."""
    shortest: int
    """Tokens of a completion."""
    longest: int

    def samples(self) -> list[list[TrainSample]]:
        random = np.random.default_rng(0)
        return [self._group(random) for _ in range(self.groups)]

    def _group(self, random: np.random.Generator) -> list[TrainSample]:
        prompt = random.integers(0, VOCABULARY, self.prompt).astype(np.int32)
        return [_sample(random, prompt, self._length(random)) for _ in range(self.group_size)]

    def _length(self, random: np.random.Generator) -> int:
        return int(random.integers(self.shortest, self.longest + 1))


WORKLOADS = {
    "ragged": Workload(groups=4, group_size=8, prompt=256, shortest=32, longest=256),
    "long_prompt": Workload(groups=2, group_size=16, prompt=512, shortest=64, longest=64),
}
SIDES = {"ragged": ("packed", "padded"), "long_prompt": ("packed", "unshared")}


def training() -> dict[str, float]:
    """Seconds a step of each side, ratios, tokens/s, and what share of the machine's own matmul speed is used.

    Raises RunError when a side fails.
    """
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    for _ in range(ROUNDS):
        for workload, sides in SIDES.items():
            for side in sides:
                found.setdefault((workload, side), []).append(_measure(workload, side))
    figures: dict[str, float] = {}
    for (workload, side), runs in found.items():
        for name in runs[0]:
            figures[f"{workload}/{side}/{name}"] = statistics.median(run[name] for run in runs)
    for workload, (ours, other) in SIDES.items():
        slow, fast = figures[f"{workload}/{other}/step_s"], figures[f"{workload}/{ours}/step_s"]
        figures[f"{workload}/speed_up"] = slow / fast
        more, less = figures[f"{workload}/{other}/peak_mb"], figures[f"{workload}/{ours}/peak_mb"]
        figures[f"{workload}/memory_ratio"] = more / less
    return figures


def _measure(workload: str, side: str) -> dict[str, float]:
    command = [sys.executable, "-m", "rlflow.bench_train", workload, side]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        raise RunError(f"the side {side} of {workload} ended with exit code {done.returncode}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _sample(random: np.random.Generator, prompt: Any, length: int) -> TrainSample:
    sample = Sample(
        prompt_ids=prompt,
        completion_ids=random.integers(0, VOCABULARY, length).astype(np.int32),
        loss_mask=np.ones(length, np.bool_),
        logprobs=random.normal(-10, 0.5, length).astype(np.float32),
        versions=np.zeros(length, np.int32),
    )
    return TrainSample(sample=sample, advantage=float(random.normal()))


# -- one side, in a process of its own


def run_side(workload: str, side: str) -> dict[str, float]:
    """Seconds and figures of one side; `side` is packed, unshared or padded."""
    from rlflow.config import Config

    config = Config()
    groups = WORKLOADS[workload].samples()
    step, executed = (_padded if side == "padded" else _packed)(config, groups, side != "unshared")
    step()
    started = time.perf_counter()
    for _ in range(STEPS):
        step()
    step_s = (time.perf_counter() - started) / STEPS
    tokens = sum(sample.sample.num_tokens for group in groups for sample in group)
    figures = {
        "step_s": step_s,
        "tokens_per_s": tokens / step_s,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    if executed:
        figures |= {"gflop_per_s": executed / step_s / 1e9, "matmul_share": executed / step_s / _matmul_speed()}
    return figures


def _packed(
    config: Config, groups: Sequence[list[TrainSample]], shares_prompts: bool
) -> tuple[Callable[[], None], float]:
    """The trainer's step, and the floating-point operations in it."""
    from rlflow.batching import pack
    from rlflow.models import resolve_model
    from rlflow.workers.trainer import packed as trainer_module
    from rlflow.workers.trainer.fsdp import FsdpTrainer

    trainer = FsdpTrainer(config, resolve_model(config.model.path), 0, 1, "")
    if not shares_prompts:
        trainer_module.pack = lambda micro_batch: pack(micro_batch, share_prompts=False)
    rows = [pack([group], shares_prompts) for group in groups]
    shape = trainer._policy.model.config
    executed = sum(operations(row, trainer._shapes, shape.hidden_size, shape.num_hidden_layers) for row in rows)

    def step() -> None:
        trainer.accumulate([[group] for group in groups])
        trainer.step()

    return step, executed


def operations(row: PackedBatch, shapes: dict[str, tuple[int, ...]], hidden: int, layers: int) -> float:
    """Floating-point operations of forward and backward over a row: 2 a weight and token forward, twice that backward;
    attention 4 * hidden a layer for each query and key; the output layer for each state that predicts."""
    weights = sum(np.prod(shape) for name, shape in shapes.items() if len(shape) == 2 and "embed" not in name)
    prompts, completions = row.prompt_lengths, row.completion_lengths
    of_prompt = prompts[row.completion_prompts] if len(completions) else completions
    pairs = (prompts * (prompts + 1) / 2).sum() + (completions * (of_prompt + (completions + 1) / 2)).sum()
    states = len(np.unique(row.loss_positions))
    forward = 2 * weights * len(row.input_ids) + 4 * hidden * layers * pairs + 2 * hidden * VOCABULARY * states
    return float(3 * forward)


def _padded(config: Config, groups: Sequence[list[TrainSample]], _: bool) -> tuple[Callable[[], None], float]:
    """What one writes by hand: a padded batch a group, logits of the completions, the same loss and optimiser."""
    import torch
    from transformers import AutoModelForCausalLM

    from rlflow.models import resolve_model
    from rlflow.workers.trainer.packed import adamw

    model = AutoModelForCausalLM.from_pretrained(resolve_model(config.model.path), dtype=torch.float32)
    optimizer = adamw(config, list(model.parameters()))
    num_tokens = sum(len(sample.sample.completion_ids) for group in groups for sample in group)

    def step() -> None:
        for group in groups:
            samples = [one.sample for one in group]
            longest = max(len(sample.completion_ids) for sample in samples)
            width = len(samples[0].prompt_ids) + longest
            ids = torch.zeros(len(samples), width, dtype=torch.int64)
            mask = torch.zeros(len(samples), longest, dtype=torch.bool)
            behaviour = torch.zeros(len(samples), longest)
            for index, sample in enumerate(samples):
                whole = np.concatenate([sample.prompt_ids, sample.completion_ids]).astype(np.int64)
                ids[index, : len(whole)] = torch.from_numpy(whole)
                mask[index, : len(sample.completion_ids)] = True
                behaviour[index, : len(sample.logprobs)] = torch.from_numpy(sample.logprobs)
            is_real = torch.cat([torch.ones(len(samples), width - longest, dtype=torch.bool), mask], dim=1)
            logits = model(input_ids=ids, attention_mask=is_real.long(), logits_to_keep=longest + 1).logits[:, :-1]
            logprobs = logits.log_softmax(-1).gather(2, ids[:, -longest:, None])[:, :, 0]
            ratio = (logprobs - behaviour).clamp(-20, 20).exp()
            advantage = torch.tensor([[one.advantage] for one in group], dtype=torch.float32)
            loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.28))
            ((loss * mask).sum() / num_tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.trainer.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step, 0.0


def _matmul_speed() -> float:
    """Floating-point operations a second of the fastest of some large float32 products on this machine."""
    import torch

    left, right = torch.randn(MATMUL_SIZE, MATMUL_SIZE), torch.randn(MATMUL_SIZE, MATMUL_SIZE)
    best = float("inf")
    for _ in range(8):
        started = time.perf_counter()
        torch.mm(left, right)
        best = min(best, time.perf_counter() - started)
    return 2 * MATMUL_SIZE**3 / best


if __name__ == "__main__":
    print(json.dumps(run_side(*sys.argv[1:])))
