"""Modelled workers, behind the Protocols of `roles.py`: they take the time that real ones would, and no more.

A group holds a slot of one engine until its longest episode ends. An engine that takes new weights stands still, and
what it plays goes on later, under the new version. The trainer takes its time for each token.

Each worker counts the processor time of its own code in a `Meter`, so that the driver's can be told apart.
"""

import asyncio
import math
import pickle
import random
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlflow.batching.shares import shares
from rlflow.config import TrainerConfig, Update
from rlflow.errors import StaleGroup, WorkerError
from rlflow.roles import LoadOutcome, Mean, StagedWeights, StepOutcome
from rlflow.rollout.health import waves
from rlflow.runtime.disk import write_digested
from rlflow.tools.simulate.plan import Plan
from rlflow.types import EpisodeEnd, EpisodeSummary, GroupOrder, PayloadRef, PlayedGroup, ReadyGroup, Span

TOKEN_BYTES = 13
"""What one token takes in a payload: its id, log-probability, version and mask."""


async def _not_in_the_model(*_: object, **__: object) -> Any:
    """A method that the driver calls in other runs only."""
    raise AssertionError(
        "the model has no evaluation and no conversations, engines and trainer have devices of their own, and no "
        "simulation is resumed"
    )


class Meter:
    """Processor seconds of the code that runs inside `with meter`. Not to be nested, nothing inside may await."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._since = 0.0

    def __enter__(self) -> None:
        self._since = time.process_time()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.process_time() - self._since


class Occupancy:
    """How many are busy, added up over time."""

    def __init__(self) -> None:
        self.busy = 0
        self._area = 0.0
        self._since = 0.0

    def change(self, count: int, now: float) -> None:
        self._area += self.busy * (now - self._since)
        self._since = now
        self.busy += count

    def lose(self, seconds: float) -> None:
        """Take out time in which something was held, but stood still."""
        self._area -= seconds

    def total(self, now: float) -> float:
        """Busy seconds up to now."""
        return self._area + self.busy * (now - self._since)


@dataclass(slots=True)
class ModelledEngine:
    """One modelled engine."""

    index: int
    version: int = -1
    load: int = 0
    """Groups in its slots."""
    paused_s: float = 0.0
    """All its pauses, the one under way in full."""
    paused_until: float = 0.0


class Slots:
    """The slots of all engines: the least loaded engine is taken first; requests are served in their order."""

    def __init__(self, engines: Sequence[ModelledEngine], in_flight: int) -> None:
        # One ordered set of engines for each number of free slots taken: both ends of a change cost O(in_flight).
        self._by_load: list[OrderedDict[int, ModelledEngine]] = [OrderedDict() for _ in range(in_flight + 1)]
        self._by_load[0] = OrderedDict((engine.index, engine) for engine in engines)
        self._waiting: deque[asyncio.Future[ModelledEngine]] = deque()

    def ask(self) -> ModelledEngine | asyncio.Future[ModelledEngine]:
        """A slot of this engine, or the promise of one. A promise that is given up must be cancelled."""
        for load, engines in enumerate(self._by_load[:-1]):
            if engines:
                _, engine = engines.popitem(last=False)
                engine.load = load + 1
                self._by_load[load + 1][engine.index] = engine
                return engine
        promise: asyncio.Future[ModelledEngine] = asyncio.get_running_loop().create_future()
        self._waiting.append(promise)
        return promise

    def give_back(self, engine: ModelledEngine) -> None:
        while self._waiting:
            promise = self._waiting.popleft()
            if not promise.done():
                promise.set_result(engine)
                return
        del self._by_load[engine.load][engine.index]
        engine.load -= 1
        self._by_load[engine.load][engine.index] = engine


class ModelledEngines:
    """A fleet that takes new weights in turn, or all at once."""

    patience_s = math.inf

    def __init__(self, plan: Plan, meter: Meter) -> None:
        self._plan = plan
        self._meter = meter
        self.engines = [ModelledEngine(index) for index in range(plan.engines)]
        self.slots = Slots(self.engines, plan.in_flight)
        self.occupancy = Occupancy()

    async def load_weights(self, staged: StagedWeights) -> LoadOutcome:
        # Before the first version, and without staleness, nothing runs that the others could go on with.
        is_rolling = self._plan.update is Update.rolling and self._plan.max_versions > 0 and staged.version > 0
        pause_s = self._plan.weights_s
        for wave in waves(range(len(self.engines)), len(self.engines), is_rolling):
            with self._meter:
                for engine in (self.engines[index] for index in wave):
                    engine.version = staged.version
                    engine.paused_s += pause_s
                    engine.paused_until = asyncio.get_running_loop().time() + pause_s
                    self.occupancy.lose(engine.load * pause_s)
            await asyncio.sleep(pause_s)
        return LoadOutcome(pause_s=pause_s)

    sleep = pin = unpin = _not_in_the_model

    def describe(self) -> list[str]:
        return [f"engine {engine.index}: version {engine.version}, {engine.load} groups" for engine in self.engines]


@dataclass(slots=True)
class _Play:
    """A group in its slot."""

    engine: ModelledEngine
    oldest_version: int
    ended: asyncio.Future[None]
    paused_s: float
    """Pauses of the engine that `end` already reckons with."""
    end: float
    timer: asyncio.TimerHandle | None = None


@dataclass(slots=True)
class ModelledRunners:
    """Plays groups on the engines' slots."""

    plan: Plan
    engines: ModelledEngines
    meter: Meter
    num_started: int = 0
    num_ended: int = 0
    """Played, failed or cancelled."""
    _playing: dict[int, OrderedDict[int, _Play]] = field(default_factory=dict)
    """Oldest version -> group -> play."""

    async def play(self, order: GroupOrder) -> PlayedGroup:
        with self.meter:
            self.num_started += 1
            slot = self.engines.slots.ask()
        try:
            engine = slot if isinstance(slot, ModelledEngine) else await slot
        except asyncio.CancelledError:
            assert not isinstance(slot, ModelledEngine)
            if slot.done() and not slot.cancelled():
                self.engines.slots.give_back(slot.result())
            self.num_ended += 1
            raise
        with self.meter:
            lengths, fails = self._draw(order)
            play = self._start(order.group_id, engine, max(lengths) * self.plan.token_s * fails)
        try:
            await play.ended
            with self.meter:
                if fails < 1.0:
                    raise WorkerError(f"group {order.group_id} was made to fail")
                episodes = [  # rewards alternate, so that each group has a gradient
                    EpisodeSummary(
                        end=EpisodeEnd.COMPLETED,
                        reward=float(index % 2),
                        num_prompt_tokens=0,
                        num_completion_tokens=tokens,
                        num_loss_tokens=tokens,
                        oldest_version=play.oldest_version,
                        newest_version=engine.version,
                    )
                    for index, tokens in enumerate(lengths)
                ]
                return PlayedGroup(
                    group_id=order.group_id,
                    episodes=episodes,
                    payloads=[None] * len(lengths),
                    num_bytes=TOKEN_BYTES * sum(lengths),
                )
        finally:
            with self.meter:
                self._end(order.group_id, play)

    async def cancel_stale(self, oldest_version: int) -> None:
        with self.meter:
            for version in [version for version in self._playing if version < oldest_version]:
                for group_id, play in self._playing[version].items():
                    if not play.ended.done():
                        play.ended.set_exception(StaleGroup(f"group {group_id} began under version {version}"))

    transcript = load_payloads = _not_in_the_model

    async def save_payloads(self, payloads: Sequence[PayloadRef], path: Path) -> str:
        """An empty file: there are no payloads, and no simulation is resumed."""
        return write_digested(path, [])

    def is_lost(self, payloads: Sequence[PayloadRef]) -> bool:
        return False

    def _draw(self, order: GroupOrder) -> tuple[list[int], float]:
        """Tokens of each episode, and the share of the group's time after which it fails (1: it does not).

        Drawn from the order's seed alone, so that simulations of the same seed play the same groups.
        """
        # A generator for each group makes the lengths independent of the order in which groups start.
        rng = random.Random(order.seed)
        scale = self.plan.median_tokens
        lengths = [
            min(self.plan.max_tokens, max(1, round(scale * rng.lognormvariate(0.0, self.plan.sigma))))
            for _ in range(order.num_episodes)
        ]
        fails = rng.random() if rng.random() < self.plan.failures else 1.0
        return lengths, fails

    def _start(self, group_id: int, engine: ModelledEngine, seconds: float) -> _Play:
        loop = asyncio.get_running_loop()
        now = loop.time()
        waits_s = max(0.0, engine.paused_until - now)
        self.engines.occupancy.change(1, now)
        self.engines.occupancy.lose(waits_s)
        play = _Play(
            engine=engine,
            oldest_version=engine.version,
            ended=loop.create_future(),
            paused_s=engine.paused_s,
            end=now + waits_s + seconds,
        )
        play.timer = loop.call_at(play.end, self._finish, play)
        self._playing.setdefault(engine.version, OrderedDict())[group_id] = play
        return play

    def _finish(self, play: _Play) -> None:
        """The group is over, unless its engine has paused since its end was reckoned."""
        with self.meter:
            paused_s = play.engine.paused_s - play.paused_s
            if paused_s > 0:
                play.paused_s = play.engine.paused_s
                play.end += paused_s
                play.timer = asyncio.get_running_loop().call_at(play.end, self._finish, play)
            elif not play.ended.done():
                play.ended.set_result(None)

    def _end(self, group_id: int, play: _Play) -> None:
        assert play.timer is not None
        play.timer.cancel()
        self.num_ended += 1
        of_version = self._playing[play.oldest_version]
        del of_version[group_id]
        if not of_version:
            del self._playing[play.oldest_version]
        self.engines.occupancy.change(-1, asyncio.get_running_loop().time())
        self.engines.slots.give_back(play.engine)


