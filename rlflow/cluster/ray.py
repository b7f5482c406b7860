"""Ray on this machine, for one run alone: on loopback, with a token and a folder that no other user has."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ray._private import ray_constants
from ray._raylet import AuthenticationTokenLoader  # pyright: ignore[reportAttributeAccessIssue]
from ray._raylet import Config as RayConfig  # pyright: ignore[reportAttributeAccessIssue]

from rlflow.errors import ConfigError
from rlflow.runtime.disk import TEMPORARY
from rlflow.runtime.variables import variables

LOOPBACK = "127.0.0.1"


@contextmanager
def private_ray() -> Iterator[dict[str, Any]]:
    """The arguments of `ray.init` that start Ray so, for as long as the block lasts.

    Sockets, logs, token and what Ray moves out of memory are in a folder that only this user can enter; Ray's own
    choice can be written by every user. The folder goes with the block, unless the run failed: its logs may tell why.
    """
    folder = Path(tempfile.mkdtemp(prefix="rlflow-ray-", dir=TEMPORARY))
    failed = False
    try:
        with _on_loopback(), _own_token(folder / "token"):
            # "local" also where a Ray cluster happens to run on this machine: a run joins one only when told to.
            yield {
                "address": "local",
                "include_dashboard": False,
                "_node_ip_address": LOOPBACK,
                # Not the folder itself: Ray lets everybody into the one that it is given.
                "_temp_dir": str(folder / "ray"),
            }
    except Exception as error:
        if not isinstance(error, ConfigError):
            failed = True
            error.add_note(f"what the processes of the run have logged is in {folder}")
        raise
    finally:
        if not failed:
            # A process of Ray that is just ending may still write there.
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Have Ray keep the loopback address that it is given, for the block.

    It takes it for a mistake and looks for one that others can reach, unless it believes to be on a machine that cannot
    be part of a cluster. It has read that when it was imported; its processes read it from the environment.
    """
    is_enabled, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
    try:
        with _environment({ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0"}):
            yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = is_enabled


@contextmanager
def _own_token(path: Path) -> Iterator[None]:
    """Have Ray ask everyone for the token in this file, which is written for the block.

    By itself Ray would keep one token for all that a user starts, in a file of the home folder that others may be able
    to read. Its processes find the path in the environment: the token itself is in no environment and no command line.
    """
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    with _environment({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(path), "RAY_AUTH_TOKEN": None}):
        yield


@contextmanager
def _environment(changes: dict[str, str | None]) -> Iterator[None]:
    """These variables, which Ray reads anew, for the block; None takes one out."""
    try:
        with variables(changes):
            _read_anew()
            yield
    finally:
        _read_anew()


def _read_anew() -> None:
    # Ray has read the variables of its tokens when it was imported, or when it was last asked for a token.
    RayConfig.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
