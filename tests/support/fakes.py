"""Fake workers and a virtual clock, to run the whole driver in milliseconds."""

from __future__ import annotations

import asyncio
import errno
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rlflow.config import Config
from rlflow.driver import Driver, StepReport
from rlflow.errors import StaleGroup, WorkerError, WorkerLost
from rlflow.groups.evaluation import Evaluation
from rlflow.groups.ledger import DropReason, Ledger
from rlflow.groups.sampler import TaskSampler
from rlflow.roles import PROXIMAL, LoadOutcome, Mean, Probe, StagedWeights, StepOutcome, Workers
from rlflow.rundir.store import CheckpointStore
from rlflow.runtime.derived import can_stream
from rlflow.runtime.disk import write_digested
from rlflow.tools.simulate.clock import run_virtually as run_virtually
from rlflow.types import (
    EpisodeEnd,
    EpisodeSummary,
    GroupOrder,
    Message,
    PayloadRef,
    PlayedGroup,
    ReadyGroup,
    Span,
    Task,
)


def make_tasks(count: int) -> list[Task]:
    return [Task(id=f"t{i}", prompt=({"role": "user", "content": f"{i}"},), answer=str(i)) for i in range(count)]


def make_episode(
    reward: float | None, version: int, end: EpisodeEnd = EpisodeEnd.COMPLETED, newest_version: int | None = None
) -> EpisodeSummary:
    return EpisodeSummary(
        end=end,
        reward=reward,
        num_prompt_tokens=3,
        num_completion_tokens=2,
        num_loss_tokens=2,
        oldest_version=version,
        newest_version=version if newest_version is None else newest_version,
        detail="" if end is EpisodeEnd.COMPLETED else f"made to be {end.value}",
    )


def make_ready(group_id: int, *versions: int) -> ReadyGroup:
    """One episode for each version."""
    return ReadyGroup(
        group_id=group_id,
        task_id=f"t{group_id}",
        episodes=[make_episode(1.0, version) for version in versions],
        payloads=[],
        task_kind="",
        advantages=[],
        num_bytes=100,
    )


@dataclass
class FakeEngines:
    version: int = -1
    patience_s: float = 600.0
    loaded: list[int] = field(default_factory=list)
    load_s: float = 0.1
    awake: asyncio.Event = field(default_factory=asyncio.Event)
    pinned: bool = False
    unpinned: asyncio.Event = field(default_factory=asyncio.Event)
    log: list[str] = field(default_factory=list)
    """Shared with the trainer's."""

    async def load_weights(self, staged: StagedWeights) -> LoadOutcome:
        if self.pinned:
            await self.unpinned.wait()
        await asyncio.sleep(self.load_s)
        self.log.append("load")
        self.awake.set()
        self.version = staged.version
        self.loaded.append(staged.version)
        return LoadOutcome(pause_s=self.load_s)

    async def sleep(self) -> None:
        self.log.append("sleep")
        self.awake.clear()

    async def pin(self) -> int:
        assert not self.pinned
        self.pinned = True
        self.unpinned.clear()
        return 0

    async def unpin(self, engine: int) -> None:
        self.pinned = False
        self.unpinned.set()

    def describe(self) -> list[str]:
        return [f"engine 0: version {self.version}"]


