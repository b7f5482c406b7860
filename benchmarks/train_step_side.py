"""One side of `rlflow bench train`, in a process of its own; the last line printed is one JSON object.

python benchmarks/train_step_side.py packed|unshared|padded SAMPLES.npz MODEL
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from rlflow.batching import PackedBatch, pack, plan_micro_batches
from rlflow.config import Config
from rlflow.runtime.environment import keep_memory, share_cpu
from rlflow.types import EpisodeEnd, EpisodeSummary, Sample, TrainSample

MATMUL_SIZE = 2048
Group = list[TrainSample]
Step = Callable[[], float]
"""Takes an optimiser step; the norm of its gradient."""


def run_side(side: str, groups: Sequence[Group], model: str) -> dict[str, float]:
    """Figures of the second step; the first pays for caches and first allocations."""
    config = Config()
    if side == "padded":
        step, row_tokens, operations = _padded(config, groups, model), _padded_tokens(groups), None
    else:
        micro_batches = _micro_batches(config, groups) if side == "packed" else _unshared(config, groups)
        step, row_tokens, operations = _packed(config, micro_batches, model, side == "packed")
    grad_norm = step()
    started = time.perf_counter()
    step()
    step_s = time.perf_counter() - started
    samples = [one.sample for group in groups for one in group]
    figures = {
        "step_s": step_s,
        "tokens_per_s": sum(sample.num_tokens for sample in samples) / step_s,
        "row_tokens": row_tokens,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "grad_norm": grad_norm,
    }
    if operations is not None:
        figures |= {"flop_per_s": operations / step_s, "matmul_share": operations / step_s / _matmul_speed()}
    return figures


def read_groups(path: Path) -> list[Group]:
    """What `Workload.write` wrote."""
    with np.load(path, allow_pickle=False) as arrays:
        prompts, completions, lengths, logprobs, advantages = (
            arrays[name] for name in ("prompts", "completions", "lengths", "logprobs", "advantages")
        )
    return [
        [
            _sample(prompt, completion[:length], logprob[:length], advantage)
            for completion, length, logprob, advantage in zip(*of_group, strict=True)
        ]
        for prompt, *of_group in zip(prompts, completions, lengths, logprobs, advantages, strict=True)
    ]


def _sample(prompt: np.ndarray, completion: np.ndarray, logprobs: np.ndarray, advantage: float) -> TrainSample:
    sample = Sample(
        prompt_ids=prompt.astype(np.int32),
        completion_ids=completion.astype(np.int32),
        loss_mask=np.ones(len(completion), np.bool_),
        logprobs=logprobs,
        versions=np.zeros(len(completion), np.int32),
    )
    return TrainSample(sample=sample, advantage=float(advantage))


def _micro_batches(config: Config, groups: Sequence[Group]) -> list[list[Group]]:
    """As the trainer plans them."""
    episodes = [[_summary(one.sample) for one in group] for group in groups]
    (plans,) = plan_micro_batches(episodes, 1, config.trainer.micro_batch_tokens)
    return [[[groups[piece.group][index] for index in piece.episodes] for piece in plan.pieces] for plan in plans]


def _summary(sample: Sample) -> EpisodeSummary:
    length = len(sample.completion_ids)
    return EpisodeSummary(
        end=EpisodeEnd.COMPLETED,
        reward=0.0,
        num_prompt_tokens=len(sample.prompt_ids),
        num_completion_tokens=length,
        num_loss_tokens=length,
        oldest_version=0,
        newest_version=0,
    )


def _unshared(config: Config, groups: Sequence[Group]) -> list[list[Group]]:
    """As many samples at once as fit when each has its own prompt."""
    samples = [one for group in groups for one in group]
    at_once = config.trainer.micro_batch_tokens // max(one.sample.num_tokens for one in samples)
    return [[samples[start : start + at_once]] for start in range(0, len(samples), at_once)]


def _packed(
    config: Config, micro_batches: list[list[Group]], model: str, shares_prompts: bool
) -> tuple[Step, float, float]:
    """The trainer's own step, the tokens that go through the model, and the floating-point operations in it."""
    from rlflow.workers.trainer.fsdp import FsdpTrainer
    from rlflow.workers.trainer.packed import MicroBatch

    class Trainer(FsdpTrainer):
        def _lay_out(self, micro_batch: MicroBatch) -> PackedBatch:
            return pack(micro_batch, share_prompts=shares_prompts)

    trainer = Trainer(config, model, 0, 1, "")
    rows = [trainer._lay_out(micro_batch) for micro_batch in micro_batches]
    shapes = {name: shape for name, _, shape in trainer.parameter_specs()}
    row_tokens = sum(len(row.input_ids) for row in rows)

    def step() -> float:
        trainer.accumulate(micro_batches)
        return trainer.step().grad_norm

    return step, row_tokens, sum(operations_of(row, shapes) for row in rows)


