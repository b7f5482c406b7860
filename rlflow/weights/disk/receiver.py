"""The transport through a folder in one worker of an engine: from the version that it holds to another one.

open: find and verify the files -> receive, once a file: into the targets; then once a group of parameters: make ready

Imports no vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from math import prod
from pathlib import Path

from torch import Tensor

from rlflow.weights.disk.reader import StoreReader
from rlflow.weights.learn.tracing import Landings
from rlflow.weights.shape.layout import Shapes

_ELEMENTS_AT_ONCE = 2**23
"""Of parameters that are made ready by one call, so that an engine that samples meanwhile is not held up for long."""


class DiskReceiver:
    """Of one worker, for one version after the other: `open`, then `receive` as often as that says."""

    def __init__(
        self,
        folder: Path,
        shapes: Shapes,
        targets: Mapping[str, Tensor],
        landings: Landings,
        landed: Callable[[str], None],
    ) -> None:
        """`targets` are the worker's tensors, each in one piece; `landed` is told each parameter that is in them."""
        self._reader = StoreReader(folder, targets, landings, shapes)
        self._landed = landed
        self._groups = _groups(shapes)
        self._steps: Iterator[None] = iter(())

    def open(self, version: int, transfer: int) -> int:
        """Find and verify the files; how often to call `receive`. Raises as `StoreReader.fetch` does."""
        update = self._reader.fetch(version)
        self._steps = self._all_steps(self._reader.applying(update))
        return update.num_files + len(self._groups)

    def receive(self, bucket: int) -> None:
        """Take the next step. If one fails, the version that is opened next is read from an anchor on."""
        next(self._steps)

    def give_up(self) -> None:
        """The next version is read from an anchor on, if the targets are half of one."""
        self._steps = iter(())

    def close(self) -> None:
        """No file is open between two versions."""
        self._steps = iter(())

    def _all_steps(self, applying: Iterator[None]) -> Iterator[None]:
        yield from applying
        for group in self._groups:
            for name in group:
                self._landed(name)
            yield


def _groups(shapes: Shapes) -> list[list[str]]:
    """The names, in order, cut where about _ELEMENTS_AT_ONCE have come together."""
    groups: dict[int, list[str]] = {}
    sizes = [prod(shape) for shape in shapes.values()]
    for name, before in zip(shapes, accumulate(sizes, initial=0), strict=False):
        groups.setdefault(before // _ELEMENTS_AT_ONCE, []).append(name)
    return list(groups.values())
