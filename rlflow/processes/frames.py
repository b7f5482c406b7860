"""Frames on a socket or pipe: 4 bytes of length, big-endian, then the content, which is mostly JSON.

Standard library only: the bare interpreter of a sandbox imports this module.
"""

from __future__ import annotations

import json
import numbers
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio

Fields = dict[str, Any]
"""What a frame holds, once read from JSON."""

MAX_FRAME_BYTES = 16 << 20
"""The longest content of a frame. Reading one this long takes tens of milliseconds."""


class FrameTooLong(ValueError):
    """A frame's content is longer than it may be."""


def check_size(num_bytes: int, max_bytes: int = MAX_FRAME_BYTES) -> None:
    """Raises FrameTooLong."""
    if num_bytes > max_bytes:
        raise FrameTooLong(f"{num_bytes} bytes, more than the {max_bytes} that one message may have")


def frame_of(content: bytes, max_bytes: int = MAX_FRAME_BYTES) -> bytes:
    """Raises FrameTooLong."""
    check_size(len(content), max_bytes)
    return len(content).to_bytes(4, "big") + content


def encode(fields: Fields) -> bytes:
    """The fields as JSON; numbers of numpy and the like become Python's.

    Raises TypeError, ValueError or RecursionError for what JSON cannot hold.
    """
    return json.dumps(fields, separators=(",", ":"), default=_number).encode()


def receive(descriptor: int, max_bytes: int = MAX_FRAME_BYTES) -> bytes:
    """The next frame's content; blocks until it is there. Raises EOFError at the end, and FrameTooLong."""
    size = int.from_bytes(_read_exactly(descriptor, 4), "big")
    check_size(size, max_bytes)
    return _read_exactly(descriptor, size)


async def read_frame(reader: asyncio.StreamReader, max_bytes: int = MAX_FRAME_BYTES) -> bytes:
    """The next frame's content. Raises EOFError or ConnectionError at the end, and FrameTooLong."""
    size = int.from_bytes(await reader.readexactly(4), "big")
    check_size(size, max_bytes)
    return await reader.readexactly(size)


def _read_exactly(descriptor: int, count: int) -> bytes:
    parts: list[bytes] = []
    while count:
        part = os.read(descriptor, min(count, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _number(value: object) -> bool | int | float:
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "ndim", None) == 0:
        found = item()
        if isinstance(found, bool | int | float):
            return found
    if isinstance(value, numbers.Real):
        return float(value)
    raise TypeError(f"JSON cannot hold {value!r:.200} ({type(value).__name__})")
