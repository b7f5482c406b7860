"""Ray itself, started or joined.

`private_ray` starts it on this machine for one run alone: on loopback, with a token and a folder that no other user
has. `join_ray` joins a cluster that others have started, and says why that fails.
"""

import ipaddress
import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._private import ray_constants, services, worker
from ray._private.authentication.authentication_utils import is_token_auth_enabled
from ray._raylet import (
    AuthenticationTokenLoader,  # pyright: ignore[reportAttributeAccessIssue]
    GcsClient,  # pyright: ignore[reportAttributeAccessIssue]
)
from ray._raylet import Config as RayConfig  # pyright: ignore[reportAttributeAccessIssue]
from ray.exceptions import AuthenticationError

from rlflow.errors import ConfigError
from rlflow.runtime.environment import variables

LOOPBACK = "127.0.0.1"
CONNECT_TIMEOUT_S = 10.0
ANSWER_TIMEOUT_S = 30.0
_DUMP = "[state-dump]"
"""Marks a line of a raylet's log that describes its state."""


@contextmanager
def private_ray(folder: Path) -> Iterator[dict[str, Any]]:
    """The arguments of `ray.init` that start a Ray of this run's own, valid while the block lasts.

    Sockets, logs, token and what Ray moves out of memory are in the run's folder, which only this user can enter; every
    user can write to the folder that Ray would choose.
    """
    token = folder / "token"
    with os.fdopen(os.open(token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    changes = {
        # Ray replaces a loopback address by one that others can reach, unless it believes that this machine cannot be
        # part of a cluster.
        ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0",
        # Ray's own choice is one token for everything that a user starts, in a file of the home folder that others may
        # be able to read. The token itself is in no environment and no command line.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_AUTH_TOKEN": None,
        # Ray keeps the history of the last 100,000 calls for its dashboard, which is off: 70 MB in 1,000 small steps.
        "RAY_task_events_report_interval_ms": "0",
    }
    # This process read that setting when it imported Ray; Ray's processes read it from the environment.
    is_enabled, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
    try:
        with variables(changes):
            _read_variables_again()
            # "local" also where a Ray cluster happens to run on this machine: a run joins one only when told to.
            yield {
                "address": "local",
                "include_dashboard": False,
                "_node_ip_address": LOOPBACK,
                # Not the folder itself: Ray lets everybody into the one that it is given.
                "_temp_dir": str(folder / "ray"),
            }
    finally:
        _read_variables_again()
        ray_constants.ENABLE_RAY_CLUSTER = is_enabled


@contextmanager
def agents_end_with_this_process() -> Iterator[None]:
    """The agents of the Ray that this process has just started end when this process does, however that ends.

    The kernel ends the servers of such a Ray, and its workers follow. The agents would stay for more than a minute (Ray
    2.60): they first report the end to the GCS, which has ended too.
    """
    node = worker._global_node
    assert node is not None, "Ray was started here"
    raylet = psutil.Process(node.all_processes[ray_constants.PROCESS_TYPE_RAYLET][0].process.pid)
    agents = [str(child.pid) for child in raylet.children() if _is_agent(child)]
    guard = subprocess.Popen(
        ["/bin/sh", "-c", 'read -r _; kill -KILL "$@" 2>/dev/null', "rlflow-guard", *agents],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        yield
    finally:
        guard.kill()
        guard.communicate()


def _is_agent(process: psutil.Process) -> bool:
    """Whether Ray started the process as an agent, which takes a title of its own later."""
    try:
        words = [word.strip() for word in process.cmdline()]
    except psutil.NoSuchProcess:
        return False  # a worker that was not needed
    return any(word.endswith(("/agent.py", "/agent/main.py", "Agent")) for word in words)


def _read_variables_again() -> None:
    """Ray read the variables of its tokens when it was imported, or when it was last asked for a token."""
    RayConfig.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


@contextmanager
def without_dumps() -> Iterator[None]:
    """What Ray tells the driver of a lost machine is shown without the dumps of Ray's state, of which it quotes many
    lines."""
    show = worker.print_to_stdstream

    def shown(data: dict[str, Any], *arguments: Any, **options: Any) -> None:
        show({**data, "lines": [told_without_dumps(line) for line in data["lines"]]}, *arguments, **options)

    worker.print_to_stdstream = shown
    try:
        yield
    finally:
        worker.print_to_stdstream = show


def told_without_dumps(message: str) -> str:
    return "\n".join(line for line in message.splitlines() if _DUMP not in line)


def join_ray(address: str, **options: Any) -> None:
    """`ray.init` with this address. Raises ConfigError when the cluster cannot be joined, and warns on stderr when it
    can be joined by anyone on its network."""
    if address.startswith(("http://", "https://")):
        raise ConfigError(
            f"cluster.address={address} is where jobs are handed in; use `rlflow submit` in place of `rlflow train`, "
            "or give the address of the cluster: auto, or host:port"
        )
    where = address
    try:
        # What `auto` stands for may be in a file that a cluster has left behind.
        where = (address == "auto" and services.canonicalize_bootstrap_address(address)) or address
        host, separator, port = where.rpartition(":")
        if separator and port.isdigit() and "://" not in host:
            # When nothing answers there, this fails soon; Ray would try for more than a minute, deaf to signals.
            socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S).close()
            _wait_for_answer(where)
        ray.init(address=address, **options)
    except (ConnectionError, TimeoutError, socket.gaierror, AuthenticationError) as error:
        if _is_refusal(error):
            names = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
            source = next((name for name in names if name in os.environ), "~/.ray/auth_token")
            shown = f"the one of {source}" if is_token_auth_enabled() else "none, as RAY_AUTH_MODE is not token"
            raise ConfigError(
                f"the Ray cluster at cluster.address={address} asks for a token, and this process showed {shown}; set "
                "RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to a file with the token that the cluster was started "
                "with"
            ) from error
        raise ConfigError(
            f"cluster.address is {address!r}{'' if where == address else f', which is {where} here'}, but no Ray "
            f"cluster answers there: {error}; start one, or leave it null to start Ray on this machine"
        ) from error
    addresses = [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]]
    reachable = [address for address in addresses if not ipaddress.ip_address(address).is_loopback]
    if reachable and not is_token_auth_enabled():
        shown = ", ".join(reachable[:3]) + (", ..." if len(reachable) > 3 else "")
        sys.stderr.write(
            f"rlflow: warning: this Ray cluster asks nobody for a token: whoever reaches {shown} can run programs as "
            "you; start it with RAY_AUTH_MODE=token (docs/security.md)\n"
        )
        sys.stderr.flush()


def _wait_for_answer(address: str) -> None:
    """Raises TimeoutError when what listens at host:port does not answer as a Ray cluster does, even to refuse."""

    def ask() -> None:
        with suppress(Exception):  # which `ray.init` will raise again
            GcsClient(address=address)

    asking = threading.Thread(target=ask, daemon=True)  # which nothing can end
    asking.start()
    asking.join(ANSWER_TIMEOUT_S)
    if asking.is_alive():
        raise TimeoutError(f"it takes connections, but said nothing in {ANSWER_TIMEOUT_S:g} s")


def _is_refusal(error: BaseException | None) -> bool:
    """Whether a token is the reason: Ray passes on what it was told as text, in the cause of a ConnectionError."""
    while error is not None:
        if isinstance(error, AuthenticationError) or AuthenticationError.__name__ in str(error):
            return True
        error = error.__cause__
    return False
