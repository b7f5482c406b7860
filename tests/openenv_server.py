"""A server of openenv-core: counting down, on loopback. `python openenv_server.py PORT FORM` with FORM text or fields."""

from __future__ import annotations

import os
import sys
import time

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app  # pyright: ignore
from openenv.core.env_server.interfaces import Environment  # pyright: ignore
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


if __name__ == "__main__":
    port, form = int(sys.argv[1]), sys.argv[2]
    app = create_fastapi_app(Countdown, Text if form == "text" else Fields, Seen, max_concurrent_envs=4)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")
