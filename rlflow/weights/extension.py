"""The calls that rlflow adds to each vLLM worker, and the receiver that answers them.

vLLM imports this module through `worker_extension_cls`. The receiver lies where vLLM keeps its own weight-transfer
engine, so that vLLM shuts it down with the worker.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

from rlflow.config import Transport
from rlflow.errors import NotACopy
from rlflow.runtime.environment import keep_memory
from rlflow.weights.adapters import AdapterLayers
from rlflow.weights.disk.manifest import read_manifest
from rlflow.weights.disk.receiver import DiskReceiver
from rlflow.weights.engine.messages import COMPARISON, OPENING, Opening, WeightReport
from rlflow.weights.engine.receiver import Destination, Receiver
from rlflow.weights.engine.reload import ReloadedModel
from rlflow.weights.engine.tensors import EngineTensors, learn_landings
from rlflow.weights.ipc.receiver import SharedReceiver, device_id
from rlflow.weights.p2p.receiver import PeerReceiver, Worker
from rlflow.weights.p2p.rendezvous import TrainerStore
from rlflow.weights.shape.landings import Landings
from rlflow.weights.shape.layout import Dtypes, Shapes
from rlflow.weights.shm.arena import map_arena
from rlflow.weights.shm.receiver import ArenaReceiver


class WorkerExtension:
    """Mixed into vLLM's worker; each method is a `collective_rpc` and is explained by `Receiver`."""

    vllm_config: VllmConfig
    device: torch.device
    model_runner: Any
    weight_transfer_engine: Receiver | None

    def rlflow_open(self, **message: Any) -> tuple[bool, int]:
        """Whether the buckets may come while the engine samples, and how many will."""
        opening = OPENING.validate_python(message)
        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            receiver = self.weight_transfer_engine or self._rlflow_receiver(opening)
            self.weight_transfer_engine = receiver
            return receiver.is_beside, receiver.open(opening)

    def rlflow_receive(self, bucket: int) -> int | None:
        assert self.weight_transfer_engine is not None, "a version is opened before its buckets are received"
        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            return self.weight_transfer_engine.receive(bucket)

    def rlflow_commit(self) -> None:
        assert self.weight_transfer_engine is not None, "a version is opened before it is committed"
        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            self.weight_transfer_engine.commit()

    def rlflow_load(self, num_buckets: int) -> int | None:
        """All buckets, then commit, in one call: the engine is paused. If the trainer has replaced the version, nothing
        is committed, and the one that it has now is returned."""
        found = [self.rlflow_receive(bucket) for bucket in range(num_buckets)]
        replaced = next((version for version in found if version is not None), None)
        if replaced is None:
            self.rlflow_commit()
        return replaced

    def rlflow_compare(self, **message: Any) -> WeightReport:
        assert self.weight_transfer_engine is not None, "a version is loaded before it is compared"
        comparison = COMPARISON.validate_python(message)
        staged, expected = comparison.staged, None
        if staged.slots:
            arena = map_arena(staged.path, staged.num_bytes)
            arena.check(staged.version)
            expected = arena.tensors(staged.slots)
        with torch.no_grad():
            return self.weight_transfer_engine.compare(expected, comparison.columns)

    def rlflow_abort(self) -> None:
        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            if self.weight_transfer_engine is not None:
                self.weight_transfer_engine.abort()

    def _rlflow_receiver(self, opening: Opening) -> Receiver:
        staged = opening.staged
        if opening.adapter is not None:
            manager = self.model_runner.lora_manager._adapter_manager
            is_cut = self.vllm_config.parallel_config.world_size > 1
            return ArenaReceiver(AdapterLayers(manager, *opening.adapter, is_cut=is_cut))
        match opening.transport:
            case Transport.shm:
                shapes = {slot.name: slot.shape for slot in staged.slots}
                dtypes = {slot.name: slot.dtype for slot in staged.slots}
                return ArenaReceiver(self._rlflow_destination(shapes, dtypes))
            case Transport.disk:
                manifest = read_manifest(Path(staged.path), staged.version)
                shapes = {name: each.shape for name, each in manifest.parameters.items()}
                dtypes = {name: each.dtype for name, each in manifest.parameters.items()}
                return DiskReceiver(self._rlflow_destination(shapes, dtypes), Path(staged.path))
            case Transport.p2p | Transport.ipc:
                trainer = TrainerStore(staged.path, opening.timeout_s)
                destination = self._rlflow_destination(trainer.layout.shapes, trainer.layout.dtypes)
                if opening.transport is Transport.ipc:
                    return SharedReceiver(destination, trainer, device_id(self.device))
                rank, num_ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
                worker = Worker(engine=opening.engine, rank=rank, num_ranks=num_ranks, device=self.device)
                return PeerReceiver(destination, trainer, worker)

    def _rlflow_destination(self, shapes: Shapes, dtypes: Dtypes) -> Destination:
        """The model's own tensors, or copies of them, if vLLM keeps weights as its loader fills them; else its loader.

        Raises ConfigError when the model does not take these parameters.
        """
        model: nn.Module = self.model_runner.get_model()
        landings: Landings = {}
        if self.vllm_config.quant_config is not None:
            # Nothing that is loaded stays as it is, so nothing can be learnt or compared.
            return ReloadedModel(model, self.vllm_config.model_config, shapes, dtypes, landings)
        try:
            blank, landings = learn_landings(self.vllm_config, shapes)
            tensors = EngineTensors(model, blank, shapes, landings)
        except NotACopy:
            return ReloadedModel(model, self.vllm_config.model_config, shapes, dtypes, landings)
        if tensors.is_beside:
            keep_memory()  # each version is packed to where the one before the last was
        return tensors
