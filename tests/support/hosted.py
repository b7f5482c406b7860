"""What a process of a pool loads in tests; in a module so that another process can import it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping

import numpy as np

from rlflow.errors import ConfigError


def load(content: str) -> Mapping[str, Callable[..., object]]:
    match content:
        case "refuse":
            raise ConfigError("my.setting is wrong")
        case "raise":
            raise KeyError("key")
        case "die":
            os._exit(7)
    return {"echo": echo, "act": act}


def echo(text: str) -> object:
    return {"text": text, "pid": os.getpid(), "number": np.float32(0.5)}


def act(what: str) -> object:
    match what:
        case "raise":
            raise ValueError("by design")
        case "hang":
            time.sleep(600)
        case "die":
            os._exit(3)
        case "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "fork":
            os.fork()
        case "not json":
            return object()
        case "meddle":
            for descriptor in os.listdir("/proc/self/fd"):
                if os.path.islink(link := f"/proc/self/fd/{descriptor}") and os.readlink(link).startswith("socket:"):
                    os.write(int(descriptor), b"\0\0\0\4oops")
    return what
