"""The images of a row, as the policy's own tower and projector see them. Both are frozen.

    PackedBatch.images -> files -> pixels -> tower, once an image -> Seen -> Shown: the row as the decoder takes it

Features stand in the place of embeddings. Qwen3-VL adds more of them, from layers within the tower, behind the first
layers of its decoder (DeepStack, arXiv:2406.04334).
Shape letters: T tokens of the row, K pieces of an image, P those of all images of the row, S layers with features of
their own, D hidden size, [R, L] tokens as they go through the model.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel

from rlflow.batching.pack import IndexArray, PackedBatch
from rlflow.errors import ConfigError
from rlflow.models.images import FAMILIES, ImageProcessor, open_image, takes_images
from rlflow.types import Pictures
from rlflow.workers.trainer.axes import Grid, axes_of

CACHED_BYTES = 1 << 28
"""Features of so many bytes are kept for the next rows: of 256 images of 1000 pieces, at 512 numbers of bfloat16."""


def policy_class(config: PreTrainedConfig) -> Any:
    """transformers' Auto class of a policy. Raises ConfigError for one that takes images otherwise than FAMILIES do."""
    if takes_images(config):
        return AutoModelForImageTextToText
    known = AutoModelForCausalLM._model_mapping
    if type(config) not in known and type(config) in AutoModelForImageTextToText._model_mapping:
        raise ConfigError(
            f"model.path names a {config.model_type} model; of models that take images, {', '.join(FAMILIES)} can "
            "be trained; choose one of them, or a model for text"
        )
    return AutoModelForCausalLM


def freeze_tower(model: PreTrainedModel) -> None:
    """Freeze all but the decoder and the output layer, so that an image's features stay the same for the whole run."""
    head = model.get_output_embeddings()
    assert head is not None, "every policy has one"
    trained = {id(each) for part in (model.get_decoder(), head) for each in part.parameters()}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in trained)


@dataclass(kw_only=True, slots=True, frozen=True)
class Seen:
    """What a tower makes of an image."""

    features: Tensor  # [1 + S, K, D], in the place of embeddings, and behind each of the first S layers
    grid: Grid | None
    """None if positions have one axis."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Shown:
    """A row with its images."""

    embeddings: Tensor  # [T, D]
    axes: IndexArray | None  # [3, T]; None if positions have one axis
    places: IndexArray  # [P], ascending
    deep: Tensor  # [S, P, D]

    def inputs(self, token_of: IndexArray) -> dict[str, Any]:
        """What the decoder takes of these tokens [R, L], -1 for padding."""
        device, known = self.embeddings.device, np.maximum(token_of, 0)
        # An embedding gathers, because its backward is deterministic on the CPU.
        found: dict[str, Any] = {"inputs_embeds": F.embedding(torch.from_numpy(known).to(device), self.embeddings)}
        if self.axes is not None:
            found["position_ids"] = torch.from_numpy(self.axes[:, known]).to(device)
        if len(self.deep):
            piece_of = np.full(self.embeddings.shape[0], -1)
            piece_of[self.places] = np.arange(len(self.places))
            pieces = np.where(token_of < 0, -1, piece_of[known])
            found["visual_pos_masks"] = torch.from_numpy(pieces >= 0).to(device)
            found["deepstack_visual_embeds"] = list(self.deep[:, torch.from_numpy(pieces[pieces >= 0]).to(device)])
        return found


class Vision:
    """The images of one model on one rank."""

    def __init__(self, processor: ImageProcessor) -> None:
        self.processor = processor
        self._seen: OrderedDict[str, Seen] = OrderedDict()

    def shown(self, model: PreTrainedModel, packed: PackedBatch) -> Shown:
        """The row's embeddings with the features of its images, and what else the decoder takes of these."""
        ids = torch.from_numpy(packed.input_ids).to(next(model.parameters()).device)
        embeddings: Tensor = model.get_input_embeddings()(ids)
        if not packed.images:
            nothing = embeddings.new_zeros((0, 0, embeddings.shape[1]))
            return Shown(embeddings=embeddings, axes=None, places=np.zeros(0, np.int64), deep=nothing)
        seen = [self._see(model, image.key, packed.pictures) for image in packed.images]
        places: list[IndexArray] = []
        for image, one in zip(packed.images, seen, strict=True):
            tokens = packed.input_ids[image.start : image.start + image.num_tokens]
            places.append(image.start + np.flatnonzero(tokens == self.processor.token))
            pieces = one.features.shape[1]
            assert pieces == len(places[-1]), f"an image of {pieces} pieces has {len(places[-1])} tokens"
        features = torch.cat([one.features for one in seen], dim=1).to(embeddings.dtype)
        at = np.concatenate(places)
        grids = {image.key: one.grid for image, one in zip(packed.images, seen, strict=True) if one.grid is not None}
        return Shown(
            embeddings=embeddings.index_copy(0, torch.from_numpy(at).to(ids.device), features[0]),
            axes=axes_of(packed, grids) if grids else None,
            places=at,
            deep=features[1:],
        )

    @torch.no_grad()
    def _see(self, model: PreTrainedModel, key: str, pictures: Pictures) -> Seen:
        if key not in self._seen:
            tower: Any = model.get_image_features
            pixels = self._pixels(model, [key], pictures)
            found = tower(**pixels)
            layers = [found.pooler_output, *(getattr(found, "deepstack_features", None) or ())]
            features = torch.stack([torch.cat(tuple(of_images)) for of_images in layers])
            self._seen[key] = Seen(features=features, grid=self.processor.grid(pixels))
        self._seen.move_to_end(key)
        while len(self._seen) > 1 and sum(each.features.nbytes for each in self._seen.values()) > CACHED_BYTES:
            self._seen.popitem(last=False)
        return self._seen[key]

    def inputs(
        self, model: PreTrainedModel, input_ids: Tensor, keys: Sequence[str], pictures: Pictures
    ) -> dict[str, Tensor]:
        """What transformers' own forward takes beside `input_ids` for these images, in their order."""
        found = self._pixels(model, keys, pictures)
        if "image_grid_thw" in found:
            found["mm_token_type_ids"] = (input_ids == self.processor.token).int()
        return found

    def _pixels(self, model: PreTrainedModel, keys: Sequence[str], pictures: Pictures) -> dict[str, Tensor]:
        device = next(model.parameters()).device
        pixels = self.processor.pixels([open_image(pictures[key]) for key in keys])
        return {name: each.to(device) for name, each in pixels.items()}
