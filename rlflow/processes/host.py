"""What a process of `rlflow.processes.pool` does with other people's code: load it, then answer calls.

    pickled content -> `load` of a module -> handlers      answered with {}, {"refused": ..} or {"broken": ..}
    {"call": 3, "operation": "score", ..} -> handler       answered with {"answer": 3, "value": ..}
                                                           or {"answer": 3, "failure": "ValueError: .. (mine.py:7)"}

`load(content)` returns functions by operation, which answer one call at a time with values for JSON, or a coroutine
function that reads and answers all messages by itself. The parent holds the other end of the socket; it alone sends
pickles, and reads none.
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
from collections.abc import Awaitable, Callable, Mapping

from rlflow.errors import ConfigError, describe_failure
from rlflow.processes.frames import Fields, encode, frame_of, receive

Handlers = Mapping[str, Callable[..., object]] | Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def serve(socket_fd: int, module: str, max_memory_bytes: int) -> None:
    """Load and answer until the parent closes the socket. Ends this process; 0 bytes of memory are no bound."""
    faulthandler.enable()
    if max_memory_bytes:
        # Bounds private memory that can be written to, as far as it was asked for. Unlike RLIMIT_AS it leaves out
        # mapped files and reserved addresses, of which some libraries have terabytes.
        resource.setrlimit(resource.RLIMIT_DATA, (max_memory_bytes, max_memory_bytes))
    connection = socket.socket(fileno=socket_fd)
    with contextlib.suppress(EOFError, ConnectionError):
        handlers: Handlers | None = None
        answer: Fields = {}
        payload = receive(socket_fd)
        try:
            handlers = importlib.import_module(module).load(pickle.loads(payload))
        except ConfigError as error:
            answer = {"refused": str(error)}
        except Exception as error:
            answer = {"broken": describe_failure(error)}
        connection.sendall(frame_of(encode(answer)))
        if isinstance(handlers, Mapping):
            _answer_in_turn(connection, handlers)
        elif handlers is not None:
            loop = asyncio.new_event_loop()
            streams = loop.run_until_complete(asyncio.open_unix_connection(sock=connection))
            loop.run_until_complete(handlers(*streams))
    os._exit(0)  # nobody waits for threads or tasks that hang


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
