"""Ways to take one optimiser step on the same samples, which `rlflow bench train` and `rlflow bench gpu` time.

packed     the trainer's own, of a model that goes packed
prompts    the same, a group at once, in which samples share no more than a prompt
unshared   the same, every sample with a copy of its prompt
rows       the trainer's own, of a model that goes in padded rows
padded     a transformers loop as one writes it by hand
"""

from __future__ import annotations

import resource
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlflow.batching.pack import PackedBatch, pack
from rlflow.batching.plan import plan_micro_batches
from rlflow.config import Checkpointing, Config, Dtype
from rlflow.roles import StepOutcome
from rlflow.telemetry.throughput import peak_flops
from rlflow.types import EpisodeEnd, EpisodeSummary, Sample, TrainSample

if TYPE_CHECKING:
    import torch

MATMUL_SIZE = 2048
Group = list[TrainSample]
Step = Callable[[], tuple[float, StepOutcome | None]]
"""Takes an optimiser step; the norm of its gradient, and what the trainer says of it."""
Arrays = Mapping[str, NDArray[Any]]


@dataclass(kw_only=True, slots=True, frozen=True)
class Workload:
    """The samples of a step. Tokens are random: what they are does not matter to the time."""

    groups: int
    group_size: int
    prompt: int
    """Tokens."""
    shortest: int
    """Tokens of a completion."""
    longest: int

    def arrays(self, vocabulary: int) -> Arrays:
        """Arrays [groups, group size, ...], prompts and completions padded at their end."""
        random = np.random.default_rng(0)
        shape = (self.groups, self.group_size, self.longest)
        prompts = random.integers(0, vocabulary, (self.groups, self.prompt))
        return {
            "prompts": np.repeat(prompts[:, None], self.group_size, axis=1),
            "prompt_lengths": np.full(shape[:2], self.prompt),
            "completions": random.integers(0, vocabulary, shape),
            "lengths": random.integers(self.shortest, self.longest + 1, shape[:2]),
            "logprobs": random.normal(-10, 0.5, shape).astype(np.float32),
            "advantages": random.normal(0, 1, shape[:2]).astype(np.float32),
        }

    def write(self, path: Path, vocabulary: int) -> None:
        np.savez(path, **self.arrays(vocabulary))  # pyright: ignore[reportArgumentType]


def run_side(side: str, groups: Sequence[Group], model: str, config: Config | None = None) -> dict[str, float]:
    """Figures of the second step; the first pays for caches, kernels and first allocations.

    `peak_mb` is the memory of the device; on a CPU that of the process.
    """
    import torch

    config = config or Config()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if side == "padded":
        step, row_tokens = _padded(config, groups, model, device), _padded_tokens(groups)
    else:
        step, row_tokens = _trainer(side, config, groups, model)
    grad_norm, _ = step()
    started = time.perf_counter()
    _, outcome = step()
    step_s = time.perf_counter() - started  # a step ends with a number from the device, so that it has finished
    samples = [one.sample for group in groups for one in group]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if device.type == "cuda":  # the trainer counts anew in each step
        peak = outcome.memory_peaks[0] if outcome is not None else torch.cuda.max_memory_allocated()
    figures = {
        "step_s": step_s,
        "tokens_per_s": sum(sample.num_tokens for sample in samples) / step_s,
        "row_tokens": row_tokens,
        "peak_mb": peak / 2**20,
        "grad_norm": grad_norm,
    }
    if outcome is not None and (work := outcome.work):
        is_bfloat16 = config.model.dtype is Dtype.bfloat16
        speed = _matmul_speed(device, torch.bfloat16 if is_bfloat16 else torch.float32)
        figures |= {"flop_per_s": work.flops / step_s, "matmul_share": work.flops / step_s / speed}
        figures["padded_flop_per_s"] = work.padded_flops / step_s
        if is_bfloat16 and (peak := peak_flops(work.device)):
            figures |= {"mfu": work.flops / step_s / peak, "mfu_padded": work.padded_flops / step_s / peak}
    return figures


