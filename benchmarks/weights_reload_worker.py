"""What `weights_beside` asks of vLLM's workers: to load a whole file.

vLLM imports this module through `worker_extension_cls`; it must not be imported anywhere else before vLLM is set up.
"""

from __future__ import annotations

from typing import Any

import torch
from safetensors.torch import load_file
from vllm.config import set_current_vllm_config

from rlflow.tools.bench.weights_worker import MeasuredWorker
from rlflow.weights.engine.reload import Reloader


class ReloadingWorker(MeasuredWorker):
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
