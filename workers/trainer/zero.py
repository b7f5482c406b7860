"""ZeRO's flat buffers, and which elements of which parameters lie where in them.

Only this file depends on the inside of DeepSpeed's optimisers. ZeRO 1 and 2 lay all parameters end to end and give each
rank an equal part; ZeRO 3 gives each rank an equal part of every parameter. A rank's float32 masters lie in one or a
few flat buffers, and so do their moments.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rlflow.weights.shape.layout import chunk_of


def partitioning(deepspeed: Any, settings: dict[str, Any], dtype: torch.dtype) -> Callable[[nn.Parameter], None]:
    """ZeRO 3's way of sending a parameter from rank 0 to all ranks, each of which keeps its part; collective."""
    init = deepspeed.zero.Init(module=nn.Module(), config_dict_or_path=settings, dtype=dtype)
    return lambda parameter: init._convert_to_zero_parameters([parameter])


class ZeroRun(NamedTuple):
    """Elements [start, stop) of a parameter, which lie in a flat buffer from `offset` on."""

    name: str
    start: int
    stop: int
    offset: int

    @property
    def run(self) -> slice:
        return slice(self.offset, self.offset + self.stop - self.start)


class ZeroLayout(ABC):
    """What the back end needs to know about DeepSpeed's optimiser."""

    _offloads: str
    """Its attribute that says whether it offloads."""

    def __init__(self, optimizer: Any, parameters: Mapping[str, Any], rank: int, world_size: int) -> None:
        """`parameters` are the model's, by name; DeepSpeed has added attributes to them."""
        self._zero = optimizer
        self._parameters = parameters
        self._trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        self._rank = rank
        self._world_size = world_size

    @abstractmethod
    def masters(self) -> Iterator[tuple[Tensor, list[ZeroRun]]]:
        """Each flat float32 buffer and the runs of parameters in it; in memory until the next one is asked for."""

    def gradients(self) -> list[Tensor]:
        """Tensors with the norm of this rank's part of the averaged gradient, after the last backward of a step."""
        if getattr(self._zero, self._offloads):
            return list(self._zero.norm_for_param_grads.values())
        return [gradient for group in self._zero.averaged_gradients.values() for gradient in group]

    @abstractmethod
    def publish(self) -> None:
        """Copy the masters' values into the parameters that the model computes with."""

    @abstractmethod
    def resident(self) -> Iterator[Tensor]:
        """Everything that takes memory of the device between two calls, except the optimiser's state."""


class PartitionedOptimizer(ZeroLayout):
    """ZeRO 1 and 2; there is one group of parameters."""

    _offloads = "cpu_offload"

    def masters(self) -> Iterator[tuple[Tensor, list[ZeroRun]]]:
        pieces: list[ZeroRun] = []
        for name, parameter in self._trained.items():
            mapping = parameter._hp_mapping
            if mapping is not None:
                start, size = mapping.lp_fragment_address.start, mapping.lp_fragment_address.numel
                offset = mapping.hp_fragment_address.start
                pieces.append(ZeroRun(name=name, start=start, stop=start + size, offset=offset))
        yield self._zero.single_partition_of_fp32_groups[0], pieces

    def publish(self) -> None:
        self._zero.update_lp_params()

    def resident(self) -> Iterator[Tensor]:
        yield from self._zero.single_partition_of_fp32_groups
        yield from self._zero.bit16_groups_flat
        for group in (*self._zero.averaged_gradients.values(), *self._zero.all_grad_tensors.values()):
            yield from group or ()
        for parameter in self._trained.values():
            yield from (tensor for tensor in (parameter.grad, parameter.grad_accum) if tensor is not None)
        yield from (parameter.detach() for parameter in self._parameters.values() if not parameter.requires_grad)


class PartitionedParameters(ZeroLayout):
    """ZeRO 3; parameters are divided into sub-groups, each with a buffer that may lie on a disk."""

    _offloads = "offload_optimizer"

    def masters(self) -> Iterator[tuple[Tensor, list[ZeroRun]]]:
        pieces: list[list[ZeroRun]] = [[] for _ in self._zero.fp32_partitioned_groups_flat]
        for name, parameter in self._trained.items():
            group, offset, _ = self._zero.grad_position[self._zero.get_param_id(parameter)]
            start, stop = chunk_of(parameter.ds_numel, self._rank, self._world_size)
            pieces[group].append(ZeroRun(name=name, start=start, stop=stop, offset=offset))
        for group, flat in enumerate(self._zero.fp32_partitioned_groups_flat):
            is_swapped = self._zero._swappable_optimizer_subgroup(group)
            if is_swapped:
                self._zero._optimizer_states_and_gradient_swap_in(group)
            yield flat, pieces[group]
            if is_swapped:
                self._zero._optimizer_states_and_gradient_swap_out(group)

    @torch.no_grad()
    def publish(self) -> None:
        self._zero._partition_all_parameters()
        for group in range(len(self._zero.fp32_partitioned_groups_flat)):
            self._zero._reassign_or_swap_out_partitioned_parameters(group)
        if self._zero.persistent_parameters:
            self._zero.persistent_parameters[0].all_gather(self._zero.persistent_parameters)

    def resident(self) -> Iterator[Tensor]:
        self._zero.empty_partition_cache()
        yield from self._zero.fp32_partitioned_groups_flat
        yield self._zero.grad_partitions_flat_buffer
        for parameter in self._parameters.values():
            yield from (parameter.detach(), parameter.ds_tensor)
        yield from (bucket.buffer for bucket in self._zero.ipg_buckets.values() if bucket.buffer is not None)
