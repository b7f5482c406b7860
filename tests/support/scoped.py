"""Environments that hold scopes of anyio from `reset` to `close`, as clients of MCP do."""

from __future__ import annotations

import asyncio
import contextvars
from typing import Any

import anyio
import anyio.abc

from rlflow.envs.base import Environment, Prompt, Step
from rlflow.types import Message, Task

_player: contextvars.ContextVar[str] = contextvars.ContextVar("_player")


def task_of(step: str = "", close: str = "", file: object = None) -> Task:
    data: Any = {"step": step, "close": close, "file": str(file)}
    return Task(id="t", prompt=(Message(role="user", content="go"),), data=data)


class Scoped(Environment):
    """Enters a cancel scope and a task group in `reset`, and leaves both in `close`."""

    async def reset(self, task: Task) -> Prompt:
        self.task = task
        self.tasks = [asyncio.current_task()]
        self.scope = anyio.CancelScope().__enter__()
        self.group: anyio.abc.TaskGroup = await anyio.create_task_group().__aenter__()
        self.group.start_soon(anyio.sleep_forever)
        _player.set(task.id)
        return Prompt(messages=list(task.prompt))

    async def step(self, reply: Message) -> Step:
        self.tasks.append(asyncio.current_task())
        match self.task.data["step"]:
            case "hang":
                await anyio.sleep_forever()
            case "hang in a scope":
                with anyio.CancelScope():
                    await anyio.sleep_forever()
            case "refuse for a while":
                for _ in range(3):
                    try:
                        await asyncio.sleep(600)
                    except asyncio.CancelledError:
                        await asyncio.sleep(0.1)
                        break
            case "break the group":
                self.group.start_soon(_break)
                return Step()
        return Step(done=True, messages=[Message(role="user", content=_player.get("nobody"))])

    async def close(self) -> None:
        """Notes on disk whether all went as in one task, and for how it went the error, if there was one."""
        self.tasks.append(asyncio.current_task())
        noted = "left"
        try:
            self.group.cancel_scope.cancel()
            await self.group.__aexit__(None, None, None)
            self.scope.__exit__(None, None, None)
            await asyncio.sleep(0)
        except BaseException as error:
            noted = repr(error)
            raise
        finally:
            with open(str(self.task.data["file"]), "a") as file:
                file.write(f"{len(set(self.tasks))} task, {noted}\n")


async def _break() -> None:
    raise ValueError("the connection broke")
