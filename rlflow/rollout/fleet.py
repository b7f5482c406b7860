"""All rollout engines of a run: their health, their weights, and which of them serve. No Ray here.

    one engine:    watch -> dead -> start -> load the staged weights -> serve
    all of them:   load_weights -> wave after wave of engines

Rules: an engine that serves holds one complete version. Episode runners know which engines serve before a wave begins
to load and after it. The run ends when no engine is left.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import NoReturn, Protocol

from rlflow.config import Config, Update
from rlflow.errors import ConfigError, EngineLost, RunError, WeightsOvertaken
from rlflow.roles import LoadOutcome, StagedWeights
from rlflow.rollout.health import MAX_DEATHS, EngineState, Health, serving, waves
from rlflow.runtime.concurrency import all_or_none
from rlflow.runtime.derived import samples_while_loading

TELL_S = 30.0
"""Seconds for an episode runner to take note of something. A slower one hangs, and is killed."""


class EngineProcess(Protocol):
    """One engine and its process. Each call has a deadline of its own, except the waits that watch.

    If a call raises anything but WeightsOvertaken, the process has been ended; EngineLost means that it ended by
    itself, or did not answer in time.
    """

    async def wait_until_placed(self) -> None:
        """Wait, however long it takes, until the cluster has given it a fresh process. Raises RunError when it will
        not."""
        ...

    async def start(self) -> None:
        """Start vLLM in that process."""
        ...

    async def watch(self) -> NoReturn:
        """Wait until the engine is lost, and raise why."""
        ...

    async def wait_until_answered(self) -> None:
        """Wait until it has answered a request."""
        ...

    async def load_weights(self, staged: StagedWeights) -> float:
        """Returns the seconds in which nothing was sampled."""
        ...

    async def sleep(self) -> None: ...


class EngineFleet:
    """Implements `roles.Engines`.

    `tell` is called with the engines that serve whenever they change, and returns when every episode runner knows.
    `alarm` is called with messages for users, about an engine that was lost or could not load.
    """

    def __init__(
        self,
        config: Config,
        engines: Sequence[EngineProcess],
        tell: Callable[[Sequence[int]], Awaitable[None]],
        alarm: Callable[[str], None],
    ) -> None:
        self._start_s = config.deadlines.start_s
        # Loads come one after the other: the one under way, each engine's in the update, and one in each of its lives.
        # The episode runners are told before a load and after it.
        most_loads = 1 + (1 + MAX_DEATHS) * len(engines)
        loading_s = most_loads * (config.deadlines.weights_s + 2 * TELL_S)
        self.patience_s = loading_s + MAX_DEATHS * 2 * self._start_s
        """See `roles.Engines`. In each life an engine waits for a place, and starts."""
        self._is_rolling = config.rollout.update is Update.rolling and samples_while_loading(config)
        self._engines = engines
        self._tell = tell
        self._alarm = alarm
        self._states = [EngineState() for _ in engines]
        self._lost_at_s: dict[int, float] = {}
        """When each engine was lost that does not serve again yet, by the loop's clock."""
        self._pinned: set[int] = set()
        self._staged: StagedWeights | None = None
        self._is_asleep = False
        # Held while an engine takes weights, because the staged ones must not change meanwhile.
        self._loading = asyncio.Lock()
        self._changed = asyncio.Event()
        self._told: tuple[int, ...] | None = None
        self._telling = asyncio.Lock()
        self._failure: asyncio.Future[NoReturn] = asyncio.get_running_loop().create_future()
        self._guards: list[asyncio.Task[None]] = []

    # -- life

    async def start(self) -> None:
        """Start all engines, and keep them alive until `close`. Raises what the first one raises that does not come
        up."""
        await asyncio.gather(*(self._begin(index) for index in range(len(self._engines))))
        self._guards = [asyncio.create_task(self._guard(index)) for index in range(len(self._engines))]

    async def _begin(self, index: int) -> None:
        await self._engines[index].wait_until_placed()
        await self._start(index)

    async def close(self) -> None:
        """Stop looking after the engines; they may be ended now."""
        for guard in self._guards:
            guard.cancel()
        if self._guards:
            await asyncio.wait(self._guards)
        self._failure.cancel()

    async def wait_until_failed(self) -> NoReturn:
        """Wait until no engine is left, then raise RunError."""
        await asyncio.shield(self._failure)
        raise AssertionError("a failure is an exception")

    async def _guard(self, index: int) -> None:
        """Watch one engine, and bring it back when it is lost, until it is given up."""
        state = self._states[index]
        try:
            while not state.is_given_up:
                try:
                    if state.health is Health.DEAD:
                        await self._revive(index)
                    if state.is_up:
                        await self._watch(index)
                except (ConfigError, RunError) as error:
                    state.died(str(error))
                    self._lost_at_s.setdefault(index, asyncio.get_running_loop().time())
                    self._alarm(f"{error}; {'it is given up' if state.is_given_up else 'it is started again'}")
                    await self._announce()
        except Exception as error:
            # Nothing awaits a guard, so an unexpected exception must end the run here.
            self._fail(RunError(f"looking after rollout engine {index} failed: {error!r}"), error)
        if all(state.is_given_up for state in self._states):
            self._fail(
                RunError(f"no rollout engine is left; each died {state.deaths} times in a row: {self._last_deaths()}")
            )

    async def _watch(self, index: int) -> None:
        """Let an engine that is up catch up and serve; raises why it is lost.

        The watch goes on beside the rest, for another `load_weights` may have made the engine serve already.
        """
        await all_or_none([self._engines[index].watch(), self._note_service(index), self._catch_up(index)])

    async def _note_service(self, index: int) -> None:
        await self._engines[index].wait_until_answered()
        self._states[index].served()

    async def _catch_up(self, index: int) -> None:
        """Give a fresh engine the staged weights, so that it serves."""
        async with self._loading:
            # If it may not load now, the next `load_weights` or `unpin` includes it.
            staged, may_load = self._staged, not self._is_asleep and index not in self._pinned
            if staged is not None and may_load and not self._holds(index, staged):
                # If it is overtaken, the trainer writes the next version, whose `load_weights` includes this engine.
                with suppress(WeightsOvertaken):
                    await self._load(index, staged)
                await self._announce()

    async def _revive(self, index: int) -> None:
        await self._wait_until_replaced(index)
        while self._is_asleep:
            # The trainer uses the memory now, so vLLM would not find it free.
            await self._changed.wait()
        if not self._states[index].is_given_up:
            await self._start(index)

    async def _wait_until_replaced(self, index: int) -> None:
        """Wait for a process: as long as it takes while other engines are there, else for deadlines.start_s."""
        placed = asyncio.create_task(self._engines[index].wait_until_placed())
        try:
            while not placed.done():
                is_alone = all(state.health is Health.DEAD for state in self._states)
                changed = asyncio.create_task(self._changed.wait())
                most_s = self._start_s if is_alone else None
                done, _ = await asyncio.wait((placed, changed), timeout=most_s, return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
                if not done:
                    problem = (
                        f"no rollout engine is left, and the cluster had no room for one within deadlines.start_s "
                        f"({self._start_s:g} s): {self._last_deaths()}"
                    )
                    self._fail(
                        RunError(f"{problem}; add machines, and start the run again: it goes on from its checkpoint")
                    )
                    await asyncio.shield(self._failure)
            placed.result()
        except RunError as error:
            self._states[index].give_up(str(error))
            self._alarm(f"rollout engine {index} is given up: {error}")
        finally:
            placed.cancel()
            await asyncio.wait([placed])

    def _last_deaths(self) -> str:
        return "; ".join(f"engine {number}: {state.last_death}" for number, state in enumerate(self._states))

    async def _start(self, index: int) -> None:
        self._states[index].start()
        await self._engines[index].start()
        self._states[index].started()
        self._wake_waiters()

    # -- what the driver asks for

    async def load_weights(self, staged: StagedWeights) -> LoadOutcome:
        """See `roles.Engines`. Raises RunError when no engine is left, or when none of several could load."""
        pauses: list[float] = []
        async with self._loading:
            self._raise_failure()
            self._staged, self._is_asleep = staged, False
            self._wake_waiters()
            targets = [i for i, state in enumerate(self._states) if state.is_up and i not in self._pinned]
            failures: list[RunError] = []
            for wave in waves(targets, len(self._engines), self._is_rolling):
                for result in await self._load_wave(wave, staged):
                    if isinstance(result, RunError):
                        failures.append(result)
                    else:
                        pauses.append(result)
            broken = [failure for failure in failures if not isinstance(failure, EngineLost)]
            if broken and len(failures) == len(targets):
                raise broken[0]
        await self._wait_until(lambda: any(self._holds(index, staged) for index in range(len(self._states))))
        return LoadOutcome(pause_s=max(pauses, default=0.0))

    async def sleep(self) -> None:
        """See `roles.Engines`."""
        assert not self._pinned, "an evaluation ends before the engines sleep"
        self._is_asleep = True
        # One that is starting takes memory; from now on none begins to.
        await self._wait_until(lambda: all(state.health is not Health.STARTING for state in self._states))
        async with self._loading:
            awake = [index for index, state in enumerate(self._states) if state.is_up]
            # An engine that dies of it is dead, which frees its memory too.
            await asyncio.gather(*(_outcome_of(self._engines[index].sleep()) for index in awake))

    async def pin(self) -> int:
        """See `roles.Engines`. Waits for an engine that is healthy."""
        while True:
            async with self._loading:
                found = self._free()
                if found:
                    self._pinned.add(found[-1])
                    await self._announce()
                    return found[-1]
            await self._wait_until(lambda: bool(self._free()))

    async def unpin(self, engine: int) -> None:
        """See `roles.Engines`."""
        async with self._loading:
            self._pinned.remove(engine)
            state, staged = self._states[engine], self._staged
            if state.is_up and staged is not None and not self._holds(engine, staged):
                await self._load_wave([engine], staged)
            await self._announce()

    def describe(self) -> list[str]:
        """See `roles.Engines`."""
        return [f"engine {index}: {', '.join(self._facts(index))}" for index in range(len(self._states))]

    def _facts(self, index: int) -> list[str]:
        state = self._states[index]
        facts = ["given up" if state.is_given_up else state.health.value]
        if state.version is not None:
            facts.append(f"version {state.version}")
        if state.health is Health.STALE and self._loading.locked() and self._staged is not None:
            facts.append(f"loads version {self._staged.version}")
        if index in self._pinned:
            facts.append("pinned")
        if self._is_asleep and state.is_up:
            facts.append("asleep")
        if state.deaths:
            facts.append(f"died {state.deaths} times, last: {state.last_death}")
        return facts

    # -- loading

    async def _load_wave(self, wave: Sequence[int], staged: StagedWeights) -> list[float | RunError]:
        """Load some engines together while the others serve; the seconds of pause or the failure of each.

        Engines that died since the wave was planned are left out, because they load when they are back.
        """
        wave = [index for index in wave if self._states[index].is_up]
        for index in wave:
            self._states[index].load()
        await self._announce()
        results = await asyncio.gather(*(_outcome_of(self._load(index, staged)) for index in wave))
        await self._announce()
        return results

    async def _load(self, index: int, staged: StagedWeights) -> float:
        state = self._states[index]
        try:
            pause_s = await self._engines[index].load_weights(staged)
        except RunError as error:
            if not isinstance(error, WeightsOvertaken):
                self._alarm(f"rollout engine {index} did not load version {staged.version}: {error}")
            if state.health is Health.STALE:
                state.load_failed()
            raise
        # It may have died just after, which the watch has noted.
        if state.health is Health.STALE:
            state.loaded(staged.version)
            if (lost_at_s := self._lost_at_s.pop(index, None)) is not None:
                away_s = asyncio.get_running_loop().time() - lost_at_s
                self._alarm(f"rollout engine {index} serves again, {away_s:.0f} s after it was lost")
        return pause_s

    def _holds(self, index: int, staged: StagedWeights) -> bool:
        state = self._states[index]
        return state.health is Health.HEALTHY and state.version == staged.version

    def _free(self) -> list[int]:
        healthy = [index for index, state in enumerate(self._states) if state.health is Health.HEALTHY]
        return [index for index in healthy if index not in self._pinned]

    # -- telling others

    async def _announce(self) -> None:
        """Tell the runners which engines serve, if that has changed, and wake the tasks that wait for an engine."""
        self._wake_waiters()
        async with self._telling:
            # Read under the lock, because it may have changed while waiting for it.
            engines = serving(self._states, self._pinned)
            if engines != self._told:
                await self._tell(engines)
                self._told = engines

    def _wake_waiters(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _wait_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._raise_failure()
            changed = asyncio.ensure_future(self._changed.wait())
            await asyncio.wait((changed, self._failure), return_when=asyncio.FIRST_COMPLETED)
            changed.cancel()

    def _fail(self, error: RunError, cause: Exception | None = None) -> None:
        error.__cause__ = cause
        if not self._failure.done():
            self._failure.set_exception(error)
            self._failure.exception()  # asyncio would warn of a failure that nothing awaits

    def _raise_failure(self) -> None:
        if self._failure.done():
            self._failure.result()


async def _outcome_of(work: Awaitable[float | None]) -> float | RunError:
    try:
        return await work or 0.0
    except RunError as error:
        return error