class ModelledTrainer:
    """Takes its time for each token; the optimiser step itself takes none.

    To hand out groups, `accumulate` does what the driver of a run does: it plans for each rank, and pickles what it
    would send that rank. This counts as processor time of the driver, but a run spends it in a thread, and the
    simulation on its loop: the figure is what the driver costs, not how long the loop of a run is held up.
    """

    def __init__(self, plan: Plan, meter: Meter) -> None:
        self._ranks = plan.ranks
        self._token_s = plan.train_token_s
        self._meter = meter
        self.occupancy = Occupancy()
        self.num_tokens = 0

    async def prepare(self, groups: Sequence[ReadyGroup], oldest_version: int | None) -> None:
        """Nothing: the model has neither critic nor adapters."""

    async def accumulate(self, groups: Sequence[ReadyGroup], oldest_version: int | None) -> list[Span]:
        loop = asyncio.get_running_loop()
        with self._meter:
            tokens = sum(episode.num_completion_tokens for group in groups for episode in group.episodes)
            self.occupancy.change(1, loop.time())
        for share in shares(groups, self._ranks, TrainerConfig().micro_batch_tokens):
            pickle.dumps(share)
        await asyncio.sleep(tokens * self._token_s)
        self.occupancy.change(-1, loop.time())
        self.num_tokens += tokens
        return []

    async def step(self, *, is_last: bool) -> StepOutcome:
        return StepOutcome(applied=True, grad_norm=1.0, learning_rate=1.0, metrics={"loss": Mean(total=0.0, count=1.0)})

    async def stage_weights(self, version: int) -> StagedWeights:
        return StagedWeights(version=version, path="", num_bytes=0, slots=(), buckets=())

    async def snapshot(self) -> None:
        """Nothing: no simulation is resumed."""

    async def write_snapshot(self, folder: Path) -> dict[str, str]:
        """Nothing, as above."""
        return {}

    load = offload = reload = _not_in_the_model
