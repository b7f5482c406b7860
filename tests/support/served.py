"""A server of this process that answers every request as told."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web


@asynccontextmanager
async def served(reply: Callable[[web.Request], Awaitable[web.Response]]) -> AsyncIterator[str]:
    """Its address, such as http://127.0.0.1:40001."""
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", reply)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    try:
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()
