"""Environments that do what their task says, for good or ill; in a module so that another process can import them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sqlite3
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np

from rlflow.envs.base import Endpoint, Environment, Program, Prompt, Result, Step
from rlflow.types import Json, Message, Task


def task_of(step: str = "", *, reset: str = "", close: str = "", file: Path | None = None) -> Task:
    """What each method does besides its work, or instead of it."""
    data: dict[str, Json] = {"reset": reset, "step": step, "close": close, "file": str(file)}
    return Task(id=f"t/{step}", prompt=(Message(role="user", content="2+2"),), answer="4", data=data)


def reply_of(text: str = "4") -> Message:
    return Message(role="assistant", content=text)


class Obedient(Environment):
    """One turn."""

    def __init__(self, resource: str) -> None:
        self.resource = resource
        self.task = task_of()

    async def reset(self, task: Task) -> Prompt:
        self.task = task
        await self._do("reset")
        return Prompt(messages=list(task.prompt), tools=[{"type": "function", "function": {"name": "f"}}])

    async def step(self, reply: Message) -> Step:
        found = await self._do("step")
        if found is not None:
            return found
        metrics = {"seed": float(self.seed), "pid": float(os.getpid())}
        said = Message(role="user", content=f"{reply['content']} {self.resource}")
        return Step(done=True, reward=np.float32(0.5), metrics=metrics, messages=[said])  # pyright: ignore[reportArgumentType]

    async def close(self) -> None:
        await self._do("close")

    async def _do(self, method: str) -> Step | None:
        what = self.task.data[method]
        if what == "ask":
            heard = await self.ask([Message(role="user", content="hello")], agent="user")
            return Step(done=True, messages=[Message(role="user", content=heard["content"])])
        return ANSWERS[what]() if what in ANSWERS else await act(str(what), str(self.task.data["file"]))


class Plain(Environment):
    """Its methods are not async, and it holds what belongs to one thread."""

    meeting = threading.Barrier(2)

    def reset(self, task: Task) -> Prompt:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.notes = sqlite3.connect(":memory:")
        self.notes.execute("create table replies (reply text)")
        return Prompt(messages=list(task.prompt))

    def step(self, reply: Message) -> Step:  # pyright: ignore[reportIncompatibleMethodOverride]
        if reply["content"] == "hang":
            threading.Event().wait()
        self.meeting.wait(20)
        self.notes.execute("insert into replies values (?)", [reply["content"]])
        (content,) = self.notes.execute("select reply from replies").fetchone()
        return Step(messages=[Message(role="user", content=content)], done=True, metrics={"pid": float(os.getpid())})

    def close(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.notes.close()


class PlainAgent(Program):
    def run(self, task: Task, endpoint: Endpoint) -> Result:  # pyright: ignore[reportIncompatibleMethodOverride]
        return Result(reward=0.25)


class Agent(Program):
    async def run(self, task: Task, endpoint: Endpoint) -> Result:
        return Result(reward=1.0, metrics={"turns": float(len(endpoint.base_url))})


def build(kind: str = "environment") -> Environment | Program:
    match kind:
        case "program":
            return Agent()
        case "plain program":
            return PlainAgent()
        case "plain":
            return Plain()
        case "raises":
            raise OSError("no licence")
    return Obedient(kind)


ANSWERS: dict[Any, Callable[[], Any]] = {
    "huge": lambda: Step(messages=[Message(role="user", content="x" * (17 << 20))]),
    "nan": lambda: Step(done=True, reward=float("nan")),
    "bad metric": lambda: Step(done=True, metrics={"score": float("inf")}),
    "bad message": lambda: Step(messages=cast(Any, [{"role": "user"}])),
    "bad json": lambda: Step(metrics=cast(Any, {"score": object()})),
    "nothing": lambda: 0,
}


async def act(what: str, file: str) -> None:
    match what:
        case "hang":
            await asyncio.Event().wait()
        case "refuse to end":
            while True:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.Event().wait()
        case "block":
            time.sleep(600)
        case "hang in a thread":
            await asyncio.to_thread(time.sleep, 600)
        case "raise":
            raise ValueError("by design")
        case "raise in a library":
            json.loads("nonsense")
        case "exit":
            sys.exit("early")
        case "interrupt":
            raise KeyboardInterrupt
        case "cancel itself":
            raise asyncio.CancelledError
        case "die":
            os._exit(3)
        case "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "run out of memory":  # as the kernel ends a process then
            os.kill(os.getpid(), signal.SIGKILL)
        case "memory bomb":
            held: list[object] = []
            while True:
                held.append(np.zeros(1 << 24))  # asks for memory that it does not touch, to be quick
        case "fork bomb":
            for _ in range(5):  # 32 processes
                os.fork()
            with open(file, "a") as pids:
                pids.write(f"{os.getpid()}\n")
            time.sleep(600)
        case "daemon":  # it leaves its group and its parent
            sleep = f"import os, time; open({file!r}, 'a').write(f'{{os.getpid()}}\\n'); time.sleep(600)"
            start = (
                f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {sleep!r}], start_new_session=True)"
            )
            await (await asyncio.create_subprocess_exec(sys.executable, "-c", start)).wait()
        case "print":
            print("noise on standard output", flush=True)
        case "print without end":
            while True:
                print("x" * 65536)
                await asyncio.sleep(0)
