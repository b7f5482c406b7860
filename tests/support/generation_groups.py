"""Engines on the trainer's own devices: which ranks form one, so that what each has trained stays where it is. Pure.

HybridFlow (arXiv:2409.19256, section 5.3): with consecutive ranks in an engine most ranks would need weights that they
do not hold, and keep what they do beside it. With ranks at a regular stride each rank's shard for training lies inside
its shard for generation.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlflow.errors import ConfigError
from rlflow.weights.shape.layout import EngineLayout, Layout


@dataclass(kw_only=True, slots=True, frozen=True)
class GenerationGroups:
    """Ranks of a trainer, numbered with tensor parallelism fastest, as they generate.

    Example: 8 ranks that train with a tensor parallelism of 4 and generate with one of 2:
        tensor      (0, 2) (1, 3) (4, 6) (5, 7)
        micro_data  (0, 1) (2, 3) (4, 5) (6, 7)
    """

    tensor: tuple[tuple[int, ...], ...]
    """One engine each, in the order of the engine's ranks."""
    micro_data: tuple[tuple[int, ...], ...]
    """Ranks that hold the same when they generate: the union of what they hold when they train. Weights move within
    these groups only."""
    replicas: tuple[frozenset[int], ...]
    """For each of `tensor` the copy of the model, when training, that it is a part of."""

    def engines(self, layout: Layout) -> list[EngineLayout]:
        """The engines, all with one layout, which take nothing from another copy of the model than their own."""
        return [
            EngineLayout(layout=layout, devices=ranks, senders=replica)
            for ranks, replica in zip(self.tensor, self.replicas, strict=True)
        ]


def generation_groups(data_parallel: int, tensor_parallel: int, engine_tensor_parallel: int) -> GenerationGroups:
    """Group the ranks of a trainer with `data_parallel` copies of the model, each cut for `tensor_parallel` ranks.

    Each rank receives (d - 1) / tensor_parallel of the model, where d = tensor_parallel / engine_tensor_parallel. Rows
    that FSDP2 has cut count as tensor parallelism here: for what an engine cuts by rows too, the same holds.

    Raises ConfigError when engine_tensor_parallel does not divide tensor_parallel.
    """
    stride, rest = divmod(tensor_parallel, engine_tensor_parallel)
    if rest or not stride:
        raise ConfigError(
            f"the tensor parallelism of an engine must divide the trainer's ({tensor_parallel}) where they share "
            f"devices; got {engine_tensor_parallel}"
        )
    firsts = [copy * tensor_parallel for copy in range(data_parallel)]
    return GenerationGroups(
        tensor=tuple(
            tuple(range(first + offset, first + tensor_parallel, stride))
            for first in firsts
            for offset in range(stride)
        ),
        micro_data=tuple(
            tuple(range(start, start + stride)) for start in range(0, data_parallel * tensor_parallel, stride)
        ),
        replicas=tuple(frozenset(range(first, first + tensor_parallel)) for first in firsts for _ in range(stride)),
    )
