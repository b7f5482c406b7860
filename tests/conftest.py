"""What every test shares: no network, one thread a process, quiet libraries.

The variables are set before any test module is imported, so that child processes and Ray workers get them too.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}

os.environ.update(_ENVIRONMENT)

gc.disable()  # until all tests are collected

settings.register_profile("default", max_examples=100)
settings.register_profile("many", max_examples=2000)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the proofs, unless `-m` names them."""
    if "proof" in config.option.markexpr:
        return
    proofs = [item for item in items if item.get_closest_marker("proof")]
    if proofs:
        config.hook.pytest_deselected(items=proofs)
        items[:] = [item for item in items if item not in proofs]


def pytest_collection_finish() -> None:
    """The libraries that are loaded now stay until the end: a search for garbage among their millions of objects takes
    a second, and finds none."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _environment_of_the_file() -> Iterator[None]:
    """What a file's tests set ends with them: an engine in this process keeps torch on loopback, say, and a cluster
    that a later file starts would have been kept there too."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
