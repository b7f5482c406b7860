"""The FSDP2 back end, with tensor parallelism: gloo on CPU, NCCL on CUDA.

Trained parameters and their moments are float32 and sharded along their first dimension: whole parameters over all
ranks, slices of tensor-parallel ones over the ranks that have the same slice. So every element is on exactly one rank
of each replica: a replica gathers and scatters by itself, and the replicas add up their gradients once a step.
A single float32 rank that keeps everything on its device has nothing to shard or to cast, so it trains the bare module.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from rlflow.config import Config, Offload
from rlflow.errors import ConfigError
from rlflow.weights.shape.layout import Layout, chunk_of, fsdp_layout
from rlflow.workers.trainer.layers import decoder_layers
from rlflow.workers.trainer.optimizers import ShardGroup, ShardOptimizer
from rlflow.workers.trainer.packed import MicroBatch, TrainerBackend
from rlflow.workers.trainer.policy import Policy, torch_dtype
from rlflow.workers.trainer.pretrained import CPU, move_buffers, with_memory
from rlflow.workers.trainer.process_group import join_subgroup
from rlflow.workers.trainer.rank_group import RankGroup
from rlflow.workers.trainer.shards import PARAMETER, Shard, ShardReader
from rlflow.workers.trainer.tensor_parallel import cut_layers


class FsdpTrainer(TrainerBackend):
    """One rank; see `TrainerBackend` for the arguments."""

    def __init__(
        self, config: Config, model_path: str, rank: int, world_size: int, rendezvous: str, is_critic: bool = False
    ) -> None:
        self._is_offloaded = config.trainer.offload is Offload.cpu
        is_sharded = world_size > 1 or torch_dtype(config) != torch.float32 or self._is_offloaded
        super().__init__(config, model_path, rank, world_size, rendezvous, is_critic, is_distributed=is_sharded)
        self._group, self._cut = RankGroup(), dict[str, int]()
        self._num_shards = world_size // config.trainer.replicas if is_sharded else 1
        self._replica, self._shard_rank = divmod(rank, self._num_shards)
        self._shard_group: dist.ProcessGroup | None = None
        """The ranks of this replica; None if nothing is sharded."""
        self._copies: dist.ProcessGroup | None = None
        """The ranks that hold what this one holds, one of each replica; None if there is one replica."""
        if is_sharded:
            self._shard(self._cut_for_tensor_parallel() if config.trainer.tensor_parallel > 1 else None)
        place = CPU if self._is_offloaded else self._device
        for _ in with_memory(self._policy, place):
            pass
        self._policy.to(place)  # shows FSDP its new parameters, which it pads
        # Buffers are not sharded, so they are used where they lie.
        move_buffers(self._policy, lambda buffer: buffer.to(self._device))
        self._parameters = dict(self._policy.model.named_parameters())
        self._fill_first()
        self._trained = {name: parameter for name, parameter in self._parameters.items() if parameter.requires_grad}
        group = ShardGroup(
            rank=self._shard_rank, size=self._num_shards, process_group=self._shard_group, device=self._device
        )
        self._optimizer = ShardOptimizer(config.trainer, self._shapes, self._hidden, group)

    def _fill_first(self) -> None:
        """Fill what this rank keeps of every parameter with its first values."""
        for name, parameter in self._parameters.items():
            rows = self._first.rows(name, *self._rows(name))
            _local(parameter.detach()).copy_(self._group.slice(rows, 1) if self._cut.get(name) == 1 else rows)
        del self._first

    def _cut_for_tensor_parallel(self) -> DeviceMesh:
        """Keep only this rank's slices; returns the ranks that train the same slices on other micro-batches."""
        size, timeout_s = self._config.trainer.tensor_parallel, self._config.deadlines.train_s
        ranks = torch.arange(self._world_size).view(-1, self._num_shards // size, size)
        neighbours = join_subgroup(ranks.flatten(0, 1).tolist(), timeout_s)
        self._group = RankGroup(rank=self._rank % size, size=size, process_group=neighbours)
        self._cut = cut_layers(self._policy.model, self._group)
        if isinstance(self._policy, Policy):
            self._policy.share_head(self._group)
        return DeviceMesh.from_group(join_subgroup(ranks.mT.flatten(0, 1).tolist(), timeout_s), self._device.type)

    def _shard(self, data_mesh: DeviceMesh | None) -> None:
        """Shard each decoder layer, and the rest as the root. Gradients are summed over the ranks, not averaged.

        Parameters that were cut are sharded over `data_mesh`, the others over all ranks of the replica.
        """
        ranks, timeout_s = torch.arange(self._world_size).view(-1, self._num_shards), self._config.deadlines.train_s
        own = dist.group.WORLD
        if len(ranks) > 1:
            own = join_subgroup(ranks.tolist(), timeout_s)
            self._copies = join_subgroup(ranks.T.tolist(), timeout_s)
        assert own is not None, "the ranks have met"
        self._shard_group, mesh = own, DeviceMesh.from_group(own, self._device.type)
        precision = MixedPrecisionPolicy(param_dtype=torch_dtype(self._config), reduce_dtype=torch.float32)
        offload = OffloadPolicy()
        if self._is_offloaded:
            offload = CPUOffloadPolicy(pin_memory=self._device.type == "cuda")
        slices = {parameter for name, parameter in self._policy.model.named_parameters() if name in self._cut}
        among_data = None if data_mesh is None else _sharded_over(data_mesh)

        def placement(parameter: nn.Parameter) -> Any:
            return among_data if parameter in slices else None

        for module in (*decoder_layers(self._policy.model), self._policy):
            fully_shard(module, mesh=mesh, shard_placement_fn=placement, mp_policy=precision, offload_policy=offload)
        for module in self._policy.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

    @property
    def _forward(self) -> nn.Module:
        return self._policy

    def accumulate(self, groups: Sequence[MicroBatch]) -> None:
        for micro_batch in self._in_pieces(groups):
            self._loss(micro_batch).backward()

    def _finish_gradients(self) -> None:
        """Give parameters without a gradient a zero one, because the optimiser's momentum must still act.

        Then add up the replicas' gradients, which cost no traffic between replicas until now.
        """
        for parameter in self._trained.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if self._copies is not None:
            for gradient in self._gradients().values():
                total = gradient.to(self._device)
                dist.all_reduce(total, group=self._copies)
                gradient.copy_(total)

    def _gradients(self) -> dict[str, Tensor]:
        grads = {name: parameter.grad for name, parameter in self._trained.items()}
        return {name: _local(gradient) for name, gradient in grads.items() if gradient is not None}

    def _gradient_norm(self) -> float:
        return self._norm(list(self._gradients().values()))

    def _update(self, scale: float, learning_rate: float) -> None:
        gradients = self._gradients()
        for gradient in gradients.values():
            gradient.mul_(scale)
        self._reshard()
        self._optimizer.step(self._rows_of_trained(), gradients, learning_rate)
        self._discard_gradients()

    def _discard_gradients(self) -> None:
        for parameter in self._trained.values():
            parameter.grad = None

    def _rows_of_trained(self) -> dict[str, Tensor]:
        return {name: _local(parameter.detach()) for name, parameter in self._trained.items()}

    def _whole(self, names: Sequence[str]) -> AbstractContextManager[list[Tensor]]:
        return nullcontext([self._gathered(name) for name in names])

    def _gathered(self, name: str) -> Tensor:
        tensor = self._parameters[name].detach().to(self._device)
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        return self._group.join(whole, self._cut[name]) if name in self._cut else whole

    def _layout_of_ranks(self, dtype: str) -> Layout:
        replicas = self._config.trainer.replicas
        return fsdp_layout(self._all_shapes, dtype, self._world_size, self._group.size, self._cut, replicas)

    def _parameter_parts(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._parameters.items():
            yield name, _local(parameter.detach()).reshape(-1)

    def _shards(self) -> Iterator[Shard]:
        for name, parameter in self._trained.items():
            tensors = {PARAMETER: _local(parameter.detach())}
            if self._config.trainer.save_optimizer:
                tensors |= self._optimizer.moments(name, tensors[PARAMETER])
            start, stop = self._rows(name)
            # Ranks that hold the same rows, of other columns or in other replicas, divide them for saving.
            index, count = self._replica, self._config.trainer.replicas
            if self._cut.get(name) == 1:
                index, count = index * self._group.size + self._group.rank, count * self._group.size
            own = slice(*chunk_of(stop - start, index, count))
            found: dict[str, Tensor] = {}
            for kind, rows in tensors.items():
                assert len(rows) == stop - start, f"{name} is cut another way than FSDP2 does"
                if self._cut.get(name) == 1:
                    rows = self._group.join(rows.to(self._device), 1)
                found[kind] = rows[own].to("cpu", copy=True).flatten()
            first = (start + own.start) * math.prod(self._shapes[name][1:])
            yield Shard(name=name, shape=self._shapes[name], start=first, tensors=found)

    def _load_shards(self, reader: ShardReader) -> None:
        self._reshard()
        for name, shard in self._rows_of_trained().items():
            fill = partial(self._fill, reader, name)
            fill(PARAMETER, shard)
            self._optimizer.load(name, shard, fill if reader.has_optimizer else None, self._updates)

    def _fill(self, reader: ShardReader, name: str, kind: str, shard: Tensor) -> None:
        (start, stop), row = self._rows(name), self._shapes[name][1:]
        rows = reader.read(kind, name, start * math.prod(row), stop * math.prod(row)).view(stop - start, *row)
        shard.copy_(self._group.slice(rows, 1) if self._cut.get(name) == 1 else rows)

    def _reshard(self) -> None:
        """A root that stays gathered after a forward without backward would show the next forward old values."""
        if isinstance(self._policy, FSDPModule):
            self._policy.reshard()

    def _rows(self, name: str) -> tuple[int, int]:
        """The rows of a parameter that this rank holds, either of all columns or of its slice's."""
        num_rows, dim = self._all_shapes[name][0], self._cut.get(name)
        if dim is None:
            return chunk_of(num_rows, self._shard_rank, self._num_shards)
        data_rank, tensor_rank = divmod(self._shard_rank, self._group.size)
        num_slices, own_slice = (self._group.size, tensor_rank) if dim == 0 else (1, 0)
        slice_rows = num_rows // num_slices
        start, stop = chunk_of(slice_rows, data_rank, self._num_shards // self._group.size)
        return own_slice * slice_rows + start, own_slice * slice_rows + stop

    def _resident(self) -> Iterator[Tensor]:
        self._reshard()
        yield from self._optimizer.resident()
        for parameter in self._parameters.values():
            yield _local(parameter.detach())
        for parameter in self._parameters.values():
            if parameter.grad is not None:
                yield _local(parameter.grad)


def _sharded_over(mesh: DeviceMesh) -> object:
    """What tells `fully_shard` to shard a parameter over other ranks than the rest.

    Raises ConfigError if torch is too old for that.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_common as common

    if not hasattr(common, "ShardPlacementResult"):
        raise ConfigError(
            f"trainer.tensor_parallel above 1 needs torch 2.13; this is {torch.__version__}; install torch 2.13, or "
            "set trainer.tensor_parallel=1"
        )
    return common.ShardPlacementResult(placement=None, mesh_info=common.FSDPMeshInfo(mesh=mesh, shard_mesh_dim=0))


def _local(tensor: Tensor) -> Tensor:
    """This rank's rows."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
