"""A tiny model, samples for it, and the plain way to compute their gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rounding import allowed_difference
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from rlflow.batching.plan import plan_micro_batches
from rlflow.config import Config
from rlflow.models.resolve import resolve_model
from rlflow.roles import REFERENCE
from rlflow.types import EpisodeEnd, EpisodeSummary, Message, Sample, TrainSample

VOCABULARY = 67


def tiny_llama(**changes: Any) -> PreTrainedConfig:
    options: dict[str, Any] = {**_SIZES, "tie_word_embeddings": True, **changes}
    return LlamaConfig(**options)


def tiny_qwen3(**changes: Any) -> PreTrainedConfig:
    options: dict[str, Any] = {**_SIZES, "tie_word_embeddings": False, **changes}
    return Qwen3Config(**options)


def tiny_qwen3_moe(**changes: Any) -> PreTrainedConfig:
    """Four experts a layer, of which a token goes to two; a router of its own among them."""
    options: dict[str, Any] = {**_SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    return Qwen3MoeConfig(**{**options, "norm_topk_prob": True, "tie_word_embeddings": False, **changes})


def mixture_of(kind: type[PreTrainedConfig], **changes: Any) -> PreTrainedConfig:
    """`tiny_qwen3_moe` of another family."""
    options = tiny_qwen3_moe().to_dict()
    for name in ("model_type", "architectures", "num_experts", "num_local_experts", "head_dim", "layer_types"):
        options.pop(name, None)
    return kind(**{**options, **changes})


_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}


def save_model(config: PreTrainedConfig, folder: Path) -> str:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return str(folder)


def save_reward_model(folder: Path, **changes: Any) -> str:
    """A random classifier, with one label if nothing else is said, that reads bytes."""
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("tiny"))
    options = {"vocab_size": len(tokenizer), "pad_token_id": 0, "num_labels": 1, "max_position_embeddings": 512}
    torch.manual_seed(0)
    config = tiny_llama(**{**options, **changes})
    AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def plain_score(folder: str, messages: Sequence[Message]) -> float:
    """What transformers alone says of one conversation, without padding."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template([dict(message) for message in messages], tokenize=False)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    with torch.no_grad():
        return float(model(input_ids=ids).logits)


def tiny_config() -> Config:
    config = Config()
    config.model.max_length = 64
    config.algorithm.loss_args = {"clip_low": 0.2, "clip_high": 0.28}  # the defaults, for the oracle to read
    config.trainer.learning_rate = 1e-2
    config.trainer.micro_batch_tokens = 64
    config.rollout.temperature = 0.7
    config.deadlines.train_s = 60.0
    return config


def with_adapters(config: Config) -> Config:
    config.lora.rank, config.lora.alpha = 4, 6.0
    return config


def tiny_groups(num_groups: int = 3, group_size: int = 4, with_reference: bool = False) -> list[list[TrainSample]]:
    """Groups with shared prompts, ragged lengths, repeated and one-token completions and observations without loss."""
    random = np.random.default_rng(0)
    groups = []
    for _ in range(num_groups):
        prompt = random.integers(0, VOCABULARY, random.integers(1, 9))
        group = [_sample(random, prompt, with_reference) for _ in range(group_size - 1)]
        groups.append([*group, replace(group[-1], advantage=-2.0)])  # two samples with equal tokens
    return groups


def _sample(random: np.random.Generator, prompt: np.ndarray, with_reference: bool) -> TrainSample:
    length = int(random.choice([1, 2, 3, 7, 12]))
    mask = random.random(length) < 0.8
    mask[0] = True
    completion = random.integers(0, VOCABULARY, length)
    sample = _sampled(prompt, completion, mask, random.normal(-4, 0.5, length))
    frozen = {REFERENCE: random.normal(-4, 0.3, length).astype(np.float32)} if with_reference else {}
    return TrainSample(sample=sample, advantage=float(random.normal()), frozen_logprobs=frozen)


def _sampled(prompt: np.ndarray, completion: np.ndarray, mask: np.ndarray, logprobs: np.ndarray) -> Sample:
    return Sample(
        prompt_ids=prompt.astype(np.int32),
        completion_ids=completion.astype(np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, logprobs, 0).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        cache_versions=np.where(mask, 0, -1).astype(np.int32),
    )


def random_tree(seed: int) -> list[TrainSample]:
    """Samples that part from each other at any depth, or end within another. Prompts end anywhere; masks have holes."""
    random = np.random.default_rng(seed)
    vocabulary = int(random.choice([2, 5, VOCABULARY]))
    sequences: list[np.ndarray] = []
    found: list[TrainSample] = []
    for _ in range(random.integers(1, 11)):
        earlier = sequences[random.integers(len(sequences))] if sequences else np.zeros(0, np.int64)
        kept = earlier[: random.integers(0, len(earlier) + 1)]
        ids = np.concatenate([kept, random.integers(0, vocabulary, random.integers(2, 13))])[:48]
        sequences.append(ids)
        prompt, completion = np.split(ids, [random.integers(1, len(ids))])
        mask = random.random(len(completion)) < 0.6
        sample = _sampled(prompt, completion, mask, random.normal(-4, 0.5, len(completion)))
        found.append(TrainSample(sample=sample, advantage=float(random.normal())))
    return found


