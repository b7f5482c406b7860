"""The DeepSpeed back end: ZeRO 1, 2 and 3; gloo on CPU, NCCL on CUDA.

DeepSpeed shards, reduces and offloads. Which gradients are applied, and how they are scaled, is decided in `packed.py`
as for every back end. Masters and moments are float32.
"""

import logging
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlflow.config import Config, Dtype, Offload
from rlflow.errors import ConfigError
from rlflow.weights.shape.layout import Layout, runs_layout
from rlflow.workers.trainer.lora import is_of_experts
from rlflow.workers.trainer.optimizers import adamw, decayed, fresh_moments, state_tensors
from rlflow.workers.trainer.packed import MicroBatch, TrainerBackend
from rlflow.workers.trainer.policy import torch_dtype
from rlflow.workers.trainer.pretrained import move_buffers, with_memory
from rlflow.workers.trainer.shards import MOMENTS, PARAMETER, Shard, ShardReader
from rlflow.workers.trainer.zero import PartitionedOptimizer, PartitionedParameters, partitioning

_BUCKET_ELEMENTS = 2**26
"""Elements that are reduced or gathered at once: 256 MiB in float32."""
_TOO_LARGE = 1e19
"""From here on DeepSpeed takes a norm for infinite, because it squares norms in float32."""


class DeepSpeedTrainer(TrainerBackend):
    """One rank; see `TrainerBackend` for the arguments."""

    def __init__(
        self, config: Config, model_path: str, rank: int, world_size: int, rendezvous: str, is_critic: bool = False
    ) -> None:
        super().__init__(config, model_path, rank, world_size, rendezvous, is_critic, is_distributed=True)
        if config.trainer.zero_stage == 3 and any(map(is_of_experts, self._shapes)):
            raise ConfigError(
                "trainer.zero_stage=3 does not go with adapters on experts, whose parts ZeRO gathers too late; set it "
                "to 2, take trainer.backend=fsdp, or leave experts out with lora.targets"
            )
        self._deepspeed = _import_deepspeed(self._device)
        vectors = [math.prod(shape) for shape in self._all_shapes.values() if len(shape) < 2]
        settings = zero_settings(config, max(vectors, default=0))
        self._fill_first(settings)
        self._parameters = dict(self._policy.model.named_parameters())
        self._optimizer = adamw(config.trainer, [each for each in self._parameters.values() if each.requires_grad])
        self._optimizer.register_step_pre_hook(self._before_update)
        self._engine: Any = self._deepspeed.initialize(
            model=self._policy,
            optimizer=self._optimizer,
            config=settings,
            dist_init_required=False,
        )[0]
        self._is_gathered = config.trainer.zero_stage != 3
        layout = PartitionedOptimizer if self._is_gathered else PartitionedParameters
        self._zero = layout(self._engine.optimizer, self._parameters, rank, world_size)
        self._held: MicroBatch | None = None
        self._scale: float | None = None

    def _fill_first(self, settings: dict[str, Any]) -> None:
        """Give the parameters memory, and on rank 0 their first values, which DeepSpeed sends to the other ranks."""
        dtype = torch_dtype(self._config)
        partition = None
        if self._config.trainer.zero_stage == 3:
            partition = partitioning(self._deepspeed, settings, dtype)
        for name, parameter in with_memory(self._policy.model, self._device, dtype):
            if self._rank == 0:
                parameter.detach().copy_(self._first.whole(name))
            if partition is not None:
                partition(parameter)
        move_buffers(self._policy, lambda buffer: buffer.to(self._device))
        del self._first

    @property
    def _forward(self) -> nn.Module:
        return self._engine

    def accumulate(self, groups: Sequence[MicroBatch]) -> None:
        """Holds the last micro-batch back, because DeepSpeed must know beforehand which is the last one of a step."""
        for micro_batch in self._in_pieces(groups):
            if self._held is not None:
                self._backward(self._held, is_last=False)
            self._held = micro_batch

    def _finish_gradients(self) -> None:
        self._backward(self._held or (), is_last=True)
        self._held = None

    def _backward(self, micro_batch: MicroBatch, is_last: bool) -> None:
        self._engine.set_gradient_accumulation_boundary(is_last)
        # DeepSpeed averages over the ranks; a step divides sums.
        self._engine.backward(self._loss(micro_batch) * self._world_size, scale_wrt_gas=False)
        if not is_last:
            self._engine.step()

    def _gradient_norm(self) -> float:
        norm = self._norm(self._zero.gradients())
        return norm if norm < _TOO_LARGE else math.inf

    def _update(self, scale: float, learning_rate: float) -> None:
        for options in self._optimizer.param_groups:
            options["lr"] = learning_rate
        self._scale = scale
        self._decay(learning_rate * self._config.trainer.weight_decay)
        self._engine.step()
        assert self._engine.was_step_applied(), "DeepSpeed skipped a finite gradient"

    def _decay(self, share: float) -> None:
        """Take a share of themselves from the weights that decay."""
        if share:
            names = decayed(self._shapes, self._hidden)
            for flat, pieces in self._zero.masters():
                for piece in pieces:
                    if piece.name in names:
                        flat.detach()[piece.run].mul_(1 - share)

    def _discard_gradients(self) -> None:
        """DeepSpeed itself skips a gradient that is not finite."""
        self._scale = None
        self._engine.step()

    def _before_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """DeepSpeed calls the optimiser once for each flat buffer, whose gradient it has just put in place."""
        assert self._scale is not None, "DeepSpeed applied a gradient that is not finite"
        for options in optimizer.param_groups:
            for flat in options["params"]:
                flat.grad.mul_(self._scale)

    @contextmanager
    def _whole(self, names: Sequence[str]) -> Iterator[list[Tensor]]:
        parameters = [self._parameters[name] for name in names]
        with self._deepspeed.zero.GatheredParameters(parameters, enabled=not self._is_gathered):
            yield [parameter.detach() for parameter in parameters]

    def _layout_of_ranks(self, dtype: str) -> Layout:
        own = {piece.name: (piece.start, piece.stop) for _, pieces in self._zero.masters() for piece in pieces}
        runs = torch.tensor([own.get(name, (0, 0)) for name in self._shapes], device=self._device)
        ranks = [torch.empty_like(runs) for _ in range(self._world_size)]
        dist.all_gather(ranks, runs)
        of_rank = [dict(zip(self._shapes, map(tuple, found.tolist()), strict=True)) for found in ranks]
        return runs_layout(self._shapes, dtype, of_rank)

    def _parameter_parts(self) -> Iterator[tuple[str, Tensor]]:
        for flat, pieces in self._zero.masters():
            for piece in pieces:
                yield piece.name, flat.detach()[piece.run]

    def _shards(self) -> Iterator[Shard]:
        kinds: tuple[str, ...] = (PARAMETER, *MOMENTS) if self._config.trainer.save_optimizer else (PARAMETER,)
        held: dict[str, Shard] = {}
        for flat, pieces in self._zero.masters():
            state = self._optimizer.state.get(flat) or fresh_moments(flat.detach(), self._updates)
            tensors = {PARAMETER: flat.detach()} | state
            for piece in pieces:
                found = {kind: tensors[kind][piece.run].to("cpu", copy=True) for kind in kinds}
                shape = self._shapes[piece.name]
                held[piece.name] = Shard(name=piece.name, shape=shape, start=piece.start, tensors=found)
        nothing: dict[str, Tensor] = dict.fromkeys(kinds, torch.empty(0))
        for name, shape in self._shapes.items():
            yield held.get(name) or Shard(name=name, shape=shape, start=0, tensors=nothing)

    def _load_shards(self, reader: ShardReader) -> None:
        for flat, pieces in self._zero.masters():
            self._optimizer.state.pop(flat, None)
            targets = {PARAMETER: flat.detach()}
            if reader.has_optimizer:
                self._optimizer.state[flat] = fresh_moments(flat.detach(), self._updates)
                targets |= {kind: self._optimizer.state[flat][kind] for kind in MOMENTS}
            for piece in pieces:
                for kind, target in targets.items():
                    target[piece.run].copy_(reader.read(kind, piece.name, piece.start, piece.stop))
        self._zero.publish()

    def _resident(self) -> Iterator[Tensor]:
        yield from self._zero.resident()
        yield from state_tensors(self._optimizer)

    def close(self) -> None:
        self._engine.destroy()
        super().close()


