"""The systems that rlflow is measured beside, each in a virtual environment of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlflow.errors import RunError
from rlflow.tools.bench.runs import too_slow

_CHECKOUT = Path(__file__).resolve().parent.parent
_ENVIRONMENTS = Path.home() / ".cache" / "rlflow"
INSTALL_TIMEOUT_S = 1800.0


def worker_script(name: str) -> Path:
    """A script of this folder, which is run as a process of its own."""
    return _CHECKOUT / "benchmarks" / name


def other_python(name: str, lock: str) -> Path:
    """The interpreter of environment `name`, with the packages of `requirements/<lock>`; installed on first use.

    Raises RunError when that fails.
    """
    environment = _ENVIRONMENTS / name
    options = ["--venv", str(environment), "--lock", str(_CHECKOUT / "requirements" / lock), "--packages-only"]
    command = [sys.executable, str(_CHECKOUT / "scripts" / "setup.py"), *options]
    try:
        installed = subprocess.run(command, stdout=sys.stderr, timeout=INSTALL_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise too_slow(f"installing {name}", INSTALL_TIMEOUT_S) from error
    if installed.returncode:
        raise RunError(f"{name}, which rlflow is measured beside, could not be installed; the reason is above")
    return environment / "bin" / "python"


def figures_of(what: str, command: Sequence[str], timeout_s: float) -> dict[str, Any]:
    """The JSON object that a process prints on its last line. Raises RunError naming `what` when it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired as error:
        raise too_slow(what, timeout_s) from error
    if done.returncode:
        ending = "\n".join((done.stdout + done.stderr).splitlines()[-20:])
        raise RunError(f"{what} ended with exit code {done.returncode}; it ends with:\n{ending}")
    return json.loads(done.stdout.splitlines()[-1])
