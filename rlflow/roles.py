"""What the driver asks of its workers: Protocols that Ray actors implement in a run, and fakes in the tests.

    GroupOrder -> Runners -> PlayedGroup          payloads -> FrozenModel -> log-probabilities
    ReadyGroups -> Trainer -> StagedWeights -> Engines, which sample under them

The driver awaits every method under a named deadline. All arguments and results are metadata: tokens, gradients and
weights stay with the workers, and what crosses here are handles to them.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from rlflow.types import GroupOrder, Message, PayloadRef, PlayedGroup, ReadyGroup, Sample, Span

REFERENCE, TEACHER, PROXIMAL = "reference", "teacher", "proximal"
"""What a frozen model may be to a group: where the KL is measured from; what the policy learns from; the policy itself
as it was when the step began."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Mean:
    """A sum and a count. Parts from micro-batches, ranks and groups are added up, and divided once at the end.

    Example: Mean(total=3.0, count=4) + Mean(total=1.0, count=4) has the value 0.5
    """

    total: float
    count: float

    def __add__(self, other: "Mean") -> "Mean":
        return Mean(total=self.total + other.total, count=self.count + other.count)

    @property
    def value(self) -> float | None:
        return self.total / self.count if self.count else None


@dataclass(kw_only=True, slots=True, frozen=True)
class TrainWork:
    """What the ranks of a trainer computed for one step, all of them together."""

    tokens: int
    """Tokens that went through the model; a shared prefix counts once."""
    flops: float
    """Floating-point operations that these need, forward and backward."""
    padded_flops: float
    """The same if every sample had its own prompt and were padded to the longest of its micro-batch."""
    num_ranks: int
    device: str
    """torch's name of rank 0's GPU, or `cpu`."""


@dataclass(kw_only=True, slots=True)
class StepOutcome:
    """What one update did, or all updates of a step together (see `groups.updates.of_step`)."""

    applied: bool
    """False when the gradient was not finite, so that the update was skipped, or when no token had a loss."""
    num_skipped: int = 0
    """Updates that were skipped."""
    grad_norm: float
    learning_rate: float
    metrics: dict[str, Mean]
    """Means over everything accumulated since the last update: loss, entropy, kl, sampling/logp_difference_mean, ..."""
    spans: list[Span] = field(default_factory=list)
    work: TrainWork | None = None
    memory_peaks: list[int] = field(default_factory=list)
    """By rank: the most bytes of its GPU that were allocated at once since the last update; empty without GPUs."""


@dataclass(kw_only=True, slots=True, frozen=True)
class TensorSlot:
    """Where one parameter lies in a weight arena."""

    name: str
    dtype: str
    """torch's name of the type without "torch.", such as "float32"."""
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the arena."""
    num_bytes: int


@dataclass(kw_only=True, slots=True, frozen=True)
class StagedWeights:
    """One complete version of the weights, laid out for the engines to read."""

    version: int
    path: str
    """The file of the arena, if the transport has one; else tcp://host:port of the store that the engines ask."""
    num_bytes: int
    slots: tuple[TensorSlot, ...]
    """Empty for transports without an arena."""
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
        """Whether one of them is lost for good, as far as this process knows; calls nobody."""
        ...

    async def save_payloads(self, payloads: Sequence[PayloadRef], path: Path) -> str:
        """Write them to one file; returns its SHA-256."""
        ...

    async def load_payloads(self, path: Path, count: int) -> list[PayloadRef]: ...


class Engines(Protocol):
    @property
    def patience_s(self) -> float:
        """Seconds after which a call will not come back: more than it takes to end an engine that hangs, start it
        again and give it the weights, until it is given up."""
        ...

    async def load_weights(self, staged: StagedWeights) -> LoadOutcome:
        """Put a complete version into every engine; an engine samples under it, or under the one before, only.

        Returns when every engine that takes rollout requests has it. An engine that joins later is sent it first, as
        long as the trainer stages no other. Waits for a pinned engine only if there is no other engine.
        """
        ...

    async def sleep(self) -> None:
        """Stop sampling and free the memory for a trainer on the same devices, until the next `load_weights`.

        Requests under way are kept, and go on after it.
        """
        ...

    async def pin(self) -> int:
        """Set one engine aside with the version that it holds now; returns its index.

        Until `unpin` it takes no new version. It takes only requests that name it, unless it is the only engine.
        """
        ...

    async def unpin(self, engine: int) -> None:
        """Give a pinned engine back; it is sent the current version first."""
        ...

    def describe(self) -> list[str]:
        """One line for each engine: its state, its version, what it is doing."""
        ...


class Trainer(Protocol):
    async def prepare(self, groups: Sequence[ReadyGroup], oldest_version: int | None) -> None:
        """Before these groups are accumulated: compute what all updates of the step take from the weights before the
        first, and leave the handles with the groups. `oldest_version` is that of `accumulate`."""
        ...

    async def accumulate(self, groups: Sequence[ReadyGroup], oldest_version: int | None) -> list[Span]:
        """Add the gradients (sums) of these groups, which are prepared, to what the next update divides.

        Tokens sampled before `oldest_version` are masked; None masks nothing.
        """
        ...

    async def step(self, *, is_last: bool) -> StepOutcome:
        """Divide by the global counts, clip, update, clear. `is_last`: the last update of the step."""
        ...

    async def stage_weights(self, version: int) -> StagedWeights: ...

    async def snapshot(self) -> None:
        """Between two steps: copy the state aside for `write_snapshot`. Replaces the copy before."""
        ...

    async def write_snapshot(self, folder: Path) -> dict[str, str]:
        """Write what `snapshot` copied, and drop the copy. Other calls go on meanwhile.

        Returns the SHA-256 of each file by its path in the folder. Returns or raises only when no rank is writing any
        more.
        """
        ...

    async def load(self, folder: Path) -> None: ...

    async def offload(self) -> None:
        """Free the memory of the devices until `reload`; in between, only `write_snapshot` is called.

        A second call does nothing.
        """
        ...

    async def reload(self) -> None:
        """Undo `offload`, if there was one."""
        ...


class FrozenModel(Protocol):
    """A policy that never changes: the reference, or a teacher."""

    async def logprobs(self, payloads: Sequence[PayloadRef]) -> list[object]:
        """Handles to its log-probabilities [L] of each payload's samples."""
        ...


class Probe(Protocol):
    """Whether the engines sample from the model that the trainer holds."""

    async def replies(self) -> list[Sample]:
        """A few short replies of every engine to prompts of random tokens."""
        ...

    async def difference(self, replies: Sequence[Sample]) -> float:
        """How far the trainer's log-probabilities of these are from the engines', in nats, on average over tokens."""
        ...


async def _nothing_to_profile(is_on: bool) -> None:
    del is_on


async def _nothing_to_end() -> None:
    pass


@dataclass(kw_only=True, slots=True)
class Workers:
    """Everything that the driver steers."""

    runners: Runners
    engines: Engines
    trainer: Trainer
    frozen: Mapping[str, FrozenModel] = field(default_factory=dict)
    """By their names; `derived.frozen_models` says which of them a group asks."""
    probe: Probe | None = None
    """None if there is nothing to compare: without a trainer, for example."""
    open_calls: Callable[[], list[str]] = list
    """One line for each kind of call that is being waited for; for the message when a run stalls."""
    profile: Callable[[bool], Awaitable[None]] = _nothing_to_profile
    """Between two steps: begins a profile of what computes, or ends it and writes it to run.dir."""
    end: Callable[[], Awaitable[None]] = _nothing_to_end
    """Kills every process, because one that nothing can do without is lost; calls under way fail."""