def operations_of(row: PackedBatch, shapes: dict[str, tuple[int, ...]]) -> float:
    """Floating-point operations of forward and backward over a row, for a model whose output layer is its embedding.

    Forward: 2 a weight and token; attention, 4 * width of the queries a layer for each query and key; the output layer
    for each state that predicts. Backward: twice that.
    """
    vocabulary, hidden = next(shape for name, shape in shapes.items() if "embed_tokens" in name)
    weights = sum(np.prod(shape) for name, shape in shapes.items() if len(shape) == 2 and "embed_tokens" not in name)
    queries = sum(shape[0] for name, shape in shapes.items() if "q_proj" in name)
    prompts, completions = row.prompt_lengths, row.completion_lengths
    of_prompt = prompts[row.completion_prompts]
    pairs = (prompts * (prompts + 1) / 2).sum() + (completions * (of_prompt + (completions + 1) / 2)).sum()
    states = len(np.unique(row.loss_positions))
    forward = 2 * weights * len(row.input_ids) + 4 * queries * pairs + 2 * hidden * vocabulary * states
    return float(3 * forward)


def _padded_tokens(groups: Sequence[Group]) -> float:
    return sum(len(group) * max(one.sample.num_tokens for one in group) for group in groups)


def _padded(config: Config, groups: Sequence[Group], model_path: str) -> Step:
    """What one writes by hand: a padded batch a group, logits of the completions only, the same loss and optimiser."""
    import torch
    from transformers import AutoModelForCausalLM

    from rlflow.workers.trainer.optimizers import adamw

    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    optimizer = adamw(config.trainer, list(model.parameters()))
    num_tokens = sum(len(one.sample.completion_ids) for group in groups for one in group)

    def accumulate(group: Group) -> None:
        samples = [one.sample for one in group]
        prompt, longest = len(samples[0].prompt_ids), max(len(sample.completion_ids) for sample in samples)
        ids = torch.zeros(len(samples), prompt + longest, dtype=torch.int64)
        is_real, behaviour = torch.zeros_like(ids), torch.zeros(len(samples), longest)
        for index, sample in enumerate(samples):
            ids[index, :prompt] = torch.from_numpy(sample.prompt_ids)
            ids[index, prompt : sample.num_tokens] = torch.from_numpy(sample.completion_ids)
            behaviour[index, : len(sample.logprobs)] = torch.from_numpy(sample.logprobs)
            is_real[index, : sample.num_tokens] = 1
        logits = model(input_ids=ids, attention_mask=is_real, logits_to_keep=longest + 1).logits[:, :-1]
        logprobs = logits.log_softmax(-1).gather(2, ids[:, prompt:, None])[:, :, 0]
        ratio = (logprobs - behaviour).exp()
        advantage = torch.tensor([[one.advantage] for one in group])
        loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.28))
        ((loss * is_real[:, prompt:]).sum() / num_tokens).backward()

    def step() -> float:
        for group in groups:
            accumulate(group)
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.trainer.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(grad_norm)

    return step


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
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # every side computes on the CPU
    chosen_side, samples_file, model_folder = sys.argv[1:]
    if chosen_side != "padded":
        # As the trainer's actor sets its process up.
        share_cpu(len(os.sched_getaffinity(0)))
        keep_memory()
    print(json.dumps(run_side(chosen_side, read_groups(Path(samples_file)), model_folder)))
