"""The fleet's rules, on engines that do what the test says."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import NoReturn

import pytest
from fakes import run_virtually
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.config import Config, Update
from rlflow.errors import ConfigError, EngineLost, RunError, WeightsOvertaken
from rlflow.roles import StagedWeights
from rlflow.rollout.fleet import EngineFleet
from rlflow.runtime.deadlines import within


def staged(version: int) -> StagedWeights:
    return StagedWeights(version=version, path="", num_bytes=0, slots=(), buckets=())


async def settle() -> None:
    for _ in range(30):
        await asyncio.sleep(0)


@dataclass
class FakeProcess:
    """Starts, loads and dies when told to; `held` names the calls that wait for `release`."""

    index: int
    log: list[str]
    held: set[str] = field(default_factory=set)
    fails: dict[str, list[RunError | ConfigError]] = field(default_factory=dict)
    """Errors of the next calls by that name, in order."""
    version: int | None = None
    _released: asyncio.Event = field(default_factory=asyncio.Event)
    _death: asyncio.Future[NoReturn] | None = None
    _answered: asyncio.Event = field(default_factory=asyncio.Event)

    def die(self, why: str = "killed") -> None:
        self.version = None
        assert self._death is not None
        if not self._death.done():
            self._death.set_exception(EngineLost(why))
            self._death.exception()

    def release(self) -> None:
        self.held.clear()
        self._released.set()

    def answer(self) -> None:
        self._answered.set()

    async def _do(self, call: str) -> None:
        self.log.append(f"{call} {self.index}")
        death = self._death
        assert death is not None
        if call.split()[0] in self.held:
            self._released.clear()
            released = asyncio.ensure_future(self._released.wait())
            await asyncio.wait([released, death], return_when=asyncio.FIRST_COMPLETED)
        if death.done():
            death.result()
        if errors := self.fails.get(call.split()[0]):
            error = errors.pop(0)
            if not isinstance(error, WeightsOvertaken):
                self.die(f"ended after: {error}")
            raise error

    async def wait_until_placed(self) -> None:
        if "place" in self.held:
            self._released.clear()
            await self._released.wait()
        if errors := self.fails.get("place"):
            raise errors.pop(0)

    async def start(self) -> None:
        self._death = asyncio.get_running_loop().create_future()
        self._answered = asyncio.Event()
        await self._do("start")

    async def watch(self) -> NoReturn:
        assert self._death is not None
        await asyncio.shield(self._death)
        raise AssertionError

    async def wait_until_answered(self) -> None:
        await self._answered.wait()

    async def load_weights(self, staged: StagedWeights) -> float:
        await self._do(f"load {staged.version}:")
        self.version = staged.version
        return 0.25 * (self.index + 1)

    async def sleep(self) -> None:
        await self._do("sleep")


@dataclass
class Scene:
    fleet: EngineFleet
    engines: list[FakeProcess]
    log: list[str]
    """Calls to engines and announcements, in order."""
    alarms: list[str]

    def since(self, mark: int) -> list[str]:
        return self.log[mark:]

    @property
    def serving(self) -> str:
        return [line for line in self.log if line.startswith("serving")][-1]


@asynccontextmanager
async def scene(num_engines: int, update: Update = Update.rolling, version: int | None = 1) -> AsyncIterator[Scene]:
    """A fleet that has started, and holds `version`."""
    log: list[str] = []
    engines = [FakeProcess(index, log) for index in range(num_engines)]

    async def tell(serving: Sequence[int]) -> None:
        log.append(f"serving {list(serving)}")

    config = Config()
    config.staleness.max_versions = 1
    config.rollout.update = update
    alarms: list[str] = []
    fleet = EngineFleet(config, engines, tell, alarms.append)
    await fleet.start()
    if version is not None:
        await fleet.load_weights(staged(version))
    await settle()
    try:
        yield Scene(fleet, engines, log, alarms)
    finally:
        await fleet.close()


async def test_the_first_version_opens_the_engines() -> None:
    async with scene(2, update=Update.all, version=None) as on:
        assert on.log == ["start 0", "start 1"]
        outcome = await on.fleet.load_weights(staged(1))
        assert outcome.pause_s == 0.5
        assert on.log[2:] == ["serving []", "load 1: 0", "load 1: 1", "serving [0, 1]"]
        assert on.fleet.describe() == ["engine 0: healthy, version 1", "engine 1: healthy, version 1"]


async def test_a_rolling_update_takes_a_quarter_of_the_engines_out_at_a_time() -> None:
    async with scene(8) as on:
        mark = len(on.log)
        await on.fleet.load_weights(staged(2))
        assert on.since(mark)[:8] == [
            "serving [2, 3, 4, 5, 6, 7]",
            "load 2: 0",
            "load 2: 1",
            "serving [0, 1, 2, 3, 4, 5, 6, 7]",
            "serving [0, 1, 4, 5, 6, 7]",
            "load 2: 2",
            "load 2: 3",
            "serving [0, 1, 2, 3, 4, 5, 6, 7]",
        ]
        assert [engine.version for engine in on.engines] == [2] * 8


async def test_never_more_than_a_quarter_load_at_the_same_time() -> None:
    async with scene(8) as on:
        for engine in on.engines:
            engine.held.add("load")
        update = asyncio.create_task(on.fleet.load_weights(staged(2)))
        for first in range(0, 8, 2):
            await settle()
            assert sum(line.startswith("load 2") for line in on.log) == first + 2
            for engine in on.engines[first : first + 2]:
                engine.release()
        await update


async def test_an_update_of_all_keeps_what_is_sent_meanwhile() -> None:
    async with scene(2, update=Update.all) as on:
        mark = len(on.log)
        await on.fleet.load_weights(staged(2))
        assert on.since(mark) == ["load 2: 0", "load 2: 1"]
        assert on.serving == "serving [0, 1]"


async def test_a_lost_engine_serves_again_only_with_the_current_weights() -> None:
    async with scene(2) as on:
        mark = len(on.log)
        on.engines[0].held |= {"start", "load"}
        on.engines[0].die()
        await settle()
        assert on.since(mark) == ["serving [1]", "start 0"]
        assert on.fleet.describe()[0] == "engine 0: starting, died 1 times, last: killed"
        on.engines[0].release()
        on.engines[0].held = {"load"}
        await settle()
        assert on.since(mark) == ["serving [1]", "start 0", "load 1: 0"]
        assert on.fleet.describe()[0].startswith("engine 0: stale, loads version 1")
        on.engines[0].release()
        await settle()
        assert on.serving == "serving [0, 1]"
        assert on.engines[0].version == 1


async def test_a_load_waits_for_the_one_under_way() -> None:
    async with scene(2) as on:
        on.engines[0].held.add("load")
        on.engines[0].die()
        await settle()
        update = asyncio.create_task(on.fleet.load_weights(staged(2)))
        await settle()
        assert "load 2: 1" not in on.log
        on.engines[0].release()
        await update
        assert on.log[-5:] == ["load 2: 0", "serving [0, 1]", "serving [0]", "load 2: 1", "serving [0, 1]"]


async def test_an_engine_that_a_wave_took_along_is_watched_from_the_start() -> None:
    async with scene(3) as on:
        on.engines[0].held.add("load")
        on.engines[2].held.add("load")
        update = asyncio.create_task(on.fleet.load_weights(staged(2)))
        await settle()
        on.engines[1].die()
        await settle()
        on.engines[0].release()
        await settle()
        assert on.log[-2:] == ["serving [0, 1]", "load 2: 2"]
        on.engines[1].die()
        await settle()
        assert on.serving == "serving [0]"
        on.engines[2].release()
        await update


async def test_an_engine_that_dies_during_a_load_does_not_fail_it() -> None:
    async with scene(2, update=Update.all) as on:
        on.engines[1].held |= {"load", "start"}
        update = asyncio.create_task(on.fleet.load_weights(staged(2)))
        await settle()
        on.engines[1].die()
        outcome = await update
        assert outcome.pause_s == 0.25
        assert on.serving == "serving [0]"
        on.engines[1].release()
        await settle()
        assert (on.serving, on.engines[1].version) == ("serving [0, 1]", 2)


async def test_a_load_of_the_only_engine_returns_when_it_is_back() -> None:
    async with scene(1) as on:
        on.engines[0].held |= {"start"}
        on.engines[0].die()
        await settle()
        update = asyncio.create_task(on.fleet.load_weights(staged(2)))
        await settle()
        assert not update.done()
        on.engines[0].release()
        assert (await update).pause_s == 0.0
        assert on.engines[0].version == 2


async def test_a_load_that_fails_everywhere_is_raised() -> None:
    async with scene(2, update=Update.all) as on:
        for engine in on.engines:
            engine.fails["load"] = [RunError("parameters were not sent")]
        with pytest.raises(RunError, match="parameters were not sent"):
            await on.fleet.load_weights(staged(2))


async def test_a_load_that_fails_in_one_engine_restarts_it() -> None:
    async with scene(2) as on:
        on.engines[0].fails["load"] = [RunError("odd")]
        mark = len(on.log)
        await on.fleet.load_weights(staged(2))
        await settle()
        assert on.since(mark)[:2] == ["serving [1]", "load 2: 0"]
        assert "start 0" in on.since(mark)
        assert (on.serving, on.engines[0].version) == ("serving [0, 1]", 2)
        assert on.alarms == [
            "rollout engine 0 did not load version 2: odd",
            "ended after: odd; it is started again",
            "rollout engine 0 serves again, 0 s after it was lost",
        ]


async def test_an_engine_overtaken_by_the_trainer_waits_for_the_next_version() -> None:
    async with scene(2) as on:
        on.engines[0].fails["load"] = [WeightsOvertaken("the arena now holds version -1")]
        on.engines[0].die()
        await settle()
        assert on.serving == "serving [1]"
        assert on.fleet.describe()[0] == "engine 0: stale, died 1 times, last: killed"
        await on.fleet.load_weights(staged(2))
        assert (on.serving, on.log.count("start 0")) == ("serving [0, 1]", 2)


async def test_three_deaths_in_a_row_give_an_engine_up_and_the_last_one_ends_the_run() -> None:
    async with scene(2) as on:
        failed = asyncio.create_task(on.fleet.wait_until_failed())
        on.engines[0].fails["start"] = [RunError("no memory"), ConfigError("no model")]
        on.engines[0].die()
        await settle()
        assert on.fleet.describe()[0] == "engine 0: given up, died 3 times, last: no model"
        assert (on.log.count("start 0"), failed.done()) == (3, False)
        assert on.alarms == [
            "killed; it is started again",
            "no memory; it is started again",
            "no model; it is given up",
        ]
        await on.fleet.load_weights(staged(2))
        on.engines[1].answer()
        await settle()
        for _ in range(3):
            on.engines[1].die("bad memory")
            await settle()
        with pytest.raises(RunError, match="no rollout engine is left.*engine 0: no model; engine 1: bad memory"):
            await failed
        with pytest.raises(RunError, match="no rollout engine is left"):
            await on.fleet.load_weights(staged(3))
        await on.fleet.sleep()  # nothing holds the memory that a trainer needs to be saved


async def test_an_engine_that_finds_no_machine_stays_away_while_others_serve() -> None:
    async with scene(2) as on:
        on.engines[0].held.add("place")
        on.engines[0].die("its machine is gone")
        await settle()
        on.fleet._start_s = 0.0
        await on.fleet.load_weights(staged(2))
        await settle()
        assert (on.serving, on.fleet.describe()[0]) == (
            "serving [1]",
            "engine 0: dead, died 1 times, last: its machine is gone",
        )
        on.engines[0].release()
        await settle()
        assert (on.serving, on.engines[0].version) == ("serving [0, 1]", 2)
        assert on.alarms[-1] == "rollout engine 0 serves again, 0 s after it was lost"


async def test_without_an_engine_and_a_machine_for_one_the_run_ends_at_the_deadline_of_starts() -> None:
    async with scene(2) as on:
        on.fleet._start_s = 0.05
        failed = asyncio.create_task(on.fleet.wait_until_failed())
        for engine in on.engines:
            engine.held.add("place")
            engine.die(f"machine {engine.index} is gone")
        with pytest.raises(
            RunError, match=r"no room for one within deadlines.start_s \(0.05 s\): engine 0: machine 0 "
        ):
            await failed


async def test_an_engine_whose_actor_is_gone_for_good_is_given_up() -> None:
    async with scene(2) as on:
        on.engines[0].fails["place"] = [RunError("the actor is dead")]
        on.engines[0].die()
        await settle()
        assert on.fleet.describe()[0] == "engine 0: given up, died 3 times, last: the actor is dead"
        assert on.alarms[-1] == "rollout engine 0 is given up: the actor is dead"


async def test_an_engine_that_answers_in_between_is_never_given_up() -> None:
    async with scene(1) as on:
        for _ in range(5):
            on.engines[0].answer()
            await settle()
            on.engines[0].die()
            await settle()
        assert on.serving == "serving [0]"


async def test_a_load_under_way_hears_that_no_engine_is_left() -> None:
    async with scene(1) as on:
        on.engines[0].held.add("start")
        on.engines[0].die()
        await settle()
        update = asyncio.create_task(on.fleet.load_weights(staged(2)))
        await settle()
        on.engines[0].fails["start"] = [RunError("no memory"), RunError("no memory")]
        on.engines[0].release()
        with pytest.raises(RunError, match="no rollout engine is left"):
            await update


class HungProcess(FakeProcess):
    """Hangs in its first loads until the deadline of the call, which ends it; everything else takes nearly as long."""

    hangs = 0
    deadlines = Config().deadlines

    async def wait_until_placed(self) -> None:
        await asyncio.sleep(self.deadlines.start_s - 1)

    async def start(self) -> None:
        await super().start()
        await asyncio.sleep(self.deadlines.start_s - 1)

    async def load_weights(self, staged: StagedWeights) -> float:
        if not self.hangs:
            return await super().load_weights(staged)
        self.hangs -= 1
        await asyncio.sleep(self.deadlines.weights_s)
        self.die("a weight update did not finish")
        raise EngineLost("a weight update did not finish")


def hang_in_loads(num_engines: int, hangs: int) -> list[str]:
    """What happens to an update in which each engine hangs so often, all of it within the patience of the fleet."""

    async def tell(serving: Sequence[int]) -> None:
        await asyncio.sleep(29)

    async def update() -> list[str]:
        config = Config()
        config.staleness.max_versions = 1
        engines = [HungProcess(index, []) for index in range(num_engines)]
        fleet = EngineFleet(config, engines, tell, lambda alarm: None)
        await fleet.start()
        try:
            await within("version 1", fleet.patience_s, fleet.load_weights(staged(1)))
            for engine in engines:
                engine.hangs = hangs
            await within("version 2", fleet.patience_s, fleet.load_weights(staged(2)))
            return fleet.describe()
        finally:
            await fleet.close()

    return run_virtually(update())


def test_an_update_waits_until_the_only_engine_is_back_that_hung() -> None:
    assert hang_in_loads(1, hangs=1) == [
        "engine 0: healthy, version 2, died 1 times, last: a weight update did not finish"
    ]


def test_the_patience_of_a_fleet_is_longer_than_its_engines_can_hang() -> None:
    """The engines are given up before the driver would give up the fleet."""
    for num_engines in (1, 2, 7, 9):
        with pytest.raises(RunError, match="^no rollout engine is left; each died 3 times in a row: engine 0: a we"):
            hang_in_loads(num_engines, hangs=9)


async def test_a_fault_of_the_fleet_itself_ends_the_run() -> None:
    async with scene(1) as on:

        async def broken(staged: StagedWeights) -> float:
            raise KeyError("oops")

        on.engines[0].load_weights = broken
        on.engines[0].die()
        with pytest.raises(RunError, match=r"looking after rollout engine 0 failed: KeyError\('oops'\)"):
            await on.fleet.wait_until_failed()


async def test_a_pinned_engine_keeps_its_version_and_gets_the_current_one_when_given_back() -> None:
    async with scene(3) as on:
        assert await on.fleet.pin() == 2
        assert on.serving == "serving [0, 1]"
        await on.fleet.load_weights(staged(2))
        assert [engine.version for engine in on.engines] == [2, 2, 1]
        assert on.fleet.describe()[2] == "engine 2: healthy, version 1, pinned"
        await on.fleet.unpin(2)
        assert (on.serving, on.engines[2].version) == ("serving [0, 1, 2]", 2)


async def test_unpinning_loads_nothing_that_it_has() -> None:
    async with scene(2) as on:
        mark = len(on.log)
        await on.fleet.unpin(await on.fleet.pin())
        assert on.since(mark) == ["serving [0]", "serving [0, 1]"]


async def test_the_only_engine_serves_although_it_is_pinned_and_an_update_waits_for_it() -> None:
    async with scene(1) as on:
        assert await on.fleet.pin() == 0
        assert on.serving == "serving [0]"
        update = asyncio.create_task(on.fleet.load_weights(staged(2)))
        await settle()
        assert (update.done(), on.engines[0].version) == (False, 1)
        await on.fleet.unpin(0)
        await update
        assert on.engines[0].version == 2


async def test_a_pinned_engine_that_dies_has_no_weights_until_it_is_given_back() -> None:
    async with scene(2) as on:
        assert await on.fleet.pin() == 1
        on.engines[1].die()
        await settle()
        assert (on.log.count("start 1"), on.engines[1].version) == (2, None)
        assert on.serving == "serving [0]"
        await on.fleet.unpin(1)
        assert (on.serving, on.engines[1].version) == ("serving [0, 1]", 1)


async def test_pinning_waits_for_a_healthy_engine() -> None:
    async with scene(1) as on:
        on.engines[0].held.add("start")
        on.engines[0].die()
        await settle()
        pinning = asyncio.create_task(on.fleet.pin())
        await settle()
        assert not pinning.done()
        on.engines[0].release()
        assert await pinning == 0


async def test_sleeping_engines_are_woken_by_the_next_version_and_not_restarted_before() -> None:
    async with scene(2) as on:
        mark = len(on.log)
        await on.fleet.sleep()
        assert on.since(mark) == ["sleep 0", "sleep 1"]
        assert on.fleet.describe()[0] == "engine 0: healthy, version 1, asleep"
        on.engines[1].die()
        await settle()
        assert "start 1" not in on.since(mark)
        await on.fleet.load_weights(staged(2))
        await settle()
        assert "start 1" in on.since(mark)
        assert [engine.version for engine in on.engines] == [2, 2]
        assert on.serving == "serving [0, 1]"


async def test_engines_that_are_starting_are_put_to_sleep_too() -> None:
    async with scene(2) as on:
        on.engines[1].held = {"start"}
        on.engines[1].die()
        await settle()
        mark = len(on.log)
        sleeping = asyncio.create_task(on.fleet.sleep())
        await settle()
        assert not sleeping.done()
        on.engines[1].release()
        await sleeping
        assert on.since(mark)[-2:] == ["sleep 0", "sleep 1"]


async def test_a_start_that_fails_at_first_is_raised() -> None:
    async def tell(serving: Sequence[int]) -> None:
        raise AssertionError("nobody serves yet")

    fleet = EngineFleet(Config(), [FakeProcess(0, [], fails={"start": [ConfigError("no model")]})], tell, print)
    with pytest.raises(ConfigError, match="no model"):
        await fleet.start()


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["die", "hold", "release"]), st.integers(0, 4)),
        st.tuples(st.sampled_from(["load", "pin", "unpin"]), st.just(0)),
    ),
    max_size=25,
)


@dataclass
class Chaos:
    """What happens to a fleet in any order, and what must hold after each thing."""

    on: Scene
    version: int = 1
    pinned: list[int] = field(default_factory=list)
    loads: list[asyncio.Task[object]] = field(default_factory=list)

    async def do(self, operation: str, index: int) -> None:
        engine = self.on.engines[index % len(self.on.engines)]
        if operation == "die":
            engine.answer()
            await settle()
            engine.die()
        elif operation == "hold":
            engine.held |= {"load"}
        elif operation == "release":
            engine.release()
        elif operation == "load" and all(load.done() for load in self.loads):
            self.version += 1
            self.loads = [asyncio.create_task(self.on.fleet.load_weights(staged(self.version)))]
        elif operation == "pin" and not self.pinned and all(load.done() for load in self.loads):
            self.release()
            self.pinned = [await self.on.fleet.pin()]
        elif operation == "unpin" and self.pinned and all(load.done() for load in self.loads):
            self.release()
            await self.on.fleet.unpin(self.pinned.pop())
        await settle()
        self.check()

    def check(self) -> None:
        for index in map(int, re.findall("[0-9]+", self.on.serving)):
            assert index not in self.pinned
            assert self.on.engines[index].version in (self.version, self.version - 1)

    def release(self) -> None:
        for engine in self.on.engines:
            engine.release()

    async def end(self) -> None:
        self.release()
        await settle()
        for engine in self.pinned:
            await self.on.fleet.unpin(engine)
        await asyncio.gather(*self.loads)
        await settle()
        assert self.on.serving == f"serving {list(range(len(self.on.engines)))}"
        assert {engine.version for engine in self.on.engines} == {self.version}


@given(num_engines=st.integers(2, 5), update=st.sampled_from(list(Update)), operations=OPERATIONS)
@settings(deadline=None)
def test_whoever_serves_holds_this_version_or_the_one_before(
    num_engines: int, update: Update, operations: list[tuple[str, int]]
) -> None:
    async def run() -> None:
        async with scene(num_engines, update) as on:
            chaos = Chaos(on)
            for operation, index in operations:
                await chaos.do(operation, index)
            await chaos.end()

    asyncio.run(asyncio.wait_for(run(), timeout=10))
