"""An engine without GPUs whose routers are recorded, one request at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rlflow.rollout.requests import FinishReason
from rlflow.weights.extension import WorkerExtension
from rlflow.workers.engine.engine import RolloutEngine
from rlflow.workers.engine.replies import Reply


class RecordingExtension(WorkerExtension):
    """Mixed into vLLM's worker."""

    chosen: dict[int, list[torch.Tensor]]

    def record_routes(self) -> None:
        from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

        self.chosen = {}
        for module in self.model_runner.model.modules():
            if isinstance(module, MoERunner):
                steps = self.chosen[module.layer_id] = []
                module.router.set_capture_fn(lambda ids, steps=steps: steps.append(ids.clone()))

    def take_routes(self) -> list[Any]:
        """[tokens, layers, k] since the last call."""
        layers = [torch.cat(self.chosen[layer]) for layer in sorted(self.chosen)]
        for steps in self.chosen.values():
            steps.clear()
        return torch.stack(layers, 1).tolist()


class RecordingEngine(RolloutEngine):
    """Adds to each reply the experts that it went to."""

    def _arguments(self) -> dict[str, Any]:
        # The experts of a cached prefix would not be seen.
        other = {"worker_extension_cls": "recording.RecordingExtension", "enable_prefix_caching": False}
        return super()._arguments() | other

    async def record(self) -> None:
        """From now on."""
        await self._engine.collective_rpc("record_routes")

    async def _run(self, reply: Reply, sampling: Any) -> FinishReason:
        finish_reason = await super()._run(reply, sampling)
        (rows,) = await self._engine.collective_rpc("take_routes")
        reply.add_routes(np.array(rows, np.uint8)[reply.num_routed :])
        return finish_reason