def read_groups(path: Path) -> list[Group]:
    """What `Workload.write` or `benchmarks/forks.py` wrote."""
    with np.load(path, allow_pickle=False) as arrays:
        return groups_of(arrays)


def groups_of(arrays: Arrays) -> list[Group]:
    names = ("prompts", "prompt_lengths", "completions", "lengths", "logprobs", "advantages")
    return [
        [
            _sample(prompt[:num_prompt], completion[:length], logprob[:length], advantage)
            for prompt, num_prompt, completion, length, logprob, advantage in zip(*of_group, strict=True)
        ]
        for of_group in zip(*(arrays[name] for name in names), strict=True)
    ]


def _sample(prompt: np.ndarray, completion: np.ndarray, logprobs: np.ndarray, advantage: float) -> TrainSample:
    sample = Sample(
        prompt_ids=prompt.astype(np.int32),
        completion_ids=completion.astype(np.int32),
        loss_mask=np.ones(len(completion), np.bool_),
        logprobs=logprobs,
        versions=np.zeros(len(completion), np.int32),
        cache_versions=np.zeros(len(completion), np.int32),
    )
    return TrainSample(sample=sample, advantage=float(advantage))


def micro_batches_of(config: Config, groups: Sequence[Group]) -> list[list[Group]]:
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


def _trainer(side: str, config: Config, groups: Sequence[Group], model: str) -> tuple[Step, float]:
    """The trainer's own step, and the tokens that go through the model."""
    import torch

    from rlflow.workers.trainer.fsdp import FsdpTrainer
    from rlflow.workers.trainer.packed import MicroBatch
    from rlflow.workers.trainer.rows import rows_of
    from rlflow.workers.trainer.way import go_in_rows

    class Trainer(FsdpTrainer):
        def _lay_out(self, micro_batch: MicroBatch) -> PackedBatch:
            if side == "prompts":
                return _sharing_prompts(micro_batch)
            return pack(micro_batch, share_prefixes=side != "unshared")

    meeting = Path(tempfile.mkdtemp(prefix="rlflow-bench-")) / "rendezvous"
    trainer = Trainer(config, model, 0, 1, f"file://{meeting}")
    if side == "rows":
        go_in_rows(trainer._policy.model)
    if side == "prompts":
        micro_batches = [[group] for group in groups]
    else:
        micro_batches = _unshared(config, groups) if side == "unshared" else micro_batches_of(config, groups)
    laid_out = [trainer._lay_out(micro_batch) for micro_batch in trainer._in_pieces(micro_batches)]
    sizes = [rows_of(row).input_ids.size if side == "rows" else len(row.input_ids) for row in laid_out]
    row_tokens = float(sum(sizes))

    def step() -> tuple[float, StepOutcome | None]:
        trainer.accumulate(micro_batches)
        outcome = trainer.step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return outcome.grad_norm, outcome

    return step, row_tokens


def _sharing_prompts(micro_batch: Sequence[Sequence[TrainSample]]) -> PackedBatch:
    """The rows of samples with one prompt each, end to end."""
    of_prompt: dict[bytes, list[TrainSample]] = {}
    for one in (one for group in micro_batch for one in group):
        of_prompt.setdefault(one.sample.prompt_ids.tobytes(), []).append(one)
    rows = [pack([samples]) for samples in of_prompt.values()]
    tokens, segments, sequences = (
        np.cumsum([0, *sizes])
        for sizes in zip(
            *((len(row.input_ids), len(row.segment_starts), row.num_sequences) for row in rows), strict=True
        )
    )
    offsets = {"segment_starts": tokens, "loss_positions": tokens, "sequence_of": sequences}
    joined = {
        name: np.concatenate([getattr(row, name) + offsets.get(name, tokens * 0)[i] for i, row in enumerate(rows)])
        for name in (
            *("input_ids", "position_ids", "segment_starts", "segment_lengths", "loss_positions", "targets"),
            *("behaviour_logprobs", "versions", "advantages", "sequence_of", "support_ids", "support_of"),
        )
    }
    parents = [np.where(row.segment_parents < 0, -1, row.segment_parents + segments[i]) for i, row in enumerate(rows)]
    return replace(
        rows[0],
        segment_parents=np.concatenate(parents),
        is_on_older_cache=np.concatenate([row.is_on_older_cache for row in rows]),
        num_sequences=int(sequences[-1]),
        **joined,
    )