def zero_settings(config: Config, largest_vector: int) -> dict[str, Any]:
    """DeepSpeed's own configuration. The largest norm or bias has `largest_vector` elements."""
    trainer = config.trainer
    zero: dict[str, Any] = {
        "stage": trainer.zero_stage,
        "reduce_bucket_size": _BUCKET_ELEMENTS,
        "allgather_bucket_size": _BUCKET_ELEMENTS,
        # Vectors stay whole, because gathering them costs more than it saves.
        "stage3_param_persistence_threshold": largest_vector + 1,
    }
    target = {"device": "nvme", "nvme_path": trainer.nvme_path} if trainer.nvme_path else {"device": "cpu"}
    if trainer.nvme_path or trainer.offload is Offload.cpu:
        zero["offload_optimizer"] = target
        if trainer.zero_stage == 3:
            zero["offload_param"] = target
    return {
        "train_micro_batch_size_per_gpu": 1,
        # The number of micro-batches in a step is not known here; 2 says that there may be more than one.
        "gradient_accumulation_steps": 2,
        "bf16": {"enabled": config.model.dtype is Dtype.bfloat16},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
        # The optimiser is torch's own on the CPU too; DeepSpeed would compile one.
        "zero_force_ds_cpu_optimizer": False,
    }


def _import_deepspeed(device: torch.device) -> Any:
    """Raises ConfigError if it is not installed."""
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("LOCAL_RANK", str(device.index or 0))
    try:
        import deepspeed
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"trainer.backend=deepspeed needs a package that is missing: {error}; install rlflow with the extra "
            "`deepspeed`, or set trainer.backend=fsdp"
        ) from error
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # DeepSpeed would compile this operator at once, and training does not use it.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
    return deepspeed