@dataclass
class FakeRunners:
    """Plays by sleeping; `outcome` decides each episode's end and may raise WorkerError to lose the group. Spare
    episodes, the last ones, are cancelled."""

    engines: FakeEngines
    rng: random.Random
    outcome: Callable[[GroupOrder, int], tuple[float | None, EpisodeEnd]] = lambda order, index: (
        float(index % 2),
        EpisodeEnd.COMPLETED,
    )
    duration_s: Callable[[random.Random], float] = lambda rng: rng.lognormvariate(0.0, 1.0)
    orders: list[GroupOrder] = field(default_factory=list)
    started: dict[int, tuple[int, asyncio.Future[None]]] = field(default_factory=dict)
    """Group under way -> the version of its first token, and what ends it when that is too old."""
    most_playing: int = 0
    crowded_share: float = 0.0
    lost: set[PayloadRef] = field(default_factory=set)

    async def play(self, order: GroupOrder) -> PlayedGroup:
        if order.engine is None:
            self.orders.append(order)
        first, ended = self.engines.version, asyncio.get_running_loop().create_future()
        self.started[order.group_id] = first, ended
        self.most_playing = max(self.most_playing, sum(group_id > 0 for group_id in self.started))
        try:
            await asyncio.wait_for(ended, self.duration_s(self.rng))
            raise StaleGroup(f"holds tokens of version {first}")
        except TimeoutError:
            await self.engines.awake.wait()
            episodes = []
            for index in range(order.num_episodes):
                reward, end = self.outcome(order, index)
                if order.num_episodes - order.num_spare <= index:
                    reward, end = None, EpisodeEnd.CANCELLED
                episodes.append(make_episode(reward, first, end, self.engines.version))
        finally:
            del self.started[order.group_id]
        payloads: list[PayloadRef] = [f"{order.task.id}/{order.group_id}/{i}" for i in range(order.num_episodes)]
        return PlayedGroup(
            group_id=order.group_id,
            episodes=episodes,
            payloads=payloads,
            num_bytes=100,
            crowded_share=self.crowded_share,
            num_images=1,
            pictures=f"images of group {order.group_id}",
        )

    def lose_all(self, error: Exception) -> None:
        """All groups under way are lost."""
        for _, ended in self.started.values():
            if not ended.done():
                ended.set_exception(error)

    async def cancel_stale(self, oldest_version: int) -> None:
        for group_id, (version, ended) in self.started.items():
            if group_id > 0 and version < oldest_version and not ended.done():
                ended.set_result(None)

    async def transcript(self, payload: PayloadRef) -> list[Message]:
        return [{"role": "assistant", "content": str(payload)}]

    def is_lost(self, payloads: Sequence[PayloadRef]) -> bool:
        return not self.lost.isdisjoint(payloads)

    async def save_payloads(self, payloads: Sequence[PayloadRef], path: Path) -> str:
        assert self.lost.isdisjoint(payloads), "nobody can write what is lost"
        return write_digested(path, [json.dumps(payloads).encode()])

    async def load_payloads(self, path: Path, count: int) -> list[PayloadRef]:
        payloads = json.loads(path.read_text())
        assert len(payloads) == count
        return payloads


@dataclass
class FakeTrainer:
    """Remembers what it was trained on; `dies` raises WorkerError at the n-th accumulate."""

    version: int = 0
    trained: list[str] = field(default_factory=list)
    pending: list[ReadyGroup] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)
    not_finite: set[int] = field(default_factory=set)
    """Numbers of the updates (from 0) whose gradient is not finite."""
    in_step: dict[int, str] = field(default_factory=dict)
    """Group -> task of what the updates of the step so far were of."""
    has_applied: bool = False
    """Whether the step has an update that was applied."""
    dies_at: int | None = None
    steps: int = 0
    """Updates, those that were not applied too."""
    calls: int = 0
    train_s: float = 0.2
    write_s: float = 0.0
    """Seconds from the beginning of a write to its only file."""
    full_at: int | None = None
    """The write (from 0) that finds the disk full."""
    taken: str | None = None
    """The snapshot that waits to be written."""
    writes: int = 0
    is_offloaded: bool = False
    log: list[str] = field(default_factory=list)
    """Calls as they are made, between them the engines' sleep and the end of their load."""
    hangs_in: str = ""
    """The call, by its name in `log`, that does not answer from the update `hangs_at` on, nor does any after it."""
    hangs_at: int = 0
    unanswered: list[str] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the processes are ended: calls under way fail."""

    async def prepare(self, groups: Sequence[ReadyGroup], oldest_version: int | None) -> None:
        await self._begin("prepare")
        for group in groups:
            group.values = group.frozen[PROXIMAL] = list(group.payloads)

    async def accumulate(self, groups: Sequence[ReadyGroup], oldest_version: int | None) -> list[Span]:
        await self._begin("accumulate")
        assert all(group.values for group in groups), "groups are prepared before they are accumulated"
        self.calls += 1
        if self.calls == self.dies_at:
            raise WorkerError("the trainer died")
        await asyncio.sleep(self.train_s * len(groups))
        self.pending += groups
        assert all(len(group.advantages) == len(group.episodes) for group in groups)
        oldest = -1 if oldest_version is None else oldest_version
        self.staleness += [self.version - max(oldest, group.oldest_version) for group in groups]
        return []

    async def step(self, *, is_last: bool) -> StepOutcome:
        await self._begin("step")
        applied = self.steps not in self.not_finite
        self.steps += 1
        self.has_applied |= applied
        self.in_step |= {group.group_id: group.task_id for group in self.pending}
        self.pending = []
        if is_last:
            self.version += self.has_applied
            self.trained += self.in_step.values()
            self.in_step, self.has_applied = {}, False
        return StepOutcome(
            applied=applied,
            num_skipped=int(not applied),
            grad_norm=1.0 if applied else float("nan"),
            learning_rate=0.1,
            metrics={"loss": Mean(total=1.0, count=2.0)},
        )

    async def stage_weights(self, version: int) -> StagedWeights:
        await self._begin("stage")
        assert version == self.version
        return StagedWeights(version=version, path="", num_bytes=0, slots=(), buckets=())

    async def snapshot(self) -> None:
        await self._begin("snapshot")
        self.taken = json.dumps({"version": self.version, "trained": self.trained})

    async def write_snapshot(self, folder: Path) -> dict[str, str]:
        await self._begin("write")
        number, self.writes = self.writes, self.writes + 1
        content, self.taken = self.taken, None
        assert content is not None
        folder.mkdir(parents=True)
        await self._unless_ended(self.write_s)
        if number == self.full_at:
            raise OSError(errno.ENOSPC, "No space left on device")
        return {"trainer.json": write_digested(folder / "trainer.json", [content.encode()])}

    async def offload(self) -> None:
        await self._begin("offload")
        self.is_offloaded = True

    async def reload(self) -> None:
        await self._begin("reload")
        self.is_offloaded = False

    async def _begin(self, call: str) -> None:
        needs_devices = call not in ("write", "offload", "reload")
        assert not (needs_devices and self.is_offloaded), f"{call} of a trainer that is off its devices"
        self.log.append(call)
        is_stuck = bool(self.unanswered) and self.hangs_in != "write"  # writes have a thread of their own
        if is_stuck or (call == self.hangs_in and self.steps >= self.hangs_at):
            self.unanswered.append(call)
            await self._unless_ended(1e9)

    async def _unless_ended(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self.ended.wait(), seconds)
        except TimeoutError:
            return
        raise WorkerLost("the trainer was ended")

    async def load(self, folder: Path) -> None:
        await self._begin("restore")
        content = json.loads((folder / "trainer.json").read_text())
        self.version, self.trained = content["version"], content["trained"]


@dataclass
class FakeObserver:
    reports: list[StepReport] = field(default_factory=list)
    drops: list[tuple[int, DropReason, str]] = field(default_factory=list)
    saves: list[str] = field(default_factory=list)
    given_ups: list[tuple[int, str]] = field(default_factory=list)
    most_ready: int = 0
    ended_s: float = 0.0
    """On the loop's clock, of the last step."""
    waits: list[str] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    on_step: Callable[[StepReport], None] = lambda report: None

    def phase(self, name: str) -> None:
        pass

    def dropped(self, group_id: int, reason: DropReason, detail: str) -> None:
        self.drops.append((group_id, reason, detail))

    def waiting(self, reason: str) -> None:
        self.waits.append(reason)

    def evaluated(self, evaluation: Evaluation) -> None:
        self.evaluations.append(evaluation)

    async def step(self, report: StepReport) -> dict[str, float | int | None]:
        self.reports.append(report)
        self.ended_s = asyncio.get_running_loop().time()
        self.most_ready = max(self.most_ready, report.num_ready)
        self.on_step(report)
        return {"step": report.step, "version": report.version}

    def saved(self, folder: Path) -> None:
        self.saves.append(folder.name)

    def given_up(self, step: int, why: str) -> None:
        self.given_ups.append((step, why))


