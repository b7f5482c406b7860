"""What a process of `libraries` is asked, and how it answers: one question comes, an answer for each topic goes.

Both are frames of JSON (`rlflow.processes.frames`): a Question -> [topic, null | {"found": ...} | {"problem": ...}] ...
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, TypedDict

from rlflow.config import Config
from rlflow.errors import ConfigError, describe_failure
from rlflow.processes.frames import frame_of
from rlflow.tools.doctor.facts import Problem

Probe = Callable[[], Any]
"""Returns a data class, None where all is fine and there is no more to say, or a Problem; or raises."""


class Question(TypedDict):
    config: dict[str, Any]
    """As `rundir.plain` writes it."""
    is_run: bool
    """Whether these are the settings of a run, rather than none in particular."""
    topics: list[str]
    """In the order in which they are tried."""
    environment: dict[str, str]
    """What `Child` gives to no process, and this one needs: the keys of the Ray cluster that it joins."""


def topics_of(config: Config, *, is_run: bool, computes: bool) -> list[str]:
    """`is_run`: whether the settings are those of a run; `computes`: whether engines or trainers may be on this
    machine."""
    topics = {
        "torch": computes,
        "vllm": computes,
        "size": is_run,
        "model": is_run,
        "reward_model": is_run and config.reward.model is not None,
        "engine": is_run and computes,
        "environment": is_run,
    }
    return [topic for topic, is_wanted in topics.items() if is_wanted]


def _config_of(question: Question) -> Config:
    from omegaconf import OmegaConf

    config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), question["config"]))
    assert isinstance(config, Config)
    return config


def serve(socket_fd: int, probes: Callable[[Config, bool], Mapping[str, Probe]]) -> None:
    """Answer one question, and end this process with all that it has started."""
    # The doctor downloads nothing.
    os.environ.update(HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR", TOKENIZERS_PARALLELISM="false")
    _silence()
    with socket.socket(fileno=socket_fd) as connection:
        question: Question = json.loads(_read_frame(connection))
        os.environ.update(question["environment"])
        by_topic = probes(_config_of(question), question["is_run"])
        for topic in question["topics"]:
            connection.sendall(frame_of(json.dumps([topic, _answer(by_topic[topic])]).encode()))
    os._exit(0)  # nobody waits for threads of a library


def _silence() -> None:
    """What libraries print would come between the doctor's lines."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


def _read_frame(connection: socket.socket) -> bytes:
    with connection.makefile("rb") as stream:
        return stream.read(int.from_bytes(stream.read(4), "big"))


def _answer(probe: Probe) -> dict[str, Any] | None:
    try:
        found = probe()
    except ConfigError as error:
        found = Problem(text=str(error), is_setting=True)
    except Exception as error:  # whatever a library raises is the answer
        found = Problem(text=describe_failure(error))
    if found is None:
        return None
    return {"problem" if isinstance(found, Problem) else "found": asdict(found)}
