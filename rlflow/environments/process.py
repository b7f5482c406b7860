"""The process in which environments run: `python -m rlflow.environments.process SOCKET_FD LIFE_FD MAX_MEMORY_BYTES`.

One event loop hosts many episodes. What an environment does wrong becomes the answer to the call; what it does to the
process costs the episodes in it. `rlflow.environments.wire` lists the messages; before them goes the pickled `build`.
"""

from __future__ import annotations

import resource
import sys
from typing import TYPE_CHECKING, cast

from rlflow.processes.supervisor import supervise

if TYPE_CHECKING:
    import asyncio

    from rlflow.environments.host import Build


def main(socket_fd: int, life_fd: int, max_memory_bytes: int) -> None:
    """Host environments until the runner closes the socket."""
    supervise(life_fd, [socket_fd])
    # All else is imported after the fork, so that the supervisor stays small.
    import asyncio
    import faulthandler
    import os

    faulthandler.enable()
    # Of private memory that can be written to, as far as it was asked for: unlike RLIMIT_AS it leaves out mapped files
    # and reserved addresses, of which some libraries have terabytes.
    resource.setrlimit(resource.RLIMIT_DATA, (max_memory_bytes, max_memory_bytes))
    asyncio.new_event_loop().run_until_complete(_serve(socket_fd))
    os._exit(0)  # nobody waits for threads or tasks that hang


async def _serve(socket_fd: int) -> None:
    import asyncio
    import contextlib
    import json
    import socket

    from rlflow.environments.host import EnvironmentHost
    from rlflow.errors import ConfigError
    from rlflow.processes.frames import frame_of, read_frame

    reader, writer = await asyncio.open_unix_connection(sock=socket.socket(fileno=socket_fd))
    with contextlib.suppress(EOFError, ConnectionError):
        try:
            build = _load(await read_frame(reader))
        except ConfigError as error:
            await _refuse(writer, str(error))
            return
        host = EnvironmentHost(build, writer)
        writer.write(frame_of(b"{}"))
        while True:
            host.handle(json.loads(await read_frame(reader)))


async def _refuse(writer: asyncio.StreamWriter, error: str) -> None:
    import json

    from rlflow.processes.frames import frame_of

    writer.write(frame_of(json.dumps({"error": error}).encode()))
    await writer.drain()


def _load(pickled: bytes) -> Build:
    import pickle

    from rlflow.errors import ConfigError, describe_failure

    try:
        build = pickle.loads(pickled)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"the environment cannot be loaded in its process: {describe_failure(error)}; define what `build` needs at "
            "the top level of an importable module or of the file of env.name"
        ) from error
    if not callable(build):
        raise ConfigError(f"`build` of an EnvironmentSpec must be a function; got {type(build).__name__}")
    return cast("Build", build)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
