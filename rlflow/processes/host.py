"""What a process of `rlflow.processes.pool` does with other people's code: load it, then answer calls.

    pickled content -> `load` of a module -> handlers      answered with {}, {"refused": ..} or {"broken": ..}
    {"call": 3, "operation": "score", ..} -> handler       answered with {"answer": 3, "value": ..}
                                                           or {"answer": 3, "failure": "ValueError: .. (mine.py:7)"}

`load(content)` returns functions by operation, which answer one call at a time with values for JSON, or a `Concurrent`.
The parent holds the other end of the socket; it alone sends pickles, and reads none.
"""

import asyncio
import contextlib
import faulthandler
import importlib
import json
import os
import pickle
import resource
import socket
from collections.abc import Callable, Mapping
from typing import Protocol

from rlflow.errors import ConfigError, describe_failure
from rlflow.processes.frames import Fields, encode, frame_of, read_frame, receive


class Concurrent(Protocol):
    """Answers many calls at a time, on one event loop."""

    def begin(self, writer: asyncio.StreamWriter) -> None:
        """Called once, on the loop; frames for the parent go to `writer`."""
        ...

    def handle(self, message: Fields) -> None:
        """One message of the parent; whatever takes time is for a task. Raises nothing."""
        ...


Handlers = Mapping[str, Callable[..., object]] | Concurrent


def serve(socket_fd: int, module: str, max_memory_bytes: int) -> None:
    """Load and answer until the parent closes the socket. Ends this process; 0 bytes of memory are no bound."""
    faulthandler.enable()
    if max_memory_bytes:
        # Bounds private memory that can be written to, as far as it was asked for. Unlike RLIMIT_AS it leaves out
        # mapped files and reserved addresses, of which some libraries have terabytes.
        resource.setrlimit(resource.RLIMIT_DATA, (max_memory_bytes, max_memory_bytes))
    connection = socket.socket(fileno=socket_fd)
    with contextlib.suppress(EOFError, ConnectionError):
        handlers = _load(connection, module)
        if isinstance(handlers, Mapping):
            _answer_in_turn(connection, handlers)
        elif handlers is not None:
            asyncio.new_event_loop().run_until_complete(_answer_concurrently(connection, handlers))
    os._exit(0)  # nobody waits for threads or tasks that hang


def _load(connection: socket.socket, module: str) -> Handlers | None:
    handlers, answer = None, {}
    payload = receive(connection.fileno())
    try:
        handlers = importlib.import_module(module).load(pickle.loads(payload))
    except ConfigError as error:
        answer = {"refused": str(error)}
    except Exception as error:
        answer = {"broken": describe_failure(error)}
    connection.sendall(frame_of(encode(answer)))
    return handlers


def _answer_in_turn(connection: socket.socket, handlers: Mapping[str, Callable[..., object]]) -> None:
    """Calls are read outside any event loop: if a handler forks, the copy's loop would take some of them."""
    process = os.getpid()
    while True:
        fields: Fields = json.loads(receive(connection.fileno()))
        number, operation = fields.pop("call"), fields.pop("operation")
        try:
            answer = frame_of(encode({"answer": number, "value": handlers[operation](**fields)}))
        except Exception as error:
            answer = frame_of(encode({"answer": number, "failure": describe_failure(error)}))
        if os.getpid() != process:
            os._exit(1)  # the handler forked, and its caller gets one answer
        connection.sendall(answer)


async def _answer_concurrently(connection: socket.socket, host: Concurrent) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=connection)
    host.begin(writer)
    while True:
        host.handle(json.loads(await read_frame(reader)))
