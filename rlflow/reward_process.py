"""The process in which a reward function runs: `python -m rlflow.reward_process REQUESTS_FD LIFE_FD`.

Requests and answers are frames (4 bytes of length, then the content) on a socket that only the parent holds. The first
frame holds the functions, the others are JSON. The parent kills this process's whole group when a request overruns.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlflow.reward_call import ChosenReward

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

    rewards = receive(connection)
    if rewards is None:
        return
    try:
        score = _scorer(rewards)
    except ConfigError as error:
        send(connection, json.dumps({"error": str(error)}).encode())
        return
    send(connection, b"{}")
    process = os.getpid()
    while (request := receive(connection)) is not None:
        answer = score(json.loads(request))
        if os.getpid() != process:
            os._exit(1)  # a function forked: a second answer would be taken for that of the next request
        send(connection, json.dumps(answer).encode())


def _scorer(rewards_frame: bytes) -> Callable[[dict[str, Any]], Answer]:
    """Answers one request: fields of the Transcript -> fields of the Verdict.

    Raises:
        ConfigError: a function cannot be loaded or has no accepted shape.
    """
    import asyncio
    import dataclasses

    from rlflow.reward_score import Scoring
    from rlflow.types import EpisodeEnd, Task, Transcript

    chosen, timeout_s = _load(rewards_frame)
    scoring = Scoring(chosen, timeout_s)
    runner = asyncio.Runner()

    def score(request: dict[str, Any]) -> Answer:
        task = request["task"]
        transcript = Transcript(
            task=Task(**{**task, "prompt": tuple(task["prompt"])}),
            prompt=tuple(request["prompt"]),
            completion=tuple(request["completion"]),
            environment_reward=request["environment_reward"],
            end=EpisodeEnd(request["end"]),
            num_sampled=request["num_sampled"],
        )
        return dataclasses.asdict(runner.run(scoring.score(transcript)))

    return score


def _load(rewards_frame: bytes) -> tuple[Sequence[ChosenReward], float]:
    import pickle

    from rlflow.errors import ConfigError
    from rlflow.reward_score import describe

    try:
        return pickle.loads(rewards_frame)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"reward.function cannot be loaded in its scoring process: {describe(error)}; define it at the top level "
            "of an importable module, or give it as file.py:function"
        ) from error


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
