"""What `rlflow bench weights` asks of vLLM's workers besides what a run asks of them.

vLLM imports this module through `worker_extension_cls`; it must not be imported anywhere else before vLLM is set up.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from safetensors.torch import load_file
from vllm.config import set_current_vllm_config

from rlflow.weights.engine.messages import COMPARISON
from rlflow.weights.engine.reload import ReloadedModel
from rlflow.weights.engine.tensors import EngineTensors
from rlflow.weights.extension import WorkerExtension
from rlflow.weights.shm.arena import map_arena


class MeasuredWorker(WorkerExtension):
    """Each method is a `collective_rpc`."""

    def rlflow_receive(self, bucket: int) -> int | None:
        started = time.perf_counter()
        found = super().rlflow_receive(bucket)
        self.__dict__.setdefault("bench_prepare_s", []).append(time.perf_counter() - started)
        return found

    def bench_prepared(self) -> list[float]:
        """Seconds of each bucket that was laid out beside the model since the last call."""
        return self.__dict__.pop("bench_prepare_s", [])

    def bench_place(self, **message: Any) -> float:
        """Seconds of copying a version from the arena to this worker's tensors, again: nothing is packed or used.

        Raises ValueError for a model whose weights vLLM's reloader puts in.
        """
        destination: Any = self.weight_transfer_engine
        destination = destination._destination
        if not isinstance(destination, EngineTensors):
            raise ValueError("the model does not keep its weights as they are loaded: there is no copying to measure")
        staged = COMPARISON.validate_python(message).staged
        started = time.perf_counter()
        arena = map_arena(staged.path, staged.num_bytes)
        arena.check(staged.version)
        with torch.no_grad():
            for name, tensor in arena.tensors(staged.slots):
                destination.place(name, tensor)
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter() - started

    def bench_reload(self, path: str) -> None:
        """Load all weights from a safetensors file as vLLM loads a checkpoint, into the model that is running."""
        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            tensors = load_file(path)
            shapes = {name: tuple(each.shape) for name, each in tensors.items()}
            dtypes = {name: str(each.dtype).removeprefix("torch.") for name, each in tensors.items()}
            reloaded = ReloadedModel(self.model_runner.get_model(), self.vllm_config.model_config, shapes, dtypes, {})
            for name, each in tensors.items():
                reloaded.land(name, each)
            reloaded.commit()
