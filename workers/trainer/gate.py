"""Measured at every start, before anything is sampled: does training compute what transformers computes of this model?

    a few random samples -> this model, packed or in rows, and as transformers runs each alone -> how far they differ

A packed model that differs goes in rows from then on. A model that differs there too stops the run.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlflow.batching import PackedBatch, pack
from rlflow.errors import ConfigError
from rlflow.types import Sample, TrainSample
from rlflow.workers.trainer.attention import attention_windows
from rlflow.workers.trainer.way import go_in_rows, is_packed

BOUNDS = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
"""How far log-probabilities may differ on average, in nats. What goes wrong differs by tenths of a nat or more."""


_COMPLETIONS = (16, 7, 1)


@dataclass(kw_only=True, slots=True, frozen=True)
class Agreement:
    """How a model goes, and what was measured of it."""

    is_packed: bool
    difference: float
    """Mean absolute difference of log-probabilities, in nats; of a critic, of states with a mean square of 1."""

    def __str__(self) -> str:
        return f"{'packed' if self.is_packed else 'padded'} rows, {self.difference:.1g} nats from transformers"


def settle_way(
    model: PreTrainedModel,
    forward: Callable[[PackedBatch], tuple[Tensor, ...]],
    agree_on: Callable[[float], float],
    dtype: torch.dtype,
    max_length: int,
    setting: str = "model.path",
) -> Agreement:
    """Measure `forward`, which gives what training computes of a batch and the plain values, and settle the way.

    dtype: in which the model computes. max_length: of a sample, in tokens.
    agree_on: the largest of what all ranks have measured; collective, as `forward` is.

    Raises ConfigError, naming the `setting`, for a model that does not agree.
    """
    batch, found = gate_batch(model, max_length), dict[str, str]()
    while True:
        packed = is_packed(model)
        difference, problem = _measure(forward, batch)
        difference = agree_on(difference)
        if difference <= BOUNDS[dtype]:
            return Agreement(is_packed=packed, difference=difference)
        found["packed" if packed else "in padded rows"] = problem or f"{difference:.2g} nats"
        if not packed:
            raise ConfigError(
                f"{setting} names a {model.config.model_type} model of which training computes something else than "
                f"transformers: log-probabilities of random tokens differ by {_listed(found)} on average, and may by "
                f"{BOUNDS[dtype]:g} nats; choose another model"
            )
        go_in_rows(model)


def _listed(found: Mapping[str, str]) -> str:
    return ", ".join(f"{what} {way}" for way, what in found.items())


def gate_batch(model: PreTrainedModel, max_length: int) -> PackedBatch:
    """Each of `probe_prompts` with several random completions."""
    random, tokens = np.random.default_rng(1), _ordinary_tokens(model)
    groups: list[list[TrainSample]] = []
    for prompt in probe_prompts(model, max_length):
        groups.append([])
        for size in _COMPLETIONS[: max(1, max_length - len(prompt))]:
            ids = random.choice(tokens, min(size, max_length - len(prompt))).astype(np.int32)
            zeros = np.zeros(len(ids), np.int32)
            sample = Sample(
                prompt_ids=np.array(prompt, np.int32),
                completion_ids=ids,
                loss_mask=np.ones(len(ids), np.bool_),
                logprobs=zeros.astype(np.float32),
                versions=zeros,
                cache_versions=zeros,
            )
            groups[-1].append(TrainSample(sample=sample, advantage=0.0))
    return pack(groups)


def probe_prompts(model: PreTrainedModel, max_length: int) -> list[list[int]]:
    """Random tokens: two short prompts, and one longer than the model's shortest window, where they fit."""
    lengths = [9, 30, *(window + 8 for window in attention_windows(model)[:1])]
    random, tokens = np.random.default_rng(0), _ordinary_tokens(model)
    fitting = [length for length in lengths if length + max(_COMPLETIONS) <= max_length]
    return [random.choice(tokens, length).tolist() for length in fitting or [1]]


def _ordinary_tokens(model: PreTrainedModel) -> range:
    """Tokens from the middle of the vocabulary, because special ones lie at its ends."""
    size = model.config.get_text_config().vocab_size
    return range(size // 4, size // 2)


def _measure(forward: Callable[[PackedBatch], tuple[Tensor, ...]], batch: PackedBatch) -> tuple[float, str | None]:
    """The mean difference, and what the model said if it could not be run: then infinity."""
    try:
        with torch.no_grad():
            own, plain = forward(batch)
    except ConfigError as error:
        return float("inf"), str(error)
    scale = plain.square().mean().sqrt().item() if plain.dim() > 1 else 1.0
    difference = float((own - plain).abs().mean()) / scale
    return (difference, None) if np.isfinite(difference) else (float("inf"), "values that are not finite")
