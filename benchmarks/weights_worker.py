"""What `rlflow bench weights` asks of vLLM's workers besides what a run asks of them.

vLLM imports this module through `worker_extension_cls`; it must not be imported anywhere else before vLLM is set up.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from safetensors.torch import load_file
from vllm.config import set_current_vllm_config

from rlflow.weights.engine.messages import slots_of
from rlflow.weights.engine.receiver import WorkerExtension
from rlflow.weights.engine.reload import Reloader


class MeasuredWorker(WorkerExtension):
    """Each method is a `collective_rpc`."""

    def rlflow_prepare(self, **update: Any) -> None:
        started = time.perf_counter()
        super().rlflow_prepare(**update)
        self.__dict__.setdefault("bench_prepare_s", []).append(time.perf_counter() - started)

    def bench_prepared(self) -> list[float]:
        """Seconds of each bucket that was laid out beside the model since the last call."""
        return self.__dict__.pop("bench_prepare_s", [])

    def bench_place(self, path: str, num_bytes: int, version: int, slots: list[list[object]]) -> float:
        """Seconds of copying a version from the arena to this worker's tensors, again: nothing is packed or used.

        Raises ValueError for a model whose weights vLLM's reloader puts in.
        """
        transfer = self.weight_transfer_engine
        if transfer._tensors is None:
            raise ValueError("the model does not keep its weights as they are loaded: there is no copying to measure")
        started = time.perf_counter()
        view = transfer.view(path, num_bytes)
        view.check(version)
        with torch.no_grad():
            for name, tensor in view.tensors(slots_of(slots)):
                transfer._tensors.place(name, tensor)
        if transfer.device.type != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter() - started

    def bench_reload(self, path: str) -> None:
        """Load all weights from a safetensors file as vLLM loads a checkpoint, into the model that is running."""
        model: Any = self.weight_transfer_engine.model
        reloader = Reloader(model, self.weight_transfer_engine.model_config)
        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            reloader.begin()
            tensors = load_file(path)
            reloader.load(tensors.items())
            assert not reloader.missing, "the file holds the whole model"
            reloader.commit()
