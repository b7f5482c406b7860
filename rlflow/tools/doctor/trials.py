"""Runs the checks that may crash, hang or take long, in processes that can be killed.

    look -> ask -> rlflow.processes.pool -> load, attempt -> the machine and findings, as JSON

A library that crashes or hangs costs only what follows it.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pydantic import TypeAdapter

from rlflow.config import Config
from rlflow.errors import ConfigError, DeadlineError, describe_failure
from rlflow.processes.pool import CLUSTER_KEYS, Call, CallFailed, HostedCode, HostedProcess, ProcessLost, payload_of
from rlflow.runtime.derived import by_device
from rlflow.tools.doctor.findings import Finding, error, of_config_error, warning
from rlflow.tools.doctor.here import Here, look_around
from rlflow.tools.doctor.machine import Check, Needs, needs_of
from rlflow.tools.doctor.software import (
    absent_model,
    check_engine,
    check_model,
    check_ray,
    check_reward_model,
    check_sandbox,
    check_size,
    check_tasks,
    check_teacher_models,
    check_torch,
    check_vllm,
)

TRIAL_TIMEOUT_S = 180.0
"""The limit for each process. Importing vLLM takes up to a minute from a cold network disk."""


TRIALS: dict[str, tuple[str, Check]] = {
    "torch": ("torch", check_torch),
    "vllm": ("vLLM", check_vllm),
    "size": ("model", check_size),
    "model": ("model", check_model),
    "reward_model": ("reward model", check_reward_model),
    "teachers": ("teachers", check_teacher_models),
    "engine": ("engine", check_engine),
    "environment": ("tasks", check_tasks),
    "ray": ("Ray", check_ray),
}
"""Topic -> what findings about its failure are called, and the check."""


ANSWER = TypeAdapter(tuple[Here, list[Finding]])
"""The machine, with what the trial has learned about it, and the findings."""


def look(
    config: Config, run_dir: Path, environment: Mapping[str, str], *, is_run: bool, computes: bool, with_ray: bool
) -> tuple[Here, list[Finding]]:
    """This machine, and what came of every trial.

    `is_run`: whether the settings are those of a run; `computes`: whether engines or trainers may be here;
    `with_ray`: whether to start Ray, or join it. `environment` is what the processes of a run start with.
    """
    ahead = time.time() - time.monotonic()
    here = look_around(run_dir, environment, computes=computes)
    config = by_device(config, on_gpus=here.num_gpus > 0)
    here, findings = asyncio.run(_try_all(here, needs_of(config, None, is_run=is_run), with_ray=with_ray))
    here.clock_moved = time.time() - time.monotonic() - ahead
    return here, findings


async def _try_all(here: Here, needs: Needs, *, with_ray: bool) -> tuple[Here, list[Finding]]:
    """Everything at the same time, each in a process of its own."""
    topics = topics_of(needs.config, is_run=needs.is_run, computes=here.computes)
    keys = {name: os.environ[name] for name in CLUSTER_KEYS if name in os.environ}
    (here, of_libraries), (_, of_ray), of_sandbox = await asyncio.gather(
        ask(__name__, "the process that tries libraries", topics, here, needs, {}),
        ask(__name__, "the process that tries Ray", ["ray"] if with_ray else [], here, needs, keys),
        check_sandbox(needs),
    )
    return here, [*of_libraries, *of_ray, of_sandbox]


def topics_of(config: Config, *, is_run: bool, computes: bool) -> list[str]:
    """The libraries that there are to try: none for a run in pods, which this machine only hands in."""
    if config.cluster.kubernetes.image is not None:
        return []
    topics = {
        "torch": computes,
        "vllm": computes and config.rollout.engines > 0,
        "size": is_run,
        "model": is_run,
        "reward_model": is_run and config.reward.model is not None,
        "teachers": is_run and bool(config.teacher.models),
        "engine": is_run and computes and config.rollout.engines > 0,
        "environment": is_run,
    }
    return [topic for topic, is_wanted in topics.items() if is_wanted]


async def ask(
    module: str, name: str, topics: Sequence[str], here: Here, needs: Needs, variables: dict[str, str]
) -> tuple[Here, list[Finding]]:
    """The machine, with what was learned about it, and the findings of all topics.

    If the process ends early, the first topic without an answer is the one it worked on, and the others were not tried.
    """
    if not topics:
        return here, []
    payload = payload_of((here, needs, variables), "the settings", name, "")
    process = HostedProcess(HostedCode(module=module, payload=payload, process=name, what="what it tries", cure=""))
    findings: list[Finding] = []
    waiting = list(topics)
    problem = ""
    try:
        async with asyncio.timeout(TRIAL_TIMEOUT_S):
            await process.start()
            try:
                while waiting:
                    here, found = await process.answer_to(Call("attempt", ANSWER.validate_python, topic=waiting[0]))
                    findings += found
                    waiting.pop(0)
            finally:
                process.kill("it has answered")
                await process.retire()
    except TimeoutError:
        problem = f"{name} did not answer within {TRIAL_TIMEOUT_S:g} s"
    except (ConfigError, DeadlineError, CallFailed, ProcessLost) as failed:
        problem = str(failed)
    findings += [failure(topic, here, problem) for topic in waiting[:1]]
    return here, findings + [untried(topic) for topic in waiting[1:]]


def load(content: tuple[Here, Needs, dict[str, str]]) -> dict[str, Callable[..., object]]:
    """What the process does: called in it by `rlflow.processes.host`.

    `content` ends with the variables that no such process inherits and this one needs: keys of the Ray cluster.
    """
    here, needs, variables = content
    # The doctor downloads nothing.
    os.environ.update(variables, HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR", TOKENIZERS_PARALLELISM="false")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):  # what libraries print would come between the doctor's lines
        os.dup2(nowhere, descriptor)

    def answer(topic: str) -> object:
        findings = attempt(topic, here, needs, TRIALS[topic][1])
        return ANSWER.dump_python((here, findings), mode="json")

    return {"attempt": answer}


def attempt(topic: str, here: Here, needs: Needs, check: Check) -> list[Finding]:
    """What the check finds, with a finding at the end for the error that it raises."""
    findings: list[Finding] = []
    try:
        findings.extend(check(here, needs))
    except ConfigError as problem:
        from huggingface_hub.errors import LocalEntryNotFoundError

        name, config = TRIALS[topic][0], needs.config
        path = config.reward.model if topic == "reward_model" else config.model.path
        if isinstance(path, str) and name.endswith("model") and isinstance(problem.__cause__, LocalEntryNotFoundError):
            findings.append(absent_model(name, path, here))
        else:
            findings.append(of_config_error(name, problem))
    except Exception as problem:  # whatever a library raises is the answer
        findings.append(failure(topic, here, describe_failure(problem)))
    return findings


def failure(topic: str, here: Here, text: str) -> Finding:
    """Stands for a trial that raised an error, or whose process ended."""
    name, install = TRIALS[topic][0], f"pip install rlflow[{here.hardware_extra}]"
    if topic == "torch":
        return error(name, f"it cannot be imported: {text}", install)
    if topic == "vllm":
        return error(name, f"{here.vllm} cannot be imported: {text}", f"{install}, in a fresh environment")
    if topic == "ray":
        logs = "look at raylet.err and gcs_server.err in session_latest/logs of Ray's directory"
        return error(name, f"it does not start: {text}", logs)
    return error(name, text, f"`rlflow train` with RLFLOW_TRACEBACK=1 shows where; {name} comes from the settings")


def untried(topic: str) -> Finding:
    text = "not tried: the process had ended before"
    return warning(TRIALS[topic][0], text, "mend what is wrong above, and look again")
