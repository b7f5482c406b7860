"""An episode is one run of a program, a command or a function. What it asks the endpoint for is trained on."""

import asyncio
import dataclasses
import inspect
import json
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rlflow.envs.agent.command import run_command
from rlflow.envs.agent.data import task_source
from rlflow.envs.base import Endpoint, EnvironmentSpec, Program, Result
from rlflow.envs.callables import load_callable
from rlflow.errors import ConfigError, EnvironmentFailure
from rlflow.types import Task

SHOWN_CHARS = 2000
"""How much of the end of a failed command's output is shown."""
_ARGUMENTS = ("task", "base_url", "api_key", "model")


def load(
    tasks: str,
    command: str | Sequence[str] | None = None,
    function: str | None = None,
    folder: str = ".",
    leases: Sequence[str] = (),
    system_prompt: str = "",
    evaluation_tasks: str | None = None,
) -> EnvironmentSpec:
    """A program that plays an episode by itself: give `command` or `function`.

    tasks: rows, as the `path` of the environment `dataset`; or a function that returns Tasks, as package.module:name or
        file.py:name.
    command: what to run, as a list, or as one line that is split as a shell would, but not run by one.
    function: package.module:name or file.py:name of `run(task, base_url, api_key, model)`, async or not.
    folder: where the command runs; relative to the current directory.
    leases: resources that one run of the command at a time may use, such as the addresses of sites.
    system_prompt: put before each prompt of the rows that has none of its own.
    evaluation_tasks: as `tasks`, for `eval.every`.
    """
    if (command is None) == (function is None):
        found = "both" if command is not None else "none"
        raise ConfigError(f"env.args of agent need one of `command` and `function`; got {found}")
    if function is not None:
        for name, value in (("folder", folder != "." and folder), ("leases", leases)):
            if value:
                raise ConfigError(f"env.args.{name}={value} has no effect with env.args.function; leave it out")
        _load_function(function)
        build: Callable[[], Program] = partial(FunctionProgram, function)
    else:
        assert command is not None
        words = tuple(shlex.split(command)) if isinstance(command, str) else tuple(map(str, command))
        build = partial(CommandProgram, words, _checked_folder(folder, words))
    evaluation = None
    if evaluation_tasks is not None:
        evaluation = task_source("evaluation_tasks", evaluation_tasks, system_prompt)
    return EnvironmentSpec(
        tasks=task_source("tasks", tasks, system_prompt),
        build=build,
        evaluation_tasks=evaluation,
        leases=tuple(map(str, leases)),
    )


class CommandProgram(Program):
    """Runs a command. In its words these are filled in, and anything else in braces is left as it is:

    {prompt}     the last message of the task's prompt
    {task_file}  a file with the task as JSON, which is also the command's standard input
    {model}      to name in requests
    {lease}      which of the leases is this episode's, which is also in RLFLOW_LEASE
    {python}     the interpreter that runs rlflow

    The endpoint is in OPENAI_BASE_URL only, because its address is a secret and every user of a machine sees command
    lines.
    """

    def __init__(self, command: Sequence[str], folder: str, lease: str = "") -> None:
        self._command = command
        self._folder = folder
        self._lease = lease

    async def run(self, task: Task, endpoint: Endpoint) -> Result:
        """Raises EnvironmentFailure when the command does not exit with code 0."""
        scratch = Path(tempfile.mkdtemp(prefix="rlflow-agent-"))
        try:
            file = scratch / "task.json"
            file.write_text(json.dumps(dataclasses.asdict(task)))
            with file.open("rb") as stdin:
                variables = environment_of(os.environ, endpoint, str(scratch))
                ended = await run_command(
                    filled(self._command, task, endpoint, task_file=str(file), lease=self._lease),
                    stdin=stdin,
                    folder=self._folder,
                    environment={**variables, "RLFLOW_SEED": str(self.seed), "RLFLOW_LEASE": self._lease},
                )
        finally:
            # Shielded from a second cancellation: the folder goes in any case.
            await asyncio.shield(asyncio.to_thread(shutil.rmtree, scratch, ignore_errors=True))
        if ended.code == 0:
            return printed_result(ended.output)
        last_words = " and wrote nothing"
        for name, text in (("standard output", ended.output), ("standard error", ended.errors)):
            if text.strip():
                last_words = f"; its {name} ends with:\n{text.strip()[-SHOWN_CHARS:]}"
        raise EnvironmentFailure(f"run: {shlex.join(self._command)} {ended.describe()}{last_words}")


