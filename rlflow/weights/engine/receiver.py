"""What a vLLM worker does with each version of the weights, whichever transport brings it.

open -> receive, once a bucket -> commit -> compare;  abort after a failure of any of them

A `Receiver` knows one transport: shm, p2p, ipc or disk. A `Destination` knows what becomes of the parameters in this
worker's model: its tensors are filled, it is reloaded, or its adapter is replaced. Imports no vLLM.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Protocol

from torch import Tensor

from rlflow.weights.engine.messages import Columns, Opening, WeightReport
from rlflow.weights.shape.landings import Landings
from rlflow.weights.shape.layout import Shapes

Named = tuple[str, Tensor]


class Destination(Protocol):
    """Where a worker's parameters go, one version after the other."""

    shapes: Shapes
    """The shapes of all parameters that come, by their Hugging Face names."""
    landings: Landings
    """Which elements of each parameter belong into which target."""
    is_beside: bool
    """Whether parameters may come while the model computes."""

    @property
    def targets(self) -> Mapping[str, Tensor]:
        """The tensors to fill, each in one piece."""
        ...

    @property
    def missing(self) -> list[str]:
        """Parameters of which a part has not landed."""
        ...

    def begin(self) -> None:
        """Forget what has landed of a version that was not committed."""

    def land(self, name: str, whole: Tensor) -> None:
        """Take a whole parameter, which must stay as it is until `commit`. Raises ValueError if it does not fit."""

    def landed(self, name: str) -> None:
        """Say that a parameter is in the targets."""

    def commit(self) -> None:
        """Let the model compute with what has landed. Raises ValueError if it does not fit."""

    def compare(self, expected: Iterable[Named] | None, columns: Columns | None) -> WeightReport:
        """See `Receiver.compare`."""
        ...

    def abort(self) -> None:
        """Give up a half-done version. A complete one must follow before anything is sampled."""


class Receiver(ABC):
    """One transport, in one worker of an engine; it takes one version after the other."""

    def __init__(self, destination: Destination) -> None:
        self._destination = destination

    @property
    def is_beside(self) -> bool:
        """Whether the engine may sample while buckets are received."""
        return self._destination.is_beside

    def open(self, opening: Opening) -> int:
        """Agree with the trainer on a version, and forget one that was not committed; the number of buckets to come."""
        self._destination.begin()
        return self._ask(opening)

    @abstractmethod
    def _ask(self, opening: Opening) -> int:
        """Agree with the trainer on a version; the number of buckets to come."""

    @abstractmethod
    def receive(self, bucket: int) -> int | None:
        """Put the next bucket in its place. If the trainer has replaced the version, returns the one it has now."""

    def commit(self) -> None:
        """Compute with the version from now on. Raises ValueError when a part of it has not come."""
        if missing := self._destination.missing:
            raise ValueError(f"{len(missing)} parameters were not sent, such as {missing[0]!r}; send the whole model")
        self._destination.commit()

    def compare(self, expected: Iterable[Named] | None, columns: Columns | None) -> WeightReport:
        """Compare what the worker computes with, bit for bit, to `expected`, or when it is None to what has come.

        What has come is what the trainer has: it carried checksums.
        """
        return self._destination.compare(expected, columns)

    def abort(self) -> None:
        """Give up a half-done version. A complete one must follow before anything is sampled."""
        self._destination.abort()

    def shutdown(self) -> None:  # noqa: B027 - most transports have nothing open between two versions
        """Called by vLLM when its worker ends."""
