"""The images of a row, as the policy's own tower and projector see them. Both are frozen.

    PackedBatch.images -> files -> pixels -> tower, once an image -> features, in the place of the tokens' embeddings

Shape letters: T tokens of the row, K pieces of an image, D hidden size.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel

from rlflow.batching import PackedBatch
from rlflow.errors import ConfigError
from rlflow.models.images import FAMILIES, ImageProcessor, open_image, takes_images
from rlflow.types import Pictures

CACHED_BYTES = 1 << 28
"""Features of so many bytes are kept for the next rows: of 256 images of 1000 pieces, at 512 numbers of bfloat16."""


def policy_class(config: PreTrainedConfig) -> Any:
    """transformers' Auto class of a policy. Raises ConfigError for one that takes images otherwise than FAMILIES do."""
    if takes_images(config):
        return AutoModelForImageTextToText
    known = AutoModelForCausalLM._model_mapping
    if type(config) not in known and type(config) in AutoModelForImageTextToText._model_mapping:
        raise ConfigError(
            f"model.path names a {config.model_type} model; of models that take images, {' and '.join(FAMILIES)} can "
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


class Vision:
    """The images of one model on one rank."""

    def __init__(self, processor: ImageProcessor) -> None:
        self.processor = processor
        self._features: OrderedDict[str, Tensor] = OrderedDict()

    def embeddings(self, model: PreTrainedModel, packed: PackedBatch) -> Tensor:
        """[T, D], of the row's tokens, with the features of its images."""
        ids = torch.from_numpy(packed.input_ids).to(next(model.parameters()).device)
        embeddings: Tensor = model.get_input_embeddings()(ids)
        if not packed.images:
            return embeddings
        places, features = [], []
        for image in packed.images:
            own = image.start + np.flatnonzero(
                packed.input_ids[image.start : image.start + image.num_tokens] == self.processor.token
            )
            found = self._features_of(model, image.key, packed.pictures)
            assert len(found) == len(own), f"an image of {len(found)} pieces has {len(own)} tokens"
            places.append(own)
            features.append(found)
        at = torch.from_numpy(np.concatenate(places)).to(ids.device)
        return embeddings.index_copy(0, at, torch.cat(features).to(embeddings.dtype))

    @torch.no_grad()
    def _features_of(self, model: PreTrainedModel, key: str, pictures: Pictures) -> Tensor:
        """[K, D]."""
        if key not in self._features:
            tower: Any = model.get_image_features
            self._features[key] = tower(**self.inputs(model, [key], pictures)).pooler_output.flatten(0, 1)
        self._features.move_to_end(key)
        while len(self._features) > 1 and sum(each.nbytes for each in self._features.values()) > CACHED_BYTES:
            self._features.popitem(last=False)
        return self._features[key]

    def inputs(self, model: PreTrainedModel, keys: Sequence[str], pictures: Pictures) -> dict[str, Tensor]:
        """What transformers' own forward takes for these images, in their order."""
        device = next(model.parameters()).device
        pixels = [self.processor.pixels(open_image(pictures[key])) for key in keys]
        names = pixels[0] if pixels else ()
        return {name: torch.cat([each[name] for each in pixels], dim=1).to(device) for name in names}
