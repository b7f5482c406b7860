"""What the driver asks of its workers. Ray actors implement these; so do the fakes of the unit tests.

Every method is awaited by the driver under a named deadline. All arguments and results are metadata.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from rlflow.types import GroupOrder, Message, PayloadRef, PlayedGroup, ReadyGroup, Span


@dataclass(kw_only=True, slots=True, frozen=True)
class Mean:
    """A sum and a count: what is reduced over micro-batches, ranks and groups, and divided once."""

    total: float
    count: float

    def __add__(self, other: Mean) -> Mean:
        return Mean(total=self.total + other.total, count=self.count + other.count)

    @property
    def value(self) -> float | None:
        return self.total / self.count if self.count else None


@dataclass(kw_only=True, slots=True)
class StepOutcome:
    """What an optimiser step did."""

    applied: bool
    """False when the gradient was not finite and the update was skipped."""
    grad_norm: float
    learning_rate: float
    metrics: dict[str, Mean]
    """Over everything accumulated since the last step: loss, entropy, kl, sampling/logp_difference_mean, ..."""
    spans: list[Span] = field(default_factory=list)


@dataclass(kw_only=True, slots=True, frozen=True)
class TensorSlot:
    """Where one parameter lies in a weight arena."""

    name: str
    dtype: str
    """torch's name without the prefix, such as "float32"."""
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the arena."""
    num_bytes: int


@dataclass(kw_only=True, slots=True, frozen=True)
class StagedWeights:
    """One complete version of the weights, laid out for the engines to read."""

    version: int
    path: str
    """Of the arena; where the engines are sent weights, tcp://host:port of the store in which they ask for them."""
    num_bytes: int
    slots: tuple[TensorSlot, ...]
    """None where there is no arena."""
    buckets: tuple[tuple[int, int], ...]
    """Half-open ranges of `slots`, loaded one after the other."""
    spans: tuple[Span, ...] = ()


@dataclass(kw_only=True, slots=True)
class LoadOutcome:
    """What it took to put a version into the engines."""

    pause_s: float
    """Longest time that any engine did not generate."""


class Runners(Protocol):
    async def play(self, order: GroupOrder) -> PlayedGroup:
        """Play and score one group. Failures of an episode are in its summary; an exception means the group is lost."""
        ...

    async def cancel_stale(self, oldest_version: int) -> None:
        """End every group under way that holds a token sampled before `oldest_version`: its `play` raises StaleGroup.

        Groups that have sampled nothing yet, and groups pinned to an engine, go on.
        """
        ...

    async def transcript(self, payload: PayloadRef) -> list[Message]:
        """The conversation of one episode, for people to read."""
        ...

    def is_lost(self, payloads: Sequence[PayloadRef]) -> bool:
        """Whether one of them cannot be had any more, by what this process knows; asks nobody."""
        ...

    async def save_payloads(self, payloads: Sequence[PayloadRef], path: Path) -> None: ...

    async def load_payloads(self, path: Path, count: int) -> list[PayloadRef]: ...


class Engines(Protocol):
    async def load_weights(self, staged: StagedWeights) -> LoadOutcome:
        """Put a complete version into every engine; an engine samples under it, or under the one before, only.

        Returns when every engine that takes rollout requests has it. An engine that joins later is sent it first, for
        as long as the trainer stages no other. Waits for a pinned engine only where there is no other.
        """
        ...

    async def sleep(self) -> None:
        """Stop sampling and free the memory for a trainer on the same devices, until the next `load_weights`.

        Requests under way are kept and go on then.
        """
        ...

    async def pin(self) -> int:
        """Set one engine aside, with the version that it holds now; returns its index.

        It takes no new version until `unpin`, and no requests but those that name it, unless it is the only one.
        """
        ...

    async def unpin(self, engine: int) -> None:
        """Give a pinned engine back; it is sent the current version first."""
        ...

    def describe(self) -> list[str]:
        """One line an engine: its state, its version, what it is doing."""
        ...


class Trainer(Protocol):
    async def accumulate(self, groups: Sequence[ReadyGroup], oldest_version: int | None) -> list[Span]:
        """Add these groups' gradients (sums) to what the next step divides.

        Tokens sampled before `oldest_version` are masked; None masks nothing.
        """
        ...

    async def step(self) -> StepOutcome:
        """Divide by the global counts, clip, update, clear."""
        ...

    async def stage_weights(self, version: int) -> StagedWeights: ...

    async def snapshot(self) -> None:
        """Copy the state of this moment aside, for `write_snapshot`, in place of the copy before; between two steps."""
        ...

    async def write_snapshot(self, folder: Path) -> None:
        """Write what `snapshot` copied, and forget it. The other calls go on meanwhile.

        Returns, or raises, when nothing of it is being written any more.
        """
        ...

    async def load(self, folder: Path) -> None: ...

    async def offload(self) -> None:
        """Give the memory of the devices to others, until `reload`; between the two only `write_snapshot` is called.

        Does nothing the second time.
        """
        ...

    async def reload(self) -> None:
        """Undo `offload`, if there was one."""
        ...


class Reference(Protocol):
    async def logprobs(self, payloads: Sequence[PayloadRef]) -> list[object]:
        """Handles to the frozen policy's log-probabilities [L] of each payload's samples."""
        ...


@dataclass(kw_only=True, slots=True)
class Workers:
    """Everything that the driver steers."""

    runners: Runners
    engines: Engines
    trainer: Trainer
    reference: Reference | None
    open_calls: Callable[[], list[str]] = list
    """One line for each kind of call that is waited for now, for the message of a run that stalls."""
