"""The process in which a reward function runs: `python -m rlflow.reward_process REQUESTS_FD LIFE_FD`.

Requests and answers are frames (4 bytes of length, then the content) on a socket that only the parent holds. The first
frame is the function, the others are JSON. The parent kills this process's whole group when a request overruns.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable

Answer = dict[str, object]


def main(requests_fd: int, life_fd: int) -> None:
    """Answer requests until the parent closes the socket."""
    _die_with_parent(requests_fd, life_fd)
    for descriptor in (requests_fd, life_fd):
        os.set_inheritable(descriptor, False)
    with socket.socket(fileno=requests_fd) as connection:
        _serve(connection)
    os.killpg(0, signal.SIGKILL)


def _die_with_parent(requests_fd: int, life_fd: int) -> None:
    """Start a small process in the same group that kills the group when the parent is gone.

    A process of its own, because user code may hold the interpreter's lock forever, and may have started children.
    """
    if os.fork() != 0:
        return
    os.close(requests_fd)
    os.read(life_fd, 1)
    os.killpg(0, signal.SIGKILL)


def _serve(connection: socket.socket) -> None:
    import json

    from rlflow.errors import ConfigError

    function = receive(connection)
    if function is None:
        return
    try:
        score = _scorer(function)
    except ConfigError as error:
        send(connection, json.dumps({"error": str(error)}).encode())
        return
    send(connection, b"{}")
    while (request := receive(connection)) is not None:
        send(connection, json.dumps(score(json.loads(request))).encode())


def _scorer(function_frame: bytes) -> Callable[[dict[str, object]], Answer]:
    """Answers one request: {"task": fields of the Task, "text": the reply} -> fields of the Verdict.

    Raises:
        ConfigError: the function cannot be loaded or has no accepted shape.
    """
    import asyncio
    import dataclasses
    import inspect

    from rlflow.reward_call import call, shape_of, verdict_of
    from rlflow.types import EpisodeEnd, Task, Verdict

    function = _load(function_frame)
    shape = shape_of(function)
    runner = asyncio.Runner()

    async def finish(answer: object) -> object:
        return await answer if inspect.isawaitable(answer) else answer

    def score(request: dict[str, object]) -> Answer:
        fields = request["task"]
        assert isinstance(fields, dict) and isinstance(request["text"], str)
        task = Task(**{**fields, "prompt": tuple(fields["prompt"])})
        try:
            answer = call(function, shape, task, request["text"])
            verdict = verdict_of(runner.run(finish(answer)) if inspect.isawaitable(answer) else answer, shape)
        except BaseException as error:  # SystemExit and time-outs of scoring libraries are not of Exception
            verdict = Verdict(reward=None, end=EpisodeEnd.REWARD_ERROR, detail=_describe(error))
        return dataclasses.asdict(verdict)

    return score


def _load(function_frame: bytes) -> Callable[..., object]:
    import pickle

    from rlflow.errors import ConfigError
    from rlflow.plugins import load_object

    try:
        function = pickle.loads(function_frame)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"reward.function cannot be loaded in its scoring process: {_describe(error)}; define it at the top level "
            "of an importable module, or give it as file.py:function"
        ) from error
    if isinstance(function, str):
        function = load_object(function)
    if not callable(function):
        raise ConfigError(f"reward.function must be a function; got {type(function).__name__}")
    return function


def _describe(error: BaseException) -> str:
    """Type, message and place of an error."""
    import traceback

    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    message = str(error)
    return f"{type(error).__name__}: {message[:500]}{place}"


def send(connection: socket.socket, content: bytes) -> None:
    connection.sendall(len(content).to_bytes(4, "big") + content)


def receive(connection: socket.socket) -> bytes | None:
    """The next frame, or None when the parent closed the socket."""
    header = _receive_exactly(connection, 4)
    return None if header is None else _receive_exactly(connection, int.from_bytes(header, "big"))


def _receive_exactly(connection: socket.socket, count: int) -> bytes | None:
    parts: list[bytes] = []
    while count:
        part = connection.recv(count)
        if not part:
            return None
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
