"""A request's tokens as vLLM takes them: with images, the processor of vLLM writes their tokens anew, and must agree.

GenerateRequest: ids with images written out -> one token an image, the pictures and their keys -> vLLM
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlflow.errors import RunError
from rlflow.models.images import ImageProcessor, collapsed, open_image
from rlflow.rollout.requests import GenerateRequest

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from PIL.Image import Image
    from vllm.inputs import TokensPrompt

KEPT_PICTURES = 64
"""Pictures that stay decoded, because the episodes of a group ask for the same ones."""


class Prompts:
    """The prompts of one engine."""

    def __init__(self, images: ImageProcessor | None) -> None:
        """`images`: the model's processor, if it takes some."""
        self._images = images
        self._pictures: OrderedDict[str, Image] = OrderedDict()

    @property
    def bad_words(self) -> list[str] | None:
        """What is never sampled: a token that stands for a piece of an image which is not there."""
        return None if self._images is None else [self._images.text]

    async def prompt(self, request: GenerateRequest, ids: Sequence[int], cache_version: int | None) -> TokensPrompt:
        """`ids` are those of the request and of what was sampled since. `cache_version` as in `Reply`.

        Raises ValueError for images that the model does not take, or that cannot be read.
        """
        from vllm.inputs import TokensPrompt

        prompt = TokensPrompt(prompt_token_ids=list(ids))
        if cache_version is not None:  # vLLM shares blocks among requests of one salt only
            prompt["cache_salt"] = str(cache_version)
        if not request.images:
            return prompt
        if self._images is None:
            raise ValueError(f"a request shows {len(request.images)} images, and the model takes none")
        prompt["prompt_token_ids"] = collapsed(ids, self._images.token, request.images)
        prompt["multi_modal_data"] = {"image": [await self._picture(request, image.key) for image in request.images]}
        prompt["multi_modal_uuids"] = {"image": [image.key for image in request.images]}
        return prompt

    async def _picture(self, request: GenerateRequest, key: str) -> Image:
        if key not in self._pictures:
            file = request.pictures[key]
            if not isinstance(file, bytes):
                waiting: Awaitable[bytes] = file  # pyright: ignore[reportAssignmentType]  a handle of Ray
                file = await waiting
            self._pictures[key] = await asyncio.to_thread(open_image, file)
        self._pictures.move_to_end(key)
        if len(self._pictures) > KEPT_PICTURES:
            self._pictures.popitem(last=False)
        return self._pictures[key]


def check_ids(found: Sequence[int] | None, ids: Sequence[int]) -> None:
    """Raise RunError if vLLM has written an image's tokens otherwise than the runner did."""
    if found is not None and list(found) != list(ids):
        raise RunError(
            f"vLLM wrote a prompt with images as {len(found)} tokens, and the model's processor as {len(ids)}; install "
            "the transformers that vLLM was tested with, or another model"
        )