def _padded_tokens(groups: Sequence[Group]) -> float:
    return sum(len(group) * max(one.sample.num_tokens for one in group) for group in groups)


def _padded(config: Config, groups: Sequence[Group], model_path: str, device: torch.device) -> Step:
    """What one writes by hand: padded batches, logits of the completions only, the same loss and optimiser.

    A batch has as many samples as the trainer's rows have tokens for, and is of one group.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from rlflow.models.opening import open_model

    trainer = config.trainer
    model: Any = open_model(AutoModelForCausalLM, model_path, trust=config.model.trust_remote_code, dtype=torch.float32)
    model.to(device)
    if trainer.gradient_checkpointing is not Checkpointing.none:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    betas = (trainer.beta1, trainer.beta2)
    optimizer = torch.optim.AdamW(
        model.parameters(), trainer.learning_rate, betas, weight_decay=trainer.weight_decay, fused=True
    )
    num_tokens = sum(len(one.sample.completion_ids) for group in groups for one in group)
    longest_sample = max(one.sample.num_tokens for group in groups for one in group)
    at_once = max(1, trainer.micro_batch_tokens // longest_sample)

    def accumulate(group: Group) -> None:
        samples = [one.sample for one in group]
        first, longest = min(len(one.prompt_ids) for one in samples), max(one.num_tokens for one in samples)
        ids = torch.zeros(len(samples), longest, dtype=torch.int64)
        is_real, behaviour = torch.zeros_like(ids), torch.zeros(len(samples), longest - first)
        is_loss = torch.zeros_like(behaviour)
        for index, sample in enumerate(samples):
            prompt = len(sample.prompt_ids)
            ids[index, :prompt] = torch.from_numpy(sample.prompt_ids)
            ids[index, prompt : sample.num_tokens] = torch.from_numpy(sample.completion_ids)
            behaviour[index, prompt - first : sample.num_tokens - first] = torch.from_numpy(sample.logprobs)
            is_loss[index, prompt - first : sample.num_tokens - first] = 1
            is_real[index, : sample.num_tokens] = 1
        advantage = torch.tensor([[one.advantage] for one in group]).to(device)
        ids, is_real, behaviour, is_loss = (each.to(device) for each in (ids, is_real, behaviour, is_loss))
        with torch.autocast(device.type, torch.bfloat16, enabled=config.model.dtype is Dtype.bfloat16):
            logits = model(input_ids=ids, attention_mask=is_real, logits_to_keep=longest - first + 1)
        logprobs = logits.logits[:, :-1].float().log_softmax(-1).gather(2, ids[:, first:, None])[:, :, 0]
        ratio = (logprobs - behaviour).exp()
        loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.28))
        ((loss * is_loss).sum() / num_tokens).backward()

    def step() -> tuple[float, None]:
        for group in groups:
            for start in range(0, len(group), at_once):
                accumulate(group[start : start + at_once])
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), trainer.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return float(grad_norm), None

    return step


def _matmul_speed(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations a second of the fastest of some large products on this device."""
    import torch

    size = MATMUL_SIZE if device.type == "cpu" else 4 * MATMUL_SIZE
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    best = float("inf")
    for _ in range(8):
        started = time.perf_counter()
        product = torch.mm(left, right)
        product[0, 0].item()
        best = min(best, time.perf_counter() - started)
    return 2 * size**3 / best