class FunctionProgram(Program):
    """Calls a function. If it is not async, it runs in a thread, which only the function itself can end."""

    def __init__(self, path: str) -> None:
        self._function = _load_function(path)

    async def run(self, task: Task, endpoint: Endpoint) -> Result:
        arguments = {"task": task, "base_url": endpoint.base_url, "api_key": endpoint.api_key, "model": endpoint.model}
        if inspect.iscoroutinefunction(self._function):
            return result_of(await self._function(**arguments))
        return result_of(await asyncio.to_thread(_without_exit, self._function, arguments))


def filled(command: Sequence[str], task: Task, endpoint: Endpoint, *, task_file: str, lease: str) -> list[str]:
    """The words of a command, with what they name filled in."""
    values = {
        "{prompt}": task.prompt[-1]["content"],
        "{task_file}": task_file,
        "{model}": endpoint.model,
        "{lease}": lease,
        "{python}": sys.executable,
    }
    return [_replaced(word, values) for word in command]


def _replaced(word: str, values: Mapping[str, str]) -> str:
    """The word with all names replaced in one pass, so that a prompt that reads "{model}" stays as it is."""
    for name, value in values.items():
        before, found, after = word.partition(name)
        if found:
            return _replaced(before, values) + value + _replaced(after, values)
    return word


def environment_of(inherited: Mapping[str, str], endpoint: Endpoint, scratch: str) -> dict[str, str]:
    """The environment variables of a command: the address of the policy, and a temporary folder of its own."""
    # A proxy for the outer world does not reach this machine's loopback.
    direct = ",".join(filter(None, (inherited.get("NO_PROXY") or inherited.get("no_proxy"), "127.0.0.1")))
    return {
        **inherited,
        "OPENAI_BASE_URL": endpoint.base_url,
        "OPENAI_API_BASE": endpoint.base_url,
        "OPENAI_API_KEY": endpoint.api_key,
        "OPENAI_MODEL": endpoint.model,
        "ANTHROPIC_BASE_URL": endpoint.root_url,
        "ANTHROPIC_API_KEY": endpoint.api_key,
        "ANTHROPIC_MODEL": endpoint.model,
        "NO_PROXY": direct,
        "no_proxy": direct,
        "TMPDIR": scratch,
    }


def _without_exit(function: Callable[..., Any], arguments: Mapping[str, object]) -> Any:
    """sys.exit of a program ends its episode only."""
    try:
        return function(**arguments)
    except SystemExit as error:
        raise EnvironmentFailure(f"run: SystemExit: {error}") from error


def _load_function(path: str) -> Callable[..., Any]:
    function = load_callable("function", path)
    try:
        inspect.signature(function).bind(**dict.fromkeys(_ARGUMENTS))
    except TypeError as error:
        raise ConfigError(f"env.args.function={path} must take ({', '.join(_ARGUMENTS)}): {error}") from error
    return function


def _checked_folder(folder: str, command: Sequence[str]) -> str:
    """The absolute folder, in which the command's program must be found."""
    path = Path(folder).expanduser().resolve()
    if not path.is_dir():
        raise ConfigError(f"env.args.folder={folder} is not a folder (from {Path.cwd()})")
    if not command:
        raise ConfigError("env.args.command is empty; give the program and its arguments")
    if any("{base_url}" in word for word in command):
        raise ConfigError(
            "env.args.command has {base_url}, a secret that every user of the machine would see in the command line; "
            "leave it out, and let the program read the environment variable OPENAI_BASE_URL"
        )
    program = command[0]
    if program != "{python}" and shutil.which(str(path / program) if "/" in program else program) is None:
        raise ConfigError(f"env.args.command: there is no program {program!r} to run, in {path} or on the PATH")
    return str(path)


def printed_result(output: str) -> Result:
    """The result in a program's last line, {"reward": ..., "metrics": {...}}; without such a line there is no verdict.

    Only the very last line counts, because earlier ones may be the model's own words.
    """
    lines = output.rstrip().splitlines()
    try:
        found = json.loads(lines[-1]) if lines else None
    except (ValueError, RecursionError):
        return Result()
    return result_of(found) if isinstance(found, dict) and "reward" in found else Result()


def result_of(value: object) -> Result:
    """The result that a function returned: a Result, a dict of its fields, a number, or None for no verdict."""
    if isinstance(value, Result):
        return value
    if value is None or isinstance(value, int | float):
        return Result(reward=value)
    if not isinstance(value, dict) or not set(value) <= {"reward", "metrics"}:
        raise EnvironmentFailure(
            f'run: expected {{"reward": ..., "metrics": {{...}}}}, a number or None; got {value!r:.200}'
        )
    metrics = value.get("metrics") or {}
    if not isinstance(metrics, dict):
        raise EnvironmentFailure(f"run: `metrics` must be an object of numbers; got {metrics!r:.200}")
    return Result(reward=value.get("reward"), metrics=metrics)
