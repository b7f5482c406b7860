"""Measured at every start, before anything is sampled: does training compute what transformers computes of this model?

    a few random samples -> this model, by its way, and as transformers runs each alone -> how far they differ

A model that differs, packed or end to end, goes in padded rows from then on. One that differs there too stops the run.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlflow.batching.pack import PackedBatch, pack
from rlflow.errors import ConfigError
from rlflow.models.images import ImageProcessor, expanded, key_of, open_image, probe_picture
from rlflow.rollout.requests import ProbePrompt
from rlflow.types import Pictures, Sample, TrainSample
from rlflow.workers.trainer.attention import attention_windows
from rlflow.workers.trainer.way import Way, go_in_rows, way_of

BOUNDS = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
"""How far log-probabilities may differ on average, in nats. What goes wrong differs by tenths of a nat or more."""


_COMPLETIONS = (16, 7, 1)


@dataclass(kw_only=True, slots=True, frozen=True)
class Agreement:
    """How a model goes, and what was measured of it."""

    way: Way
    difference: float
    """Mean absolute difference of log-probabilities, in nats; of a critic, of states with a mean square of 1."""

    def __str__(self) -> str:
        return f"samples {self.way.value}, {self.difference:.1g} nats from transformers"


def settle_way(
    model: PreTrainedModel,
    forward: Callable[[PackedBatch], tuple[Tensor, ...]],
    agree_on: Callable[[float], float],
    dtype: torch.dtype,
    max_length: int,
    setting: str = "model.path",
    images: ImageProcessor | None = None,
    sequence_parallel: int = 1,
) -> Agreement:
    """Measure `forward`, which gives what training computes of a batch and the plain values, and settle the way.

    dtype: in which the model computes. max_length: of a sample, in tokens.
    agree_on: the largest of what all ranks have measured; collective, as `forward` is.
    images: if the model takes some. sequence_parallel: ranks that share a row, which is then packed.

    Raises ConfigError, naming the `setting`, for a model that does not agree.
    """
    batch, found = gate_batch(model, max_length, images), dict[str, str]()
    while True:
        way = way_of(model)
        difference, problem = _measure(forward, batch)
        difference = agree_on(difference)
        if difference <= BOUNDS[dtype]:
            return Agreement(way=way, difference=difference)
        found[way.in_words] = problem or f"{difference:.2g} nats"
        if way is Way.padded or sequence_parallel > 1:
            cure = "choose another model"
            if way is not Way.padded:
                cure = "set trainer.sequence_parallel=1, which tries padded rows"
            raise ConfigError(
                f"{setting} names a {model.config.model_type} model of which training computes something else than "
                f"transformers: log-probabilities of random tokens differ by {_listed(found)} on average, and may by "
                f"{BOUNDS[dtype]:g} nats; {cure}"
            )
        go_in_rows(model)


def _listed(found: Mapping[str, str]) -> str:
    return ", ".join(f"{what} {way}" for way, what in found.items())


def gate_batch(model: PreTrainedModel, max_length: int, images: ImageProcessor | None = None) -> PackedBatch:
    """Each of `probe_prompts` with several random completions."""
    random, tokens = np.random.default_rng(1), _ordinary_tokens(model)
    groups: list[list[TrainSample]] = []
    pictures = {} if images is None else probe_pictures()
    for prompt in probe_prompts(model, max_length, images):
        groups.append([])
        for size in _COMPLETIONS[: max(1, max_length - len(prompt.ids))]:
            ids = random.choice(tokens, min(size, max_length - len(prompt.ids))).astype(np.int32)
            zeros = np.zeros(len(ids), np.int32)
            sample = Sample(
                prompt_ids=np.array(prompt.ids, np.int32),
                completion_ids=ids,
                loss_mask=np.ones(len(ids), np.bool_),
                logprobs=zeros.astype(np.float32),
                versions=zeros,
                cache_versions=zeros,
                images=prompt.images,
            )
            groups[-1].append(TrainSample(sample=sample, advantage=0.0, pictures=pictures))
    return pack(groups)


def probe_prompts(model: PreTrainedModel, max_length: int, images: ImageProcessor | None = None) -> list[ProbePrompt]:
    """Random tokens: two short prompts, one longer than the model's shortest window, and one with an image, where they
    fit."""
    lengths = [9, 30, *(window + 8 for window in attention_windows(model)[:1])]
    random, tokens = np.random.default_rng(0), _ordinary_tokens(model)
    fitting = [length for length in lengths if length + max(_COMPLETIONS) <= max_length]
    prompts = [ProbePrompt(ids=random.choice(tokens, length).tolist()) for length in fitting or [1]]
    if images is not None:
        ((key, file),) = probe_pictures().items()
        around = random.choice(tokens, 8).tolist()
        around[4] = images.token
        ids, spans = expanded(around, images.token, [key], {key: images.tokens(open_image(file))})
        if len(ids) + max(_COMPLETIONS) > max_length:
            raise ConfigError(
                f"model.max_length={max_length} leaves no room for an image, which the model at model.path sees as "
                f"{spans[0].num_tokens} tokens or more; raise it"
            )
        prompts.append(ProbePrompt(ids=ids, images=spans))
    return prompts


def probe_pictures() -> Pictures:
    """The image of `probe_prompts`."""
    file = probe_picture()
    return {key_of(file): file}


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
