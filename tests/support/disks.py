"""A real file system that is small enough to fill."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

_OWN_MOUNTS = ["unshare", "--user", "--map-root-user", "--mount"]


def on_small_disk(folder: Path, size: str, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a command for which `folder` is a file system of `size` ("1m"), which ends with it and nobody else sees.

    Skips the test where a user may not have mounts of his own.
    """
    mount = f"mount -t tmpfs -o size={size} none {shlex.quote(str(folder))}"
    if subprocess.run([*_OWN_MOUNTS, "sh", "-c", mount], capture_output=True, check=False).returncode:
        pytest.skip("this machine lets users have no mounts of their own")
    run = f"{mount} && exec {shlex.join(command)}"
    return subprocess.run([*_OWN_MOUNTS, "sh", "-c", run], capture_output=True, text=True, timeout=120, check=False)
