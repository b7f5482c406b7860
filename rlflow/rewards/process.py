"""The process in which a reward function runs: `python -m rlflow.rewards.process SOCKET_FD LIFE_FD`.

It answers one request at a time, and is killed when one overruns. The first frame holds the pickled functions, the
others are JSON. They are read outside the event loop: where a function forks, the copy's loop would take some of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

from rlflow.processes.supervisor import supervise

if TYPE_CHECKING:
    import socket

    from rlflow.rewards.call import ChosenReward

Answer = dict[str, object]


def main(socket_fd: int, life_fd: int) -> None:
    """Answer requests until the parent closes the socket."""
    supervise(life_fd, [socket_fd])
    # All else is imported after the fork, so that the supervisor stays small.
    import os
    import socket

    with socket.socket(fileno=socket_fd) as connection:
        _serve(connection)
    os._exit(0)  # nobody waits for threads that hang


def _serve(connection: socket.socket) -> None:
    import json
    import os

    from rlflow.errors import ConfigError
    from rlflow.processes.frames import frame_of

    requests = connection.makefile("rb")
    rewards = _receive(requests)
    if rewards is None:
        return
    try:
        score = _scorer(rewards)
    except ConfigError as error:
        connection.sendall(frame_of(json.dumps({"error": str(error)}).encode()))
        return
    connection.sendall(frame_of(b"{}"))
    process = os.getpid()
    while (request := _receive(requests)) is not None:
        answer = score(json.loads(request))
        if os.getpid() != process:
            os._exit(1)  # a function forked: a second answer would be taken for that of the next request
        connection.sendall(frame_of(json.dumps(answer).encode()))


def _scorer(rewards_frame: bytes) -> Callable[[dict[str, Any]], Answer]:
    """Answers one request: fields of the Transcript -> fields of the Verdict.

    Raises:
        ConfigError: a function cannot be loaded or has no accepted shape.
    """
    import asyncio
    import dataclasses

    from rlflow.rewards.score import Scoring
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
    from rlflow.rewards.score import describe

    try:
        return pickle.loads(rewards_frame)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"reward.function cannot be loaded in its scoring process: {describe(error)}; define it at the top level "
            "of an importable module, or give it as file.py:function"
        ) from error


def _receive(requests: BinaryIO) -> bytes | None:
    """The next frame's content, or None when the parent has closed the socket."""
    header = requests.read(4)
    size = int.from_bytes(header, "big")
    content = requests.read(size)
    return content if len(header) == 4 and len(content) == size else None


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
