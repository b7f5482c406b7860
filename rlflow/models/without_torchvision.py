"""A torchvision without contents, for vLLM's processes where none is installed; a plugin of vLLM (pyproject.toml).

vLLM's modules of Qwen3.5 and others import the image processors of transformers, which import torchvision, also for a
model that only reads text (0.32, module qwen3_vl). Its wheels are built for CUDA, so that the CPU build has none.
"""

import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from itertools import accumulate
from types import ModuleType


def register() -> None:
    """Let such imports succeed in this process, if torchvision is not installed."""
    if find_spec("torchvision") is None:
        from transformers.utils.import_utils import is_torchvision_available

        is_torchvision_available()  # transformers keeps the answer, so that it takes processors that need none
        for name in accumulate(("torchvision", "transforms", "v2", "functional"), "{}.{}".format):
            sys.modules[name] = ModuleType(name)
            sys.modules[name].__spec__ = ModuleSpec(name, None)
