"""Runs in an interpreter that has verifiers, which need not have rlflow.

    python runner.py rows  '{"id": ..., "args": {...}}'   prints the rows of the environment, and ends
    python runner.py serve '{"id": ..., "args": {...}}'   plays rollouts, until its standard input is closed

Each line of standard input asks for a rollout, or cancels one; each line of standard output answers. Whatever else the
environment prints goes to standard error. verifiers sets signal handlers and installs clean-up at exit: here they may.
"""

import asyncio
import contextlib
import functools
import importlib
import inspect
import json
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, TextIO

LEAVE_TIMEOUT_S = 20.0
MAX_LINE_BYTES = 64 * 2**20
CLIENT_TIMEOUT_S = 24 * 3600.0
"""The episode's own limit is shorter, and rlflow keeps it."""

_reward_errors: ContextVar[list[str]] = ContextVar("_reward_errors")


def main() -> None:
    """Errors while loading are one line {"fatal": ...}."""
    # Standard output, for this file alone.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        asked = json.loads(sys.argv[2])
        environment = _load(asked["id"], asked["args"])
        if sys.argv[1] == "rows":
            _say(answers, _rows(environment, asked["size"], asked["evaluation_size"]))
            return
    except Exception as error:
        _say(answers, {"fatal": _describe(error)})
        return
    _say(answers, {"ready": True})
    asyncio.run(_serve(environment, answers))


def _load(identifier: str, arguments: dict[str, Any]) -> Any:
    verifiers: Any = importlib.import_module("verifiers")
    if not hasattr(verifiers, "load_environment"):
        raise RuntimeError(
            f"verifiers {verifiers.__version__} has no `load_environment`; install verifiers>=0.3.1,<0.4"
        )
    environment = verifiers.load_environment(identifier, **arguments)
    if environment.requires_group_rollouts:
        raise RuntimeError(f"{identifier} scores whole groups at once; only rewards of single rollouts are supported")
    for rubric in _rubrics(environment):
        rubric.funcs[:] = [_noting_errors(function) for function in rubric.funcs]
    return environment


def _rubrics(environment: Any) -> Iterator[Any]:
    """All rubrics, those within groups included."""
    open_ones = [environment.rubric, *(each.rubric for each in getattr(environment, "envs", ()))]
    seen: set[int] = set()
    while open_ones:
        rubric = open_ones.pop()
        if id(rubric) not in seen:
            seen.add(id(rubric))
            open_ones += getattr(rubric, "rubrics", ())
            yield rubric


def _noting_errors(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same reward function; verifiers makes an exception 0.0, so it is noted before that."""

    def note(error: Exception) -> None:
        _reward_errors.get().append(f"{getattr(function, '__name__', 'reward')}: {_describe(error)}")

    @functools.wraps(function)
    async def later(*args: Any, **kwargs: Any) -> Any:
        try:
            return await function(*args, **kwargs)
        except Exception as error:
            note(error)
            raise

    @functools.wraps(function)
    def now(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            note(error)
            raise

    return later if inspect.iscoroutinefunction(function) else now


def _rows(environment: Any, size: int, evaluation_size: int) -> dict[str, Any]:
    def plain(dataset: Any) -> list[Any]:
        return [json.loads(json.dumps(dict(row), default=str)) for row in dataset]

    train = plain(environment.get_dataset(n=size))
    environment.build_eval_dataset()
    has_own = environment.eval_dataset is not None
    return {"train": train, "eval": plain(environment.get_eval_dataset(n=evaluation_size)) if has_own else None}


async def _serve(environment: Any, answers: TextIO) -> None:
    reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    running: dict[int, asyncio.Task[None]] = {}

    async def answer(request: dict[str, Any]) -> None:
        try:
            outcome = await _rollout(environment, request)
        except Exception as error:
            outcome = {"error": _describe(error)}
        _say(answers, {"id": request["id"], **outcome})

    while line := await reader.readline():
        request = json.loads(line)
        if "cancel" in request:
            if (task := running.get(request["cancel"])) is not None:
                task.cancel()
            continue
        task = asyncio.create_task(answer(request))
        running[request["id"]] = task
        task.add_done_callback(lambda _, number=request["id"]: running.pop(number, None))
    # Nobody listens any more: end what runs, and the process, come what may.
    watchdog = threading.Timer(LEAVE_TIMEOUT_S, os._exit, args=(1,))
    watchdog.daemon = True
    watchdog.start()
    left = list(running.values())
    for task in left:
        task.cancel()
    if left:
        await asyncio.wait(left)


async def _rollout(environment: Any, request: dict[str, Any]) -> dict[str, Any]:
    errors: list[str] = []
    _reward_errors.set(errors)
    clients: Any = importlib.import_module("verifiers.clients")
    types: Any = importlib.import_module("verifiers.types")
    # The variable is not set, so that no key of the user's goes to the endpoint. No request is tried twice, because
    # each try would be another reply of the episode.
    config = types.ClientConfig(
        api_base_url=request["base_url"], api_key_var="RLFLOW_NO_KEY", max_retries=0, timeout=CLIENT_TIMEOUT_S
    )
    client = clients.resolve_client(config)
    try:
        output = await environment.run_rollout(
            input=request["row"], client=client, model=request["model"], sampling_args={}
        )
    finally:
        with contextlib.suppress(AttributeError):
            await client.close()
    if output.get("error"):
        return {"error": f"the rollout failed: {output['error']}"[:2000]}
    if errors:
        return {"error": f"the rubric failed: {'; '.join(errors)}"}
    metrics = {name: float(value) for name, value in (output.get("metrics") or {}).items() if value is not None}
    return {"reward": float(output["reward"]), "metrics": metrics}


def _say(answers: TextIO, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


def _describe(error: Exception) -> str:
    cause = error.__cause__
    behind = f" (from {type(cause).__name__}: {cause})" if cause is not None else ""
    where = traceback.extract_tb(error.__traceback__)
    place = f" at {os.path.basename(where[-1].filename)}:{where[-1].lineno}" if where else ""
    return f"{type(error).__name__}: {error}{behind}{place}"


if __name__ == "__main__":
    main()
