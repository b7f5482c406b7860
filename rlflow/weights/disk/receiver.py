"""The transport through a folder in one worker of an engine: from the version that it holds to another one.

open: find and verify the files -> receive, once a file: into the targets; then once a group of parameters: make ready
"""

from collections.abc import Iterator
from math import prod
from pathlib import Path

from rlflow.weights.disk.reader import StoreReader
from rlflow.weights.engine.messages import Opening
from rlflow.weights.engine.receiver import Destination, Receiver

_ELEMENTS_AT_ONCE = 2**23
"""Elements that one call makes ready, so that an engine that samples meanwhile is not held up for long."""


class DiskReceiver(Receiver):
    """After a failure, the version that is opened next is read from an anchor on if the targets are half of one."""

    def __init__(self, destination: Destination, folder: Path) -> None:
        super().__init__(destination)
        self._reader = StoreReader(folder, destination.targets, destination.landings, destination.shapes)
        groups: dict[int, list[str]] = {}
        before = 0
        for name, shape in destination.shapes.items():
            groups.setdefault(before // _ELEMENTS_AT_ONCE, []).append(name)
            before += prod(shape)
        self._groups = list(groups.values())
        self._steps: Iterator[None] = iter(())

    def _ask(self, opening: Opening) -> int:
        """Find and verify the files. Raises as `StoreReader.fetch` does."""
        update = self._reader.fetch(opening.staged.version)
        self._steps = self._all_steps(self._reader.apply(update))
        return sum(len(files) for _, files in update.versions) + len(self._groups)

    def receive(self, bucket: int) -> None:
        next(self._steps)

    def abort(self) -> None:
        super().abort()
        self._steps = iter(())

    def _all_steps(self, applying: Iterator[None]) -> Iterator[None]:
        yield from applying
        for group in self._groups:
            for name in group:
                self._destination.landed(name)
            yield
