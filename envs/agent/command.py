"""Running a command for one episode: in a process group of its own, its output bounded, nothing left behind."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, TypeAlias

KEPT_BYTES = 64 * 2**10
"""How much is kept of the end of standard output, and of standard error; the rest is dropped."""
DRAIN_TIMEOUT_S = 5.0
"""Seconds for reading what is left in the pipes once every process of the group is dead."""

# Kills the group when the last holder of the life pipe's other end closes it or dies, be it by SIGKILL.
_GUARDED = '{ read -r _ < "/dev/fd/$0"; kill -KILL 0; } < /dev/null > /dev/null 2>&1 & exec "$@"'


_Starting: TypeAlias = "asyncio.Future[tuple[asyncio.SubprocessTransport, _Protocol]]"


@dataclass(kw_only=True, slots=True, frozen=True)
class Ended:
    """How a command ended."""

    code: int
    """Exit code; minus the number of the signal that killed it."""
    output: str
    """The end of its standard output."""
    errors: str
    """The end of its standard error."""

    def describe(self) -> str:
        """In words, such as "exited with code 1"."""
        return f"was killed by {signal.Signals(-self.code).name}" if self.code < 0 else f"exited with code {self.code}"


async def run_command(
    command: Sequence[str], *, stdin: IO[bytes], folder: str, environment: Mapping[str, str]
) -> Ended:
    """Run a command until it exits, then kill what it left in its process group; all of it when cancelled.

    The group also dies with this process. A child that starts a session of its own leaves the group and lives on.
    """
    protocol = _Protocol()
    life = os.pipe()
    starting = asyncio.ensure_future(
        asyncio.get_running_loop().subprocess_exec(
            lambda: protocol,
            *("/bin/sh", "-c", _GUARDED, str(life[0]), *command),
            stdin=stdin,
            cwd=folder,
            env=dict(environment),
            start_new_session=True,
            pass_fds=(life[0],),
        )
    )
    try:
        # Shielded: a start that is cancelled half-way may wait for its pipes forever (CPython 3.11).
        transport, _ = await asyncio.shield(starting)
        await protocol.exited.wait()
        _kill_group(transport.get_pid())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_TIMEOUT_S):
                await protocol.closed.wait()
        code = transport.get_returncode()
        assert code is not None, "an exited process has a code"
        return Ended(code=code, output=protocol.text(1), errors=protocol.text(2))
    finally:
        if starting.done():
            _end(starting, life)
        else:
            starting.add_done_callback(lambda started: _end(started, life))


def _end(started: _Starting, life: tuple[int, int]) -> None:
    """Kill what was started, if it was, and give back what belongs to it."""
    if not started.cancelled() and started.exception() is None:
        transport = started.result()[0]
        _kill_group(transport.get_pid())
        transport.close()
    for end in life:
        os.close(end)


def _kill_group(group: int) -> None:
    # The number is not used anew while the guard lives, which nothing but this ends.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


class _Protocol(asyncio.SubprocessProtocol):
    """Keeps the end of each stream. Unlike asyncio's own, it tells an exit from the end of the output, which children
    that live on may hold open."""

    def __init__(self) -> None:
        self.exited = asyncio.Event()
        self.closed = asyncio.Event()
        self._kept = {1: bytearray(), 2: bytearray()}

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self._kept[fd] += data
        del self._kept[fd][:-KEPT_BYTES]

    def process_exited(self) -> None:
        self.exited.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set()

    def text(self, fd: int) -> str:
        return self._kept[fd].decode(errors="replace")
