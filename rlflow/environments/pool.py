"""Environments run in processes that can be killed, never in that of the episode runner.

    EnvironmentPool.open -> the process with the fewest open episodes -> Environment or Program

Covered: code that waits or blocks for ever, that crashes, runs out of memory or is killed for it, prints without end,
or leaves threads or processes behind. It costs the episode, or the episodes of its process, which is then replaced. A
process in which many calls have outlived their episodes is replaced too, once the others have ended.

Not covered: an environment is its author's code, and may use network, disk and processor as it likes. It may start any
number of processes, but all of them end with its own. Code that a model wrote belongs in a sandbox.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence

from rlflow.environments.remote import RemoteHost
from rlflow.envs.base import Environment, Program, takes_task
from rlflow.errors import EnvironmentFailure, EnvironmentLost
from rlflow.processes.machine_limits import memory_bytes
from rlflow.processes.pool import HostedCode, Pool, payload_of
from rlflow.types import Task

_CLOSED = "the environment processes were closed"


def processes_of_runner(processes: int, num_runners: int) -> int:
    """The processes of one of the runners on a machine: an equal part, rounded up."""
    return -(-processes // num_runners)


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
        num_runners: int = 1,
    ) -> None:
        """`processes` are those of all `num_runners` runners of the machine, which divide them; each has at least one.

        `max_memory_bytes` is for each process; None divides half of the machine's memory among the processes of all.
        """
        if processes < 1:
            raise ValueError(f"processes must be at least 1; got {processes}")
        processes = processes_of_runner(processes, num_runners)
        code = HostedCode(
            module="rlflow.environments.host",
            payload=payload_of(
                build,
                "the environment",
                "its process",
                "EnvironmentSpec.build must be a function or class at the top level of an importable module, or a "
                "functools.partial of one",
            ),
            process="the environment process",
            what="the environment",
            cure="define what `build` needs at the top level of an importable module or of the file of env.name",
            max_memory_bytes=max_memory_bytes or memory_bytes() // 2 // (processes * num_runners),
            failed=EnvironmentFailure,
            lost=EnvironmentLost,
        )
        self._pool = Pool(lambda: RemoteHost(code), processes, lambda: EnvironmentLost(_CLOSED))
        self._takes_task = takes_task(build)
        self._lease_timeout_s = lease_timeout_s
        self._turns = asyncio.Semaphore(len(leases)) if leases else None
        self._leases: asyncio.Queue[str] = asyncio.Queue()
        for lease in leases:
            self._leases.put_nowait(lease)

    @property
    def num_open(self) -> int:
        """Episodes that may hold something in a process."""
        return sum(host.num_open for host in self._pool.living)

    async def start(self) -> None:
        """Start the processes, unless they are, and wait until each has loaded the environment.

        Raises ConfigError when it cannot be loaded, DeadlineError when that takes too long.
        """
        await self._pool.start()

    @contextlib.asynccontextmanager
    async def lease(self) -> AsyncIterator[None]:
        """Hold this around an episode, so that a lease is free when it opens its environment.

        It does nothing if there are no leases. Raises EnvironmentFailure when none came free in time.
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

    async def open(self, seed: int, task: Task) -> Environment | Program:
        """A new environment, with `seed` set, for `task` if `build` takes one; close it.

        Its methods raise EnvironmentFailure. May be cancelled at any time.

        Raises EnvironmentFailure, or EnvironmentLost when its process ended.
        """
        await self.start()
        lease = None if self._turns is None else await self._leases.get()

        def freed() -> None:
            if lease is not None:
                self._leases.put_nowait(lease)

        try:
            host = await self._pool.pick(lambda host: host.num_open)
        except BaseException:
            freed()
            raise
        return await host.open(seed, task if self._takes_task else None, lease, freed)

    async def close(self) -> None:
        """Kill the processes and all that they started; what is under way raises EnvironmentLost."""
        await self._pool.close()
