"""Images for a model that takes them: the tokens that its processor writes for one, and the pixels of its tower.

    chat template -> one placeholder an image -> `expanded` -> ids, ImageSpans   (once; ids are kept from then on)
    ids, ImageSpans -> `collapsed` -> one placeholder an image, as a processor or a template has it

An image is a file in memory, named by its SHA-256. Runners, engines and the trainer open the same processor.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlflow.errors import ConfigError, first_line
from rlflow.models.opening import open_config, open_processor
from rlflow.types import ImageSpan

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor
    from transformers import PreTrainedConfig

FAMILIES = ("idefics3", "smolvlm", "qwen2_5_vl", "qwen3_vl")
"""Families whose images have been measured."""
_PIXELS = ("pixel_values", "pixel_attention_mask", "image_grid_thw")
"""What towers take, as processors call it; each family has two of them."""
MAX_FILE_BYTES = 4 << 20
"""The largest file of an image: a step that shows two such fits into the frame of an environment's process."""
MAX_PIXELS = 1 << 24
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")


def takes_images(config: PreTrainedConfig) -> bool:
    """Whether rlflow gives images to a model of this configuration."""
    return config.model_type in FAMILIES


def key_of(file: bytes) -> str:
    return hashlib.sha256(file).hexdigest()


def open_image(file: bytes) -> Image:
    """The picture, upright, in RGB. Raises ValueError for what is no image, or too large."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    if len(file) > MAX_FILE_BYTES:
        raise ValueError(f"an image has {len(file)} bytes, and may have {MAX_FILE_BYTES}; make it smaller")
    try:
        image = Image.open(io.BytesIO(file), formats=_FORMATS)
        if image.width * image.height > MAX_PIXELS:
            raise ValueError(f"an image has {image.width} x {image.height} pixels, and may have {MAX_PIXELS} in all")
        return ImageOps.exif_transpose(image).convert("RGB")
    except (UnidentifiedImageError, OSError, SyntaxError) as error:
        raise ValueError(f"an image cannot be read as {', '.join(_FORMATS)}: {first_line(error)}") from error


class ImageProcessor:
    """The processor of one model."""

    def __init__(self, folder: str, *, trust: bool) -> None:
        """Raises ConfigError for a processor that cannot be opened, and one that does not do what images need."""
        config = open_config(folder, trust=trust)
        self._processor = open_processor(folder, trust=trust)
        self._merged: int = getattr(config.vision_config, "spatial_merge_size", 1)
        self.token: int = config.image_token_id
        """What stands for a piece of an image, and in a rendered conversation for the image. It is never sampled."""
        self.text: str = self._processor.tokenizer.decode([self.token])
        if self._processor.tokenizer.encode(self.text, add_special_tokens=False) != [self.token]:
            raise ConfigError(
                f"model.path: {self.text!r} (image_token_id {self.token} in config.json) is no token of the tokenizer "
                f"in {folder}; take the tokenizer that came with the model"
            )

    def tokens(self, image: Image) -> list[int]:
        """What is written for the image in the place of the one token."""
        return self._call(image, add_special_tokens=False)["input_ids"][0]

    def pixels(self, images: Sequence[Image]) -> dict[str, Tensor]:
        """What the model's tower takes: pixels [1, pieces, ...], or, with a grid [images, 3], [pieces, ...]."""
        found = [self._call(image, return_tensors="pt") for image in images]
        if not found:
            return {}
        import torch

        names = [name for name in _PIXELS if name in found[0]]
        axis = 0 if "image_grid_thw" in names else 1
        return {name: torch.cat([each[name] for each in found], dim=axis) for name in names}

    def grid(self, pixels: Mapping[str, Tensor]) -> tuple[int, int] | None:
        """Rows and columns of the pieces of one image, if the model tells them apart by position."""
        if "image_grid_thw" not in pixels:
            return None
        ((_, height, width),) = pixels["image_grid_thw"].tolist()
        return height // self._merged, width // self._merged

    def _call(self, image: Image, **options: Any) -> Any:
        return self._processor(text=[self.text], images=[[image]], **options)


def open_images(folder: str, *, trust: bool) -> ImageProcessor | None:
    """None for a model that takes no images."""
    return ImageProcessor(folder, trust=trust) if takes_images(open_config(folder, trust=trust)) else None


def probe_picture() -> bytes:
    """A file of noise that is the same everywhere."""
    import numpy as np
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (24, 40, 3), np.uint8)).save(file, "BMP")
    return file.getvalue()


def expanded(
    ids: Sequence[int], token: int, keys: Sequence[str], tokens_of: Mapping[str, Sequence[int]], start: int = 0
) -> tuple[list[int], tuple[ImageSpan, ...]]:
    """Write the tokens of each image in the place of its one token. `start`: tokens before `ids`, for the spans.

    Raises ValueError if the number of such tokens is not that of the images.

    Example: expanded([7, 90, 8], 90, ["a"], {"a": [1, 90, 90]}) == ([7, 1, 90, 90, 8], (span of "a" at 1, 3 tokens,))
    """
    places = [place for place, id_ in enumerate(ids) if id_ == token]
    if len(places) != len(keys):
        raise ValueError(
            f"a conversation with {len(keys)} images has {len(places)} tokens that stand for one; a text may not hold "
            "the model's own text for an image, and its chat template must show each part of a message"
        )
    found: list[int] = []
    spans: list[ImageSpan] = []
    done = 0
    for place, key in zip(places, keys, strict=True):
        found += ids[done:place]
        spans.append(ImageSpan(key=key, start=start + len(found), num_tokens=len(tokens_of[key])))
        found += tokens_of[key]
        done = place + 1
    return [*found, *ids[done:]], tuple(spans)


def collapsed(ids: Sequence[int], token: int, spans: Sequence[ImageSpan]) -> list[int]:
    """The inverse of `expanded`, of tokens that begin at the first of a sample."""
    found: list[int] = []
    done = 0
    for span in spans:
        found += [*ids[done : span.start], token]
        done = span.start + span.num_tokens
    return [*found, *ids[done:]]