def plain_logprobs(
    model_path: str, groups: Sequence[Sequence[TrainSample]], temperature: float, dtype: torch.dtype = torch.float32
) -> tuple[torch.nn.Module, list[Tensor]]:
    """The model by transformers alone, and `padded_logprobs` of it."""
    model = plain_model(model_path, dtype)
    return model, padded_logprobs(model, groups, temperature)


def plain_model(model_path: str, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """With the implementations that transformers writes each family in, which float64 can do too."""
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(model_path, dtype=dtype, **eager)


def padded_logprobs(
    model: torch.nn.Module, groups: Sequence[Sequence[TrainSample]], temperature: float
) -> list[Tensor]:
    """[L] log-probabilities of each sample's completion, over one padded batch."""
    samples = [sample.sample for group in groups for sample in group]
    longest = max(sample.num_tokens for sample in samples)
    ids = torch.zeros(len(samples), longest, dtype=torch.int64)
    attention_mask = torch.zeros(len(samples), longest, dtype=torch.int64)
    for row, sample in enumerate(samples):
        sequence = np.concatenate([sample.prompt_ids, sample.completion_ids]).astype(np.int64)
        ids[row, : len(sequence)] = torch.from_numpy(sequence)
        attention_mask[row, : len(sequence)] = 1
    logits = model(input_ids=ids, attention_mask=attention_mask).logits / temperature
    logprobs = logits.log_softmax(-1)[:, :-1].gather(2, ids[:, 1:, None])[:, :, 0]
    starts = [len(sample.prompt_ids) - 1 for sample in samples]
    return [
        logprobs[row, start : start + len(sample.completion_ids)]
        for row, (start, sample) in enumerate(zip(starts, samples, strict=True))
    ]


def plain_gradients(
    model_path: str, groups: Sequence[Sequence[TrainSample]], config: Config, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Gradient sums of `plain_loss`."""
    model, rows = plain_logprobs(model_path, groups, config.rollout.temperature, dtype)
    plain_loss(rows, groups, config).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def plain_loss(rows: Sequence[Tensor], groups: Sequence[Sequence[TrainSample]], config: Config) -> Tensor:
    """The sum of the clipped loss and the k3 penalty, written out token by token; `rows` are `padded_logprobs`."""
    low, high = config.algorithm.loss_args["clip_low"], config.algorithm.loss_args["clip_high"]
    total = torch.zeros((), dtype=rows[0].dtype)
    for sample, logprobs in zip([sample for group in groups for sample in group], rows, strict=True):
        assert isinstance(sample.advantage, float)
        for token in np.flatnonzero(sample.sample.loss_mask):
            ratio = torch.exp(logprobs[token] - float(sample.sample.logprobs[token]))
            clipped = ratio.clamp(1 - low, 1 + high)
            total = total + torch.maximum(-sample.advantage * ratio, -sample.advantage * clipped)
            if REFERENCE in sample.frozen_logprobs:
                difference = float(sample.frozen_logprobs[REFERENCE][token]) - logprobs[token]
                total = total + config.algorithm.kl_coefficient * (difference.exp() - difference - 1).clamp(max=10)
    return total


def exact_and_allowed(
    compute: Callable[[list[list[TrainSample]], torch.dtype], Mapping[str, Tensor]], groups: list[list[TrainSample]]
) -> tuple[Mapping[str, Tensor], float]:
    """What `compute` gives in float64, and the largest relative difference that float32 sums may have from it."""
    exact = compute(groups, torch.float64)
    others = [compute(shuffled(groups, seed), torch.float32) for seed in range(3)]
    return exact, allowed_difference(largest_relative_difference(other, exact) for other in others)


def largest_relative_difference(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The largest difference within each parameter over that parameter's largest value; the worst parameter's."""
    assert found.keys() == expected.keys()
    differences = [
        (found[name] - value).abs().max() / value.abs().max().clamp(min=1e-30) for name, value in expected.items()
    ]
    return float(torch.stack(differences).detach().max())


def shuffled(groups: list[list[TrainSample]], seed: int) -> list[list[TrainSample]]:
    """The same groups of the same samples in another order."""
    random = np.random.default_rng(seed)
    return [[groups[i][j] for j in random.permutation(len(groups[i]))] for i in random.permutation(len(groups))]


def share(
    groups: list[list[TrainSample]], rank: int, world_size: int, micro_batch_tokens: int = 64
) -> list[list[list[TrainSample]]]:
    """The micro-batches of a rank, as the actor plans them."""
    summaries = [[_summary(sample) for sample in group] for group in groups]
    plans = plan_micro_batches(summaries, world_size, micro_batch_tokens)[rank]
    return [[[groups[piece.group][index] for index in piece.episodes] for piece in plan.pieces] for plan in plans]


def _summary(sample: TrainSample) -> EpisodeSummary:
    return EpisodeSummary(
        end=EpisodeEnd.COMPLETED,
        reward=0.0,
        num_prompt_tokens=len(sample.sample.prompt_ids),
        num_completion_tokens=len(sample.sample.completion_ids),
        num_loss_tokens=int(sample.sample.loss_mask.sum()),
        oldest_version=0,
        newest_version=0,
    )
