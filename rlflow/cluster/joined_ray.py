"""A Ray cluster that others have started: joining it, and saying why that fails."""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from typing import Any

import ray
from ray._private.authentication.authentication_utils import is_token_auth_enabled
from ray.exceptions import AuthenticationError

from rlflow.errors import ConfigError

CONNECT_TIMEOUT_S = 10.0
_NO_TOKEN = (
    "rlflow: warning: this Ray cluster asks nobody for a token: whoever reaches {addresses} can run programs as you; "
    "start it with RAY_AUTH_MODE=token (docs/security.md)\n"
)


def join_ray(address: str, **options: Any) -> None:
    """`ray.init` there. Warns of a cluster on a network that anyone may join; raises ConfigError when it cannot be
    joined."""
    if address.startswith(("http://", "https://")):
        raise ConfigError(
            f"cluster.address={address} is where jobs are handed in; use `rlflow submit` in place of `rlflow train`, "
            "or give the address of the cluster: auto, or host:port"
        )
    try:
        _check_answers(address)
        ray.init(address=address, **options)
    except (ConnectionError, TimeoutError, socket.gaierror, AuthenticationError) as error:
        if _is_refusal(error):
            raise ConfigError(_refusal(address)) from error
        raise ConfigError(
            f"cluster.address is {address!r}, but no Ray cluster answers there: {error}; start one, or leave it null "
            "to start Ray on this machine"
        ) from error
    if not is_token_auth_enabled():
        _warn([node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]])


def _check_answers(address: str) -> None:
    """Raise ConnectionError when nothing listens at host:port; Ray itself would try for more than a minute."""
    host, separator, port = address.rpartition(":")
    if separator and port.isdigit() and "://" not in host:
        socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S).close()


def _is_refusal(error: BaseException | None) -> bool:
    """Whether a token is behind it: Ray gives what it was told as text, in the cause of a ConnectionError."""
    while error is not None:
        if isinstance(error, AuthenticationError) or AuthenticationError.__name__ in str(error):
            return True
        error = error.__cause__
    return False


def _refusal(address: str) -> str:
    variables = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
    source = next((name for name in variables if name in os.environ), "~/.ray/auth_token")
    shown = f"the one of {source}" if is_token_auth_enabled() else "none, as RAY_AUTH_MODE is not token"
    return (
        f"the Ray cluster at cluster.address={address} asks for a token, and this process showed {shown}; set "
        "RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to a file with the token that the cluster was started with"
    )


def _warn(addresses: list[str]) -> None:
    reachable = [address for address in addresses if not ipaddress.ip_address(address).is_loopback]
    if reachable:
        shown = ", ".join(reachable[:3]) + (", ..." if len(reachable) > 3 else "")
        sys.stderr.write(_NO_TOKEN.format(addresses=shown))
        sys.stderr.flush()
