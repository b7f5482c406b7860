"""A server of openenv-core, counting down, on loopback: `python openenv_server.py PORT`.

Its actions are texts; below /fields they are several fields, and below /tools they are calls of a tool.
"""

from __future__ import annotations

import os
import sys
import time

import uvicorn
from fastmcp import FastMCP  # pyright: ignore
from openenv.core.env_server.http_server import create_fastapi_app  # pyright: ignore
from openenv.core.env_server.interfaces import Environment  # pyright: ignore
from openenv.core.env_server.mcp_environment import MCPEnvironment  # pyright: ignore
from openenv.core.env_server.mcp_types import CallToolAction  # pyright: ignore
from openenv.core.env_server.types import Action, Observation, State  # pyright: ignore


class Text(Action):
    message: str


class Fields(Action):
    by: int
    loudly: bool = False
    why: str = ""


class Seen(Observation):
    text: str
    left: int | None = None


class Countdown(Environment):
    """From 3 + seed % 3 to 0; each step earns 0.25."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.left = 0

    def reset(self, seed: int = 0, extra: int = 0) -> Seen:
        self.left = 3 + seed % 3 + extra
        return Seen(text=f"{self.left} left.")

    def step(self, action: Text | Fields) -> Seen:
        word = action.message if isinstance(action, Text) else action.why
        if word == "die":
            os._exit(3)
        if word == "sleep":
            time.sleep(30)
        if word == "fail":
            raise RuntimeError("the world broke")
        self.left -= 1 if isinstance(action, Text) else action.by
        return Seen(text=f"{self.left} left.", done=self.left <= 0, reward=0.25)

    @property
    def state(self) -> State:
        return State()


class Library(MCPEnvironment):
    """One tool, no reward."""

    def __init__(self) -> None:
        server = FastMCP("library")

        @server.tool()
        def look_up(word: str) -> str:
            """Look a word up."""
            return f"{word} is a word"

        super().__init__(server)

    def reset(self, seed: int = 0) -> Seen:
        return Seen(text="A library.")

    def _step_impl(self, action: Action, timeout_s: float | None = None, **kwargs: object) -> Seen:
        raise RuntimeError(f"no such action: {action}")

    @property
    def state(self) -> State:
        return State()


if __name__ == "__main__":
    app = create_fastapi_app(Countdown, Text, Seen, max_concurrent_envs=4)
    app.mount("/fields", create_fastapi_app(Countdown, Fields, Seen))
    app.mount("/tools", create_fastapi_app(Library, CallToolAction, Seen))
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
