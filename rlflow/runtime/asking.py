"""Questions to a server that speaks JSON over HTTP, repeated while it is busy or away, until a deadline."""

from __future__ import annotations

import asyncio
import os
import random
import time
from typing import TYPE_CHECKING, Any

from rlflow.errors import ConfigError

if TYPE_CHECKING:
    import aiohttp

FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 8.0
_BUSY = (408, 409, 425, 429)


class NoAnswer(Exception):
    """The server cannot be reached, or is busy, until the deadline."""


class Refused(NoAnswer):
    """The server refuses the question, or says more than it may; another try would end the same way."""


class _Busy(Exception):
    """Worth another try."""


def key_headers(variable: str | None, setting: str) -> dict[str, str]:
    """The headers of a request whose key is in this environment variable, which `setting` names; none without one.

    Raises ConfigError if the variable is not set.
    """
    if variable is None:
        return {}
    if not (key := os.environ.get(variable)):
        raise ConfigError(
            f"{setting}={variable} is not set in the environment; set it where the run starts, and on every node of a "
            "cluster"
        )
    return {"Authorization": f"Bearer {key}"}


async def ask(session: aiohttp.ClientSession, url: str, content: Any, patience_s: float, max_bytes: int) -> str:
    """The body of the answer to a POST of `content` as JSON, or to a GET if that is None.

    Raises Refused, and NoAnswer when `patience_s` is over; both name the URL.
    """
    import aiohttp

    ends_at, pause_s, chance = time.monotonic() + patience_s, FIRST_PAUSE_S, random.Random()
    last = "it did not answer"
    while True:
        try:
            async with asyncio.timeout(max(ends_at - time.monotonic(), 0.0)):
                return await _ask_once(session, url, content, max_bytes)
        except TimeoutError as error:
            raise NoAnswer(f"no answer from {url} within {patience_s:g} s: {last}") from error
        except (_Busy, aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            last = f"{error}"
        except aiohttp.ClientError as error:  # a redirection that goes round, a URL without a host
            raise Refused(f"{url} cannot be asked: {type(error).__name__}: {error}") from error
        if time.monotonic() + pause_s >= ends_at:
            raise NoAnswer(f"no answer from {url} within {patience_s:g} s: {last}")
        await asyncio.sleep(pause_s * chance.uniform(0.5, 1.0))
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


async def _ask_once(session: aiohttp.ClientSession, url: str, content: Any, max_bytes: int) -> str:
    method = "GET" if content is None else "POST"
    async with session.request(method, url, json=content) as response:
        body = bytearray()
        async for part in response.content.iter_any():
            body += part
            if len(body) > max_bytes:
                raise Refused(f"{url} answered with more than {max_bytes} bytes")
        text = body.decode(errors="replace")
        if response.status in _BUSY or response.status >= 500:
            raise _Busy(f"HTTP {response.status}: {text[:200]}")
        if response.status != 200:
            raise Refused(f"{url} answered HTTP {response.status}: {text[:200]}")
        return text
