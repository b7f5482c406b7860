"""Environments run in processes that can be killed, never in that of the episode runner.

    EnvironmentPool.open -> the process with the fewest open episodes -> Environment or Program

Covered: code that waits or blocks for ever, that crashes, runs out of memory or is killed for it, prints without end,
or leaves threads or processes behind. It costs the episode, or the episodes of its process, which is then replaced; a
process in which many calls have outlived their episodes is replaced too, once the others have ended.

Not covered: an environment is its author's code, and may use network, disk and processor as it likes; how many
processes it starts is not bounded, though all of them end with theirs. Code that a model wrote belongs into a sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
from collections.abc import AsyncIterator, Callable, Sequence

from rlflow.environments.remote import RemoteHost
from rlflow.envs.base import Environment, Program
from rlflow.errors import ConfigError, DeadlineError, EnvironmentFailure, EnvironmentLost
from rlflow.processes.machine_limits import memory_bytes

MAX_RESTART_WAIT_S = 60.0
_CLOSED = "the environment processes were closed"


class EnvironmentPool:
    """Environment processes of one runner.

    `build` pickles by reference. `leases` are this runner's resources: as many episodes are open at a time, each with
    one of them for itself.
    """

    def __init__(
        self,
        build: Callable[..., Environment | Program],
        processes: int = 1,
        leases: Sequence[str] = (),
        *,
        lease_timeout_s: float = 900.0,
        max_memory_bytes: int | None = None,
    ) -> None:
        """`max_memory_bytes` is for each process; None shares half of the machine's memory out among them."""
        if processes < 1:
            raise ValueError(f"processes must be at least 1; got {processes}")
        self._build = _pickled(build)
        self._max_memory_bytes = max_memory_bytes or memory_bytes() // 2 // processes
        self._lease_timeout_s = lease_timeout_s
        self._turns = asyncio.Semaphore(len(leases)) if leases else None
        self._leases: asyncio.Queue[str] = asyncio.Queue()
        for lease in leases:
            self._leases.put_nowait(lease)
        self._slots = [_Slot() for _ in range(processes)]
        self._changed = asyncio.Event()
        self._starting = asyncio.Lock()
        self._hosts: dict[RemoteHost, asyncio.Task[None]] = {}
        """Every process that is not yet gone, with what waits for its end."""

    @property
    def num_open(self) -> int:
        """Episodes that may hold something in a process."""
        return sum(host.num_open for host in self._hosts)

    async def start(self) -> None:
        """Start the processes, unless they are, and wait until each has loaded the environment.

        Raises ConfigError when it cannot be loaded, DeadlineError when that takes too long.
        """
        async with self._starting:
            if self._slots[0].keeping is not None:
                return
            for slot in self._slots:
                slot.keeping = asyncio.create_task(self._keep(slot))
                slot.keeping.add_done_callback(lambda _: self._changed.set())
            try:
                await self._until(lambda: all(slot.is_open or slot.error for slot in self._slots))
                for slot in self._slots:
                    if slot.error is not None:
                        raise slot.error
            except BaseException:
                await self.close()
                raise

    @contextlib.asynccontextmanager
    async def lease(self) -> AsyncIterator[None]:
        """Hold this around an episode, so that a lease is free when it opens its environment. Without leases it does
        nothing.

        Raises EnvironmentFailure when none came free in time.
        """
        if self._turns is None:
            yield
            return
        try:
            async with asyncio.timeout(self._lease_timeout_s):
                await self._turns.acquire()
        except TimeoutError:
            waited = f"no lease came free within {self._lease_timeout_s:g} s"
            raise EnvironmentFailure(
                f"lease: {waited}; give the environment more of them, or shorter episodes"
            ) from None
        try:
            yield
        finally:
            self._turns.release()

    async def open(self, seed: int) -> Environment | Program:
        """A new environment, with `seed` set; close it. Its methods raise EnvironmentFailure.

        May be cancelled at any time. Raises EnvironmentFailure, or EnvironmentLost when its process ended.
        """
        await self.start()
        if self._turns is None:
            return await (await self._host()).open(seed, None, lambda: None)
        lease = await self._leases.get()
        try:
            host = await self._host()
        except BaseException:
            self._leases.put_nowait(lease)
            raise
        return await host.open(seed, lease, lambda: self._leases.put_nowait(lease))

    async def close(self) -> None:
        """Kill the processes and all that they started; what is under way raises EnvironmentLost."""
        slots, self._slots = self._slots, [_Slot() for _ in self._slots]
        keeping = [slot.keeping for slot in slots if slot.keeping is not None]
        for task in keeping:
            task.cancel()
        for host in self._hosts:
            host.kill(_CLOSED)
        await asyncio.gather(*keeping, *self._hosts.values(), return_exceptions=True)

    async def _host(self) -> RemoteHost:
        """The process with the fewest open episodes, of those that take any; who opens has a deadline of its own."""
        slots = self._slots
        await self._until(lambda: any(slot.is_open for slot in slots))
        hosts = [slot.host for slot in slots if slot.host is not None and slot.is_open]
        return min(hosts, key=lambda host: host.num_open)

    async def _until(self, holds: Callable[[], object]) -> None:
        while not holds():
            for slot in self._slots:
                if slot.keeping is None or slot.keeping.cancelled():
                    raise EnvironmentLost(_CLOSED)
                if slot.keeping.done():
                    slot.keeping.result()
            self._changed.clear()
            await self._changed.wait()

    async def _keep(self, slot: _Slot) -> None:
        """Have a process in this place, again and again."""
        failures = 0
        while True:
            try:
                host = RemoteHost(self._build, self._max_memory_bytes)
                await host.start()
            except (ConfigError, DeadlineError, OSError) as error:
                failures += 1
                slot.error = error
                self._changed.set()
                await asyncio.sleep(min(2.0**failures, MAX_RESTART_WAIT_S))
                continue
            failures, slot.error, slot.host = 0, None, host
            self._hosts[host] = asyncio.create_task(self._see_off(host))
            self._changed.set()
            await host.refuses.wait()

    async def _see_off(self, host: RemoteHost) -> None:
        await host.refuses.wait()
        await host.retire()
        del self._hosts[host]


class _Slot:
    """The place of one process, and of those that replace it."""

    def __init__(self) -> None:
        self.keeping: asyncio.Task[None] | None = None
        self.host: RemoteHost | None = None
        """The last process that could be started."""
        self.error: Exception | None = None
        """Why none could be started after it."""

    @property
    def is_open(self) -> bool:
        return self.host is not None and not self.host.refuses.is_set()


def _pickled(build: Callable[..., Environment | Program]) -> bytes:
    try:
        return pickle.dumps(build)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"the environment cannot be sent to its process: {error}; EnvironmentSpec.build must be a function or "
            "class at the top level of an importable module, or a functools.partial of one"
        ) from error
