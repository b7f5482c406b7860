"""One episode at a gateway over real HTTP, with a scripted engine."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from letters import LetterRenderer, ScriptedEngine, limits

from rlflow.envs.base import Endpoint
from rlflow.rollout.chat import Chat
from rlflow.rollout.gateway.server import Gateway
from rlflow.rollout.requests import FinishReason

USER: dict[str, Any] = {"role": "user", "content": "hi"}
ADD: dict[str, Any] = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
CALL = '<tool_call>{"name": "add",  "arguments": {"b": 2, "a": 1}}</tool_call>'


@dataclass
class Visit:
    """One episode at a gateway, and a client."""

    gateway: Gateway
    endpoint: Endpoint
    chat: Chat
    engine: ScriptedEngine
    http: aiohttp.ClientSession

    async def post(self, **fields: Any) -> tuple[int, dict[str, Any]]:
        """The status and the answer of a chat completion."""
        return await self.send("chat/completions", **{"model": "gpt-4o", "messages": [USER], **fields})

    async def send(self, path: str, **fields: Any) -> tuple[int, dict[str, Any]]:
        """The status and the answer of any request."""
        async with self.http.post(f"{self.endpoint.base_url}/{path}", json=fields) as answer:
            return answer.status, await answer.json()

    async def events(self, path: str = "chat/completions", **fields: Any) -> list[str]:
        """The lines of a stream that are not empty."""
        body = {"messages": [USER], "stream": True, **fields}
        async with self.http.post(f"{self.endpoint.base_url}/{path}", json=body) as answer:
            assert answer.headers["Content-Type"].startswith("text/event-stream")
            return [line for line in (await answer.text()).splitlines() if line]

    async def asked(self, count: int) -> None:
        """Wait until the engine was asked `count` times."""
        async with asyncio.timeout(5):
            while len(self.engine.requests) < count:
                await asyncio.sleep(0)


@asynccontextmanager
async def visiting(
    *replies: str | Exception,
    finish_reason: FinishReason = "stop",
    is_open: bool = True,
    keep_alive_s: float = 10.0,
    **changes: Any,
) -> AsyncIterator[Visit]:
    engine = ScriptedEngine(list(replies), finish_reason)
    if is_open:
        engine.is_open.set()
    chat = Chat(engine, LetterRenderer(), limits(**changes), seed=3)
    gateway = Gateway(keep_alive_s=keep_alive_s)
    await gateway.start()
    try:
        async with aiohttp.ClientSession() as http:
            yield Visit(gateway, gateway.open(chat), chat, engine, http)
    finally:
        await gateway.stop()
