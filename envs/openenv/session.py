"""One session with an OpenEnv server, over its WebSocket.

    {"type": "reset" | "step", "data": {...}} -> {"type": "observation", "data": {observation, reward, done}}
                                              -> {"type": "error", "data": {code, message}}

The protocol is that of openenv-core, which need not be installed here. Its plain HTTP routes make a new environment for
each request, so they are of no use to an episode.
"""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, build_opener

import aiohttp

from rlflow.errors import ConfigError, first_line
from rlflow.types import Json

MAX_MESSAGE_BYTES = 16 * 2**20
SCHEMA_TIMEOUT_S = 20.0
CLOSE_TIMEOUT_S = 10.0


class OpenEnvError(Exception):
    """The server failed; the episode has no verdict."""


class ServerLost(OpenEnvError):
    """No connection, or it broke."""


class ServerFull(OpenEnvError):
    """The server has as many sessions as it allows."""


class ServerSlow(OpenEnvError):
    """No answer in time."""


class ActionRefused(ValueError):
    """The action does not have the form that the server wants; the message is for the model."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Answer:
    observation: dict[str, Any]
    reward: float | None
    done: bool


class Session:
    """Opened with `reset`; `close` waits until the server has given its place to others."""

    def __init__(self, url: str, message_timeout_s: float) -> None:
        self._url = url
        self._timeout_s = message_timeout_s
        self._http: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._is_lost = False
        """Whether the server did not answer: there is nobody to take leave of."""

    async def reset(self, data: Mapping[str, Json]) -> Answer:
        """Raises OpenEnvError."""
        self._http = aiohttp.ClientSession()
        parts = urlsplit(self._url)
        address = parts._replace(scheme="wss" if parts.scheme == "https" else "ws", path=f"{parts.path}/ws").geturl()
        try:
            async with asyncio.timeout(self._timeout_s):
                self._socket = await self._http.ws_connect(address, max_msg_size=MAX_MESSAGE_BYTES)
        except TimeoutError as error:
            raise ServerSlow(f"{self._url} took no connection within {self._timeout_s:g} s") from error
        except aiohttp.ClientError as error:
            raise ServerLost(f"no connection to {self._url}: {first_line(error)}") from error
        return await self._ask("reset", data)

    async def step(self, action: Mapping[str, Json]) -> Answer:
        """Raises OpenEnvError, and ActionRefused for what is the model's doing."""
        return await self._ask("step", action)

    async def close(self) -> None:
        socket = self._socket
        try:
            if socket is not None and not socket.closed and not self._is_lost:
                # The server frees the session before it closes its end, so the next episode finds a place.
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await socket.send_str(json.dumps({"type": "close"}))
                    while not socket.closed:
                        await socket.receive()
        except (TimeoutError, ConnectionError, aiohttp.ClientError):
            assert socket is not None
            await socket.close()
        finally:
            if self._http is not None:
                await self._http.close()

    async def _ask(self, kind: str, data: Mapping[str, Json]) -> Answer:
        assert self._socket is not None, "reset comes first"
        self._is_lost = True
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._socket.send_str(json.dumps({"type": kind, "data": dict(data)}))
                received = await self._socket.receive()
        except TimeoutError as error:
            limit = f"{self._timeout_s:g} s (env.args.message_timeout_s)"
            raise ServerSlow(f"{self._url} did not answer a {kind} within {limit}") from error
        except (ConnectionError, aiohttp.ClientError) as error:
            raise ServerLost(f"the connection to {self._url} broke in a {kind}: {first_line(error)}") from error
        if received.type is not aiohttp.WSMsgType.TEXT:
            detail = received.extra or received.data or received.type.name
            raise ServerLost(f"{self._url} closed the connection in a {kind}: {detail}")
        self._is_lost = False
        return _answer(self._url, kind, received.data)


def action_schema(url: str) -> dict[str, Any]:
    """JSON schema of the actions that a server takes; blocking. ConfigError when there is no server that says so."""
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
        raise ConfigError(f"env.args.url must be such as http://127.0.0.1:8000; got {url}")
    try:
        # Without the proxies of the environment, as the sessions are.
        with build_opener(ProxyHandler({})).open(f"{url}/schema", timeout=SCHEMA_TIMEOUT_S) as reply:
            schema = json.loads(reply.read(MAX_MESSAGE_BYTES))["action"]
    except (URLError, TimeoutError, ConnectionError) as error:
        raise ConfigError(f"no OpenEnv server answers at {url}/schema ({error}); start it before the run") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{url}/schema does not describe actions as OpenEnv servers do ({error!r})") from error
    if not isinstance(schema, dict):
        raise ConfigError(f"{url}/schema: `action` must be a JSON schema; got {schema!r:.80}")
    return schema


def _answer(url: str, kind: str, text: str) -> Answer:
    try:
        message = json.loads(text)
        sort, data = message["type"], message["data"]
        if sort == "error":
            raise _error(url, kind, data)
        reward = data.get("reward")
        return Answer(
            observation=dict(data["observation"]),
            reward=None if reward is None else float(reward),
            done=bool(data.get("done", False)),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, ActionRefused):
            raise
        raise OpenEnvError(f"{url} answered a {kind} with what is no observation: {text[:200]}") from error


def _error(url: str, kind: str, data: Mapping[str, Any]) -> Exception:
    code, message = data.get("code"), data.get("message")
    if code == "VALIDATION_ERROR" and kind == "step":
        problems = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in data.get("errors", ())]
        return ActionRefused("; ".join(problems) or str(message))
    if code == "CAPACITY_REACHED":
        return ServerFull(
            f"{url} has no free session ({message}); env.args.sessions must not exceed the server's "
            "max_concurrent_envs (1 unless it was started with more), and nobody else may use it"
        )
    return OpenEnvError(f"{url} failed in a {kind}: {code}: {message}")
