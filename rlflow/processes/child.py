"""A process of our own that runs other people's code, and that can be killed with all that it started.

    Child -> `python -m <module> SOCKET_FD LIFE_FD ...` -> rlflow.processes.supervisor -> the code

Both sides talk in frames (`rlflow.processes.frames`) over a socket that only they hold.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys

from rlflow.errors import DeadlineError
from rlflow.processes.frames import MAX_FRAME_BYTES, frame_of, read_frame

KILL_TIMEOUT_S = 10.0
CLUSTER_KEYS = frozenset({"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"})


def _variables() -> dict[str, str]:
    """This process's, without what opens its Ray cluster: programs that run there may show theirs to a model."""
    kept = {name: value for name, value in os.environ.items() if name not in CLUSTER_KEYS}
    return kept | {"PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)}


class Child:
    """One process, from its start to its end."""

    def __init__(self, module: str, name: str, *arguments: str) -> None:
        """Start `python -m module`; `name` is what messages call it, such as "the environment process".

        `arguments` are given to the module after the two descriptors.
        """
        self._name = name
        self._socket, theirs = socket.socketpair()
        life_read, self._life_fd = os.pipe()
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._is_killed = False
        self._ending: asyncio.Task[int] | None = None
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno()), str(life_read), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=2,
                env=_variables(),
                pass_fds=(theirs.fileno(), life_read),
                start_new_session=True,
            )
        except BaseException:
            self._socket.close()
            os.close(self._life_fd)
            raise
        finally:
            theirs.close()
            os.close(life_read)

    async def connect(self) -> None:
        """Before the first frame."""
        self._streams = await asyncio.open_unix_connection(sock=self._socket)

    def send(self, content: bytes) -> None:
        """Without waiting; nothing happens when the process is gone. Raises FrameTooLong."""
        assert self._streams is not None, "connect first"
        frame = frame_of(content)
        if not self._is_killed:
            self._streams[1].write(frame)

    async def drain(self) -> None:
        """Wait until the process has taken most of what was sent, or is gone."""
        assert self._streams is not None, "connect first"
        with contextlib.suppress(ConnectionError):
            await self._streams[1].drain()

    async def receive(self, max_bytes: int = MAX_FRAME_BYTES) -> bytes:
        """As `read_frame`; its end is that of the process."""
        assert self._streams is not None, "connect first"
        return await read_frame(self._streams[0], max_bytes)

    def kill(self) -> None:
        """Have the process and all that it started killed. Raises nothing, also when it is dead."""
        if self._is_killed:
            return
        self._is_killed = True
        os.close(self._life_fd)
        if self._streams is None:
            self._socket.close()
        else:
            self._streams[1].close()

    async def wait_until_ended(self) -> int:
        """The exit code of the killed process, negative for a signal, once all that it started has ended too."""
        assert self._is_killed, "kill first: otherwise it may live for long"
        if self._ending is None:
            self._ending = asyncio.create_task(self._wait())
        return await asyncio.shield(self._ending)

    async def describe_death(self) -> str:
        """How the process died; it was killed, or has closed its socket."""
        is_ours = self._is_killed
        self.kill()
        code = await self.wait_until_ended()
        if code >= 0:
            return f"{self._name} exited with code {code}"
        is_unexplained = -code == signal.SIGKILL and not is_ours
        hint = "; the kernel does that when memory runs out" if is_unexplained else ""
        return f"{self._name} was killed by {signal.Signals(-code).name}{hint}"

    async def _wait(self) -> int:
        for _ in range(2):
            with contextlib.suppress(subprocess.TimeoutExpired):
                return await asyncio.to_thread(self._process.wait, KILL_TIMEOUT_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        raise DeadlineError(f"end of {self._name}, which was killed", 2 * KILL_TIMEOUT_S)
