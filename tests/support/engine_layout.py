"""Where the ranks of an engine keep each parameter, learnt from vLLM's own loader.

config of the model -> vLLM's model without storage -> its `load_weights`, watched -> Layout

The model is built on torch's meta device, once for each rank, as that rank of a group that does not exist: no engine is
started, no memory is taken and no GPU is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed import ProcessGroup
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

from rlflow.weights.engine.tracing import trace_loading
from rlflow.weights.shape.landings import layout_of
from rlflow.weights.shape.layout import Layout, Shapes

# Names in vLLM's module: the groups that span the ranks of an engine, and those that hold one rank each.
_SPANNING = ("_WORLD", "_TP", "_EP")
_SINGLE = ("_PP", "_DP", "_DCP", "_PCP", "_ETP")


def engine_layout(model_path: str, dtype: str, tensor_parallel: int, shapes: Shapes) -> Layout:
    """Where an engine keeps the parameters with these Hugging Face names and shapes.

    A parameter that the engine does not take, such as an output layer that it ties to the embedding, has a placement
    without regions. Not for a process in which an engine runs: vLLM's groups are others while the model is built.

    Raises NotACopy when the loader does anything but copy elements; ConfigError when it refuses a parameter, or one is
    missing.
    """
    ranks = []
    for rank in range(tensor_parallel):
        with as_rank(rank, tensor_parallel):
            with torch.device("meta"):
                config, model = build_model(model_path, dtype, tensor_parallel)
            with set_current_vllm_config(config):
                ranks.append(trace_loading(model, model.load_weights, shapes, getattr(torch, dtype)))
    return layout_of(shapes, dict.fromkeys(shapes, dtype), ranks)


def build_model(model_path: str, dtype: str, tensor_parallel: int) -> tuple[VllmConfig, Any]:
    """vLLM's model as `as_rank` says, on torch's default device, with whatever was in the memory for weights."""
    arguments = EngineArgs(
        model=model_path, skip_tokenizer_init=True, load_format="dummy", dtype=getattr(torch, dtype), enforce_eager=True
    )
    config = arguments.create_engine_config()
    # Set afterwards: vLLM would look for as many devices.
    config.parallel_config.tensor_parallel_size = tensor_parallel
    with set_default_torch_dtype(getattr(torch, dtype)):
        return config, initialize_model(config)


@contextmanager
def as_rank(rank: int, size: int) -> Iterator[None]:
    """Let vLLM's layers believe that this process is one of the ranks of an engine. It cannot communicate."""
    groups = {name: _group(rank, size) for name in _SPANNING} | {name: _group(0, 1) for name in _SINGLE}
    before = {name: getattr(parallel_state, name) for name in groups}
    _set_groups(groups)
    try:
        yield
    finally:
        _set_groups(before)


def _set_groups(groups: dict[str, GroupCoordinator | None]) -> None:
    for name, group in groups.items():
        setattr(parallel_state, name, group)


def _group(rank: int, size: int) -> GroupCoordinator | None:
    """What layers ask of a group when they are made: who they are in it."""
    group = GroupCoordinator.__new__(GroupCoordinator)
    group.rank = group.rank_in_group = group.local_rank = rank
    group.world_size, group.ranks = size, list(range(size))
    group.device_group = group.cpu_group = ProcessGroup(rank, size)  # pyright: ignore[reportCallIssue]
    group.use_device_communicator, group.device_communicator = False, None
    return group