@dataclass
class World:
    """A driver and all its fakes."""

    config: Config
    engines: FakeEngines
    runners: FakeRunners
    trainer: FakeTrainer
    observer: FakeObserver
    ledger: Ledger
    checkpoints: CheckpointStore
    driver: Driver


def make_world(
    folder: Path,
    *,
    steps: int = 4,
    max_versions: int = 0,
    num_tasks: int = 50,
    seed: int = 0,
    ledger: Path | None = None,
    config: Config | None = None,
    now: Callable[[], float] = time.time,
    probe: Probe | None = None,
) -> World:
    """`config` is taken over and its sizes are set; None makes one."""
    config = config or Config()
    if config.trainer.streaming is None and can_stream(config):
        config.trainer.streaming = True  # as where engines and trainer have processors of their own
    config.run.steps, config.run.seed, config.run.checkpoint_every = steps, seed, 0
    config.algorithm.groups_per_step, config.algorithm.group_size = 3, 4
    config.staleness.max_versions = max_versions
    evaluation_tasks = make_tasks(2) if config.eval.every else []
    log: list[str] = []
    engines, trainer, observer = FakeEngines(log=log), FakeTrainer(log=log), FakeObserver()
    runners = FakeRunners(engines=engines, rng=random.Random(seed))
    opened, checkpoints = Ledger(ledger), CheckpointStore(folder / "checkpoints", keep=2)

    async def end() -> None:
        trainer.ended.set()

    driver = Driver(
        config=config,
        workers=Workers(runners=runners, engines=engines, trainer=trainer, probe=probe, end=end),
        sampler=TaskSampler(make_tasks(num_tasks), seed, config.curriculum),
        ledger=opened,
        checkpoints=checkpoints,
        observer=observer,
        evaluation_tasks=evaluation_tasks,
        now=now,
    )
    return World(
        config=config,
        engines=engines,
        runners=runners,
        trainer=trainer,
        observer=observer,
        ledger=opened,
        checkpoints=checkpoints,
        driver=driver,
    )
