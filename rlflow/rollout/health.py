"""The life of one rollout engine, and which engines may be sent requests. Pure: no clock, no process.

dead -> starting -> stale -> healthy;  healthy -> stale while it takes weights;  anything -> dead
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

MAX_DEATHS = 3
"""An engine is given up after this many deaths in a row without having served in between."""


class Health(StrEnum):
    DEAD = "dead"
    """There is no process that could be used."""
    STARTING = "starting"
    """The process loads vLLM."""
    STALE = "stale"
    """vLLM answers, but the engine has no complete weights, or is taking new ones."""
    HEALTHY = "healthy"
    """The engine holds one complete version and samples with it."""


_NEXT = {
    Health.DEAD: {Health.STARTING},
    Health.STARTING: {Health.STALE, Health.DEAD},
    Health.STALE: {Health.HEALTHY, Health.DEAD},
    Health.HEALTHY: {Health.STALE, Health.DEAD},
}


@dataclass(kw_only=True, slots=True)
class EngineState:
    """The state of one engine. Each method is a transition; a transition that `_NEXT` lacks is a bug."""

    health: Health = Health.DEAD
    version: int | None = None
    """The complete version that it holds, even while it takes a new one. None if it must not sample."""
    deaths: int = 0
    """Deaths in a row without having served in between."""
    last_death: str = ""

    @property
    def is_up(self) -> bool:
        return self.health in (Health.STALE, Health.HEALTHY)

    @property
    def is_given_up(self) -> bool:
        return self.health is Health.DEAD and self.deaths >= MAX_DEATHS

    def start(self) -> None:
        assert not self.is_given_up, "an engine that was given up stays dead"
        self._become(Health.STARTING)

    def started(self) -> None:
        self._become(Health.STALE)

    def load(self) -> None:
        """The engine begins to take new weights. A stale engine stays stale."""
        assert self.is_up, f"a {self.health} engine takes no weights"
        self.health = Health.STALE

    def loaded(self, version: int) -> None:
        if self.version is not None:
            self.served()
        self._become(Health.HEALTHY)
        self.version = version

    def load_failed(self) -> None:
        """The engine may hold parts of two versions."""
        assert self.health is Health.STALE, f"a {self.health} engine takes no weights"
        self.version = None

    def served(self) -> None:
        """The engine answered a request, or lived from one version to the next."""
        self.deaths = 0

    def died(self, reason: str) -> None:
        self._become(Health.DEAD)
        self.version = None
        self.deaths += 1
        self.last_death = reason

    def give_up(self, reason: str) -> None:
        """There will be no further process for this engine."""
        assert self.health is Health.DEAD, f"a {self.health} engine has a process"
        self.deaths, self.last_death = MAX_DEATHS, reason

    def _become(self, health: Health) -> None:
        assert health in _NEXT[self.health], f"an engine that is {self.health} cannot become {health}"
        self.health = health


def serving(states: Sequence[EngineState], pinned: Collection[int]) -> tuple[int, ...]:
    """The engines that take requests which name no engine.

    These are the healthy ones. If there are none, those that take weights, which hold requests until they are done. A
    pinned engine is among them only if all others have been given up.
    """
    free = [index for index in range(len(states)) if index not in pinned]
    if all(states[index].is_given_up for index in free):
        free = list(pinned)
    healthy = [index for index in free if states[index].health is Health.HEALTHY]
    loading = [index for index in free if states[index].health is Health.STALE and states[index].version is not None]
    return tuple(sorted(healthy or loading))


def waves(engines: Sequence[int], num_engines: int, is_rolling: bool) -> Iterator[Sequence[int]]:
    """Groups of engines that load together: all at once, or at most a quarter of `num_engines` if `is_rolling`.

    Example: waves([0, 2, 3], num_engines=8, is_rolling=True) gives [0, 2], then [3].
    """
    size = max(1, num_engines // 4) if is_rolling else max(1, num_engines)
    for first in range(0, len(engines), size):
        yield engines[first : first + size]
