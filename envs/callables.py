"""A user's function or class: found by its path, and called without holding up the event loop."""

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

from rlflow.errors import ConfigError
from rlflow.plugins.loading import load_object


def load_callable(argument: str, path: str) -> Callable[..., Any]:
    """The function at package.module:Name or file.py:Name, which `env.args.<argument>` names.

    Raises ConfigError when there is none, or when it cannot be called.
    """
    found = load_object(path)
    if not callable(found):
        raise ConfigError(f"env.args.{argument}={path} must be a function; got {found!r:.80}")
    return found


async def call(function: Callable[..., Any], /, *args: object, **kwargs: object) -> Any:
    """What the function returns. It is awaited if it is async, and else runs in a thread."""
    if inspect.iscoroutinefunction(function):
        return await function(*args, **kwargs)
    result = await asyncio.to_thread(function, *args, **kwargs)
    return await result if inspect.isawaitable(result) else result


def name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)
