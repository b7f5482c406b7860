"""The FSDP2 back end: gloo on CPU, NCCL on CUDA.

Parameters and moments are float32, sharded along their first dimension. A single float32 rank that keeps everything on
its device has nothing to shard or to cast, so it trains the bare module.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from rlflow.config import Config, Offload
from rlflow.workers.trainer.base import MicroBatch, Role
from rlflow.workers.trainer.packed import PackedTrainer, adamw, fresh_moments, state_tensors
from rlflow.workers.trainer.policy import Policy, torch_dtype
from rlflow.workers.trainer.shards import MOMENTS, PARAMETER, Shard, ShardReader, shard_range
from rlflow.workers.trainer.value import ValueModel


class FsdpTrainer(PackedTrainer):
    """One rank; see `PackedTrainer` for the arguments."""

    def __init__(
        self, config: Config, model_path: str, rank: int, world_size: int, rendezvous: str, role: Role = Role.policy
    ) -> None:
        self._is_offloaded = config.trainer.offload is Offload.cpu
        is_sharded = world_size > 1 or torch_dtype(config) != torch.float32 or self._is_offloaded
        super().__init__(config, model_path, rank, world_size, rendezvous, role, is_distributed=is_sharded)
        if is_sharded:
            _shard(self._policy, self._device, world_size, torch_dtype(config), self._is_offloaded)
        if self._is_offloaded:
            _move_buffers(self._policy, self._device)
        else:
            self._policy.to(self._device)
        self._parameters = dict(self._policy.model.named_parameters())
        self._optimizer = adamw(config, list(self._parameters.values()))

    @property
    def _forward(self) -> nn.Module:
        return self._policy

    def accumulate(self, groups: Sequence[MicroBatch]) -> None:
        for micro_batch in groups:
            self._loss(micro_batch).backward()

    def _finish_gradients(self) -> None:
        """Where nothing had a gradient it is zero, so that the optimiser's momentum acts all the same."""
        for parameter in self._parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def _gradients(self) -> list[Tensor]:
        return [_local(parameter.grad) for parameter in self._parameters.values() if parameter.grad is not None]

    def _gradient_norm(self) -> float:
        return self._norm(self._gradients())

    def _update(self, scale: float, learning_rate: float) -> None:
        for gradient in self._gradients():
            gradient.mul_(scale)
        for options in self._optimizer.param_groups:
            options["lr"] = learning_rate
        self._reshard()
        self._optimizer.step()
        self._discard_gradients()

    def _discard_gradients(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._parameters.items():
            tensor = parameter.detach().to(self._device)
            yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def _shards(self) -> Iterator[Shard]:
        for name, parameter in self._parameters.items():
            tensors = {PARAMETER: _elements(parameter.detach())}
            if self._config.trainer.save_optimizer:
                state = self._optimizer.state.get(parameter) or fresh_moments(parameter, self._updates)
                tensors |= {kind: _elements(state[kind]) for kind in MOMENTS}
            start, stop = self._interval(name)
            assert len(tensors[PARAMETER]) == stop - start, f"{name} is cut another way than FSDP2 does"
            yield Shard(name=name, shape=self._shapes[name], start=start, tensors=tensors)

    def _load_shards(self, reader: ShardReader) -> None:
        self._reshard()
        for name, parameter in self._parameters.items():
            interval = self._interval(name)
            _fill(parameter.detach(), reader.read(PARAMETER, name, *interval))
            self._optimizer.state.pop(parameter, None)
            if reader.has_optimizer:
                state = fresh_moments(parameter.detach(), self._updates)
                for kind in MOMENTS:
                    _fill(state[kind], reader.read(kind, name, *interval))
                self._optimizer.state[parameter] = state

    def _reshard(self) -> None:
        """The root stays gathered after a forward without backward; the next one would use it as it was then."""
        if isinstance(self._policy, FSDPModule):
            self._policy.reshard()

    def _interval(self, name: str) -> tuple[int, int]:
        """The elements of a parameter that this rank holds: its rows."""
        num_rows, *row = self._shapes[name]
        start, stop = shard_range(num_rows, self._rank, self._world_size)
        return start * math.prod(row), stop * math.prod(row)

    def _resident(self) -> Iterator[Tensor]:
        self._reshard()
        for tensor in (*self._parameters.values(), *state_tensors(self._optimizer)):
            yield _local(tensor.detach())
        for parameter in self._parameters.values():
            if parameter.grad is not None:
                yield _local(parameter.grad)


def _shard(
    policy: Policy | ValueModel, device: torch.device, world_size: int, dtype: torch.dtype, is_offloaded: bool
) -> None:
    """Shard each decoder layer, and the rest as the root; gradients are summed over the ranks, not averaged."""
    mesh = init_device_mesh(device.type, (world_size,))
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if is_offloaded else OffloadPolicy()
    layers = policy.model.base_model.layers
    assert isinstance(layers, nn.ModuleList)
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision, offload_policy=offload)
    fully_shard(policy, mesh=mesh, mp_policy=precision, offload_policy=offload)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _move_buffers(policy: Policy | ValueModel, device: torch.device) -> None:
    """What is not sharded is used where it lies."""
    for module in policy.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to(device))


def _local(tensor: Tensor) -> Tensor:
    """This rank's rows."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _elements(tensor: Tensor) -> Tensor:
    """A copy of this rank's rows, flat, on the CPU."""
    return _local(tensor).to("cpu", copy=True).flatten()


def _fill(tensor: Tensor, elements: Tensor) -> None:
    rows = _local(tensor)
    rows.copy_(elements.view(rows.shape))
