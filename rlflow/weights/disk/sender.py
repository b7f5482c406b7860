"""The transport through a folder in a rank of the trainer: each rank writes its own part of every version.

what each rank holds -> store (anchors, and what changed) -> StagedWeights;  engines read it, see `receiver`

It serves engines that share only a file system with the trainer. If adapters must be merged first, the ranks gather and
rank 0 writes everything.
"""

from collections.abc import Iterator
from pathlib import Path

from rlflow.roles import StagedWeights
from rlflow.weights.disk.delta import Changes
from rlflow.weights.disk.manifest import ParameterSpec
from rlflow.weights.disk.writer import Part, StoreWriter
from rlflow.weights.source import WeightSender, WeightSource


class DiskSender(WeightSender):
    """Writes each version to a folder."""

    def __init__(self, backend: WeightSource, rank: int, num_ranks: int, folder: Path) -> None:
        """All ranks see `folder`, and nobody else writes to it."""
        super().__init__(backend, rank)
        self._num_ranks = num_ranks
        self._folder = folder
        self._layout = backend.layout()
        parameters = {
            name: ParameterSpec(dtype=str(dtype).removeprefix("torch."), shape=shape)
            for name, dtype, shape in backend.parameter_specs()
        }
        if rank > 0:
            self._meet()  # rank 0 tidies the folder up before others write to it
        self._writer = StoreWriter(folder, rank, num_ranks, parameters)
        if rank == 0:
            self._meet()

    def stage(self, version: int) -> StagedWeights | None:
        """Write the back end's weights as a version, in the engines' dtype; rank 0 is told where.

        Raises RunError when the disk is full.
        """
        changes = self._writer.compare(version, self._parts())
        # The back end counts once what the ranks of a tensor group have; here each of them has something else.
        *counts, counted_ranks = self._backend.add_up([*changes.counts(), 1.0])
        self._writer.write(Changes.of([round(count * self._num_ranks / counted_ranks) for count in counts]))
        self._meet()
        if self._rank > 0:
            return None
        manifest = self._writer.publish()
        return StagedWeights(
            version=version, path=str(self._folder), num_bytes=manifest.num_bytes, slots=(), buckets=()
        )

    def _parts(self) -> Iterator[Part]:
        if self._layout is None:
            for name, whole in self._backend.full_parameters():
                if self._rank == 0:
                    yield Part(name=name, start=(0,) * whole.dim(), stop=tuple(whole.shape), tensor=whole)
            return
        for name, held in self._backend.held():
            for region in self._layout.placements[name].ranks[self._rank]:
                yield Part(name=name, start=region.start, stop=region.stop, tensor=region.view_of(held))
