"""What a vLLM worker does with each version of the weights, whichever transport brings it.

open -> receive, once a bucket -> commit -> compare;  abort after a failure of any of them

A `Receiver` knows one transport; `TensorReceiver` is the base of those that bring parameters. A `Destination` knows
what becomes of the parameters in this worker's model, so that every transport serves every model. Imports no vLLM.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Protocol

from torch import Tensor

from rlflow.weights.engine.messages import Columns, Opening, WeightReport
from rlflow.weights.shape.landings import Landings
from rlflow.weights.shape.layout import Shapes

Named = tuple[str, Tensor]


class Receiver(Protocol):
    """One transport, in one worker of an engine; it takes one version after the other."""

    @property
    def is_beside(self) -> bool:
        """Whether buckets are laid out beside the model, so that the engine may sample while they are received."""
        ...

    def open(self, opening: Opening) -> int:
        """Agree with the trainer on a version, and forget one that was not committed; the number of buckets to come."""
        ...

    def receive(self, bucket: int) -> int | None:
        """Put the next bucket in its place. If the trainer has replaced the version, returns the one it has now."""
        ...

    def commit(self) -> None:
        """Compute with the version from now on. Raises ValueError when a part of it has not come."""
        ...

    def compare(self, expected: Iterable[Named] | None, columns: Columns | None) -> WeightReport:
        """Compare what the worker computes with, bit for bit, to `expected`, or when it is None to what has come.

        What has come is what the trainer has: it carried checksums.
        """
        ...

    def abort(self) -> None:
        """Give up a half-done version. A complete one must follow before anything is sampled."""
        ...

    def shutdown(self) -> None:
        """Called by vLLM when its worker ends."""
        ...


class Destination(Protocol):
    """Where a worker's parameters go."""

    shapes: Shapes
    """The shapes of all parameters that come, by their Hugging Face names."""
    landings: Landings
    """Which elements of each parameter belong into which target."""
    is_beside: bool
    """Whether the targets may be filled while the model computes."""

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
        ...

    def land(self, name: str, whole: Tensor) -> None:
        """Take a whole parameter, which must stay as it is until `commit`. Raises ValueError if it was not expected."""
        ...

    def landed(self, name: str) -> None:
        """Say that a parameter is in the targets."""
        ...

    def commit(self) -> None:
        """Let the model compute with what has landed."""
        ...

    def compare(self, expected: Iterable[Named] | None, columns: Columns | None) -> WeightReport:
        """See `Receiver.compare`."""
        ...


class TensorReceiver(ABC):
    """A `Receiver` that brings parameters to a destination."""

    def __init__(self, destination: Destination) -> None:
        self._destination = destination

    @property
    def is_beside(self) -> bool:
        return self._destination.is_beside

    def open(self, opening: Opening) -> int:
        self._destination.begin()
        return self._ask(opening)

    @abstractmethod
    def _ask(self, opening: Opening) -> int:
        """Agree with the trainer on a version; the number of buckets to come."""

    @abstractmethod
    def receive(self, bucket: int) -> int | None: ...

    def commit(self) -> None:
        if missing := self._destination.missing:
            raise ValueError(f"{len(missing)} parameters were not sent, such as {missing[0]!r}; send the whole model")
        self._destination.commit()

    def compare(self, expected: Iterable[Named] | None, columns: Columns | None) -> WeightReport:
        return self._destination.compare(expected, columns)

    def abort(self) -> None:
        self._destination.begin()

    def shutdown(self) -> None:  # noqa: B027 - most transports have nothing open between two versions
        """See `Receiver.shutdown`."""
