"""What stands for torchvision where none is installed, in vLLM's processes (its plugin, pyproject.toml) and in ours.

Its wheels are built for CUDA, so that the CPU build has none. vLLM's modules of Qwen3.5 and others import the image
processors of transformers, which import torchvision, also for a model that only reads text (0.32, module qwen3_vl).
Processors of models that see videos too, such as Qwen-VL, open a part for these, which needs torchvision; their part
for images has a form that does not (transformers 5.19).
"""

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from itertools import accumulate
from types import ModuleType
from typing import Any, ClassVar


def register() -> None:
    """Let such imports succeed in this process, and such processors open, if torchvision is not installed."""
    if find_spec("torchvision") is None:
        leave_videos_out()  # transformers keeps what it has found, so that it takes processors that need none
        for name in accumulate(("torchvision", "transforms", "v2", "functional"), "{}.{}".format):
            sys.modules[name] = ModuleType(name)
            sys.modules[name].__spec__ = ModuleSpec(name, None)


def leave_videos_out() -> None:
    """Let processors of images and videos open without the latter, if torchvision is not installed."""
    from transformers.utils.import_utils import is_torchvision_available

    if is_torchvision_available():
        return
    from transformers import processing_utils
    from transformers.image_processing_base import ImageProcessingMixin

    class NoVideos(ImageProcessingMixin):
        """A processor of videos that takes none."""

        # vLLM asks for these whether there are videos or not; it counts the tokens of the largest one (0.32).
        valid_kwargs = processing_utils.VideosKwargs
        size: ClassVar = {"shortest_edge": 1 << 17, "longest_edge": 1 << 20}
        temporal_patch_size = 2

        @classmethod
        def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
            del args, kwargs
            return cls()

    # By these names a processor finds the class that opens its part for videos, and that of what was opened.
    opening = import_module("transformers.models.auto.video_processing_auto")  # as a name of its package it may differ
    vars(opening)["AutoVideoProcessor"] = NoVideos
    vars(processing_utils.transformers_module)["VideoProcessorMixin"] = NoVideos
