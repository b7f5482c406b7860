"""vLLM's modules that import image processors load where torchvision is left out."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from importlib.util import find_spec

import pytest

from rlflow.models import without_torchvision

PROGRAM = """
from rlflow.models.without_torchvision import register
register()
register()
from torchvision.transforms.v2 import functional
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize
from transformers.utils.import_utils import is_torchvision_available
assert not is_torchvision_available()
assert not hasattr(functional, "resize")
try:
    import torchvision.io
except ModuleNotFoundError:
    print("nothing else is there")
"""


def test_what_qwen3_5_imports_is_found_without_torchvision() -> None:
    if find_spec("torchvision") is not None:
        pytest.skip("torchvision is installed")
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "nothing else is there\n"


def test_vllm_calls_it_in_each_process() -> None:
    found = {each.name: each.load() for each in entry_points(group="vllm.general_plugins")}
    assert found["rlflow"] is without_torchvision.register
