"""A Ray cluster of several nodes on this machine, each of which can be killed as a whole.

Each node is a raylet with its own object store, resources, labels and processes. Without root they have loopback
addresses of their own (127.0.0.N); with it, each can have a network of its own behind a bridge, so that what goes from
one to another crosses a network.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil

START_S = 60
STOP_S = 20
_PR_SET_PDEATHSIG = 1
_STORE_BYTES = 100 * 2**20
_QUICK = {
    # A dead node is noticed when it has not answered three times, a second apart: 15 s by default.
    "RAY_health_check_initial_delay_ms": "5000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "3",
    # Processes are started when they are needed, and not one for each CPU before.
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
}


def has_networks() -> bool:
    """Whether nodes can have networks of their own here."""
    return os.geteuid() == 0 and shutil.which("ip") is not None


class Node:
    """One node that runs. `ip` is where the others reach it."""

    def __init__(self, ip: str, process: subprocess.Popen[bytes], network: str | None) -> None:
        self.ip = ip
        self.network = network
        self._process = process

    def await_start(self) -> None:
        """Read what `ray start` prints until the node is there."""
        output = self._process.stdout
        assert output is not None
        printed = b""
        while b"Ray runtime started" not in printed:
            readable, _, _ = select.select([output], [], [], START_S)
            found = os.read(output.fileno(), 65536) if readable else b""
            printed += found
            if not found:
                raise AssertionError(f"a node of Ray did not start: {printed.decode(errors='replace')}")

    def processes(self) -> list[psutil.Process]:
        """All that the node has started, and what these have, the node itself first."""
        try:
            first = psutil.Process(self._process.pid)
            return [first, *first.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def titles(self) -> list[str]:
        """What the processes call themselves; the actors of Ray "ray::", their class, and what they do."""
        found = []
        for process in self.processes():
            try:
                found.append(" ".join(process.cmdline()))
            except psutil.NoSuchProcess:
                continue  # it ended meanwhile
        return found

    def kill(self) -> None:
        """Everything at once, as when a machine loses its power."""
        found: set[psutil.Process] = set()
        # Stopped first, so that nothing is started, or restarted, between the look and the kill.
        while new := set(self.processes()) - found:
            for process in new:
                _tell(process, "suspend")
            found |= new
        for process in found:
            _tell(process, "kill")
        self._process.wait(STOP_S)

    def cut(self) -> None:
        """Take the machine off its network."""
        self._link("down")

    def mend(self) -> None:
        self._link("up")

    def _link(self, state: str) -> None:
        assert self.network is not None, "nodes without networks of their own have no links"
        _ip("link", "set", _outside(self.ip), state)

    def stop(self) -> None:
        """As `kill`; nothing of a test's cluster has to end in order."""
        if self._process.poll() is None:
            self.kill()


class RayNodes:
    """Use it as a context manager. The head has no CPUs, so that nothing of a run is there but its driver."""

    def __init__(self, *, with_networks: bool = False) -> None:
        self._with_networks = with_networks
        self._number = 1  # Ray takes 127.0.0.1 for a mistake
        self._nodes = ExitStack()
        # Short: Ray makes sockets in it, whose paths may have 107 characters.
        self._folder = Path(tempfile.mkdtemp(prefix="rn"))
        self._environment = {
            **os.environ,
            **_QUICK,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
        }
        self.head: Node
        self.address: str

    def __enter__(self) -> RayNodes:
        self._nodes.callback(shutil.rmtree, self._folder, ignore_errors=True)
        try:
            if self._with_networks:
                self._nodes.enter_context(_bridge())
            head_ip = self._next_ip()
            port = _free_port()
            self.address = f"{head_ip}:{port}"
            self.head = self._launch(head_ip, "--head", f"--port={port}", "--num-cpus=0", "--include-dashboard=false")
            self.head.await_start()
        except BaseException:
            self._nodes.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._nodes.close()

    def add(self, *pools: str, cpus: int = 2, hides: Path | None = None, finds_first: Path | None = None) -> list[Node]:
        """One more node in each of these pools; returns when they are part of the cluster. None of what the other
        machines have in the folder `hides` is there. Its processes look for packages in `finds_first` first."""
        nodes = [
            self._launch(
                self._next_ip(),
                f"--address={self.address}",
                f"--num-cpus={cpus}",
                f"--labels=rlflow-pool={pool}",
                hides=hides,
                finds_first=finds_first,
            )
            for pool in pools
        ]
        for node in nodes:
            node.await_start()
        return nodes

    def on_head(self, command: list[str], **options: Any) -> subprocess.Popen[str]:
        """A process on the machine of the head, which knows the cluster's token; its output is text."""
        return subprocess.Popen(
            [*_within(self.head.network), *command],
            env=self._environment,
            start_new_session=True,
            preexec_fn=_end_with_parent,
            text=True,
            **options,
        )

    def _next_ip(self) -> str:
        self._number += 1
        return f"10.201.77.{self._number}" if self._with_networks else f"127.0.0.{self._number}"

    def _launch(self, ip: str, *options: str, hides: Path | None = None, finds_first: Path | None = None) -> Node:
        network = self._nodes.enter_context(_network(ip)) if self._with_networks else None
        command = [
            *_within(network), *_hiding(hides), sys.executable, "-c", "from ray.scripts.scripts import main; main()",
            "start", "--block", f"--node-ip-address={ip}", f"--object-store-memory={_STORE_BYTES}",
            "--disable-usage-stats", "--include-log-monitor=false",
            f"--temp-dir={self._folder}/{self._number}", *options,
        ]  # fmt: skip
        process = subprocess.Popen(
            command,
            env=self._environment | ({"PYTHONPATH": str(finds_first)} if finds_first else {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
        node = Node(ip, process, network)
        self._nodes.callback(node.stop)
        return node


def _end_with_parent() -> None:
    """In a new process: SIGTERM when the test process ends, however that is. `ray start --block` then ends the node."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def _tell(process: psutil.Process, what: str) -> None:
    try:
        getattr(process, what)()
    except psutil.NoSuchProcess:
        return  # it ended meanwhile


def _within(network: str | None) -> list[str]:
    return ["ip", "netns", "exec", network] if network else []


def _hiding(folder: Path | None) -> list[str]:
    """With an empty file system in place of a folder."""
    mount = 'mount -t tmpfs none "$0" && exec "$@"'
    return [] if folder is None else ["unshare", "--mount", "sh", "-c", mount, str(folder)]


_BRIDGE = f"rlb{os.getpid()}"


@contextmanager
def _bridge() -> Iterator[None]:
    _ip("link", "add", _BRIDGE, "type", "bridge")
    try:
        _ip("link", "set", _BRIDGE, "up")
        yield
    finally:
        _ip("link", "delete", _BRIDGE)


@contextmanager
def _network(ip: str) -> Iterator[str]:
    """A network namespace with this address, on the bridge."""
    name, outside = f"{_BRIDGE}-{ip.rpartition('.')[2]}", _outside(ip)
    _ip("netns", "add", name)
    try:
        _ip("link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("link", "set", outside, "master", _BRIDGE, "up")
        _ip("-n", name, "address", "add", f"{ip}/24", "dev", "eth0")
        _ip("-n", name, "link", "set", "eth0", "up")
        _ip("-n", name, "link", "set", "lo", "up")
        yield name
    finally:
        _ip("netns", "delete", name)


def _outside(ip: str) -> str:
    """The end of a machine's link that is on the bridge."""
    return f"{_BRIDGE}v{ip.rpartition('.')[2]}"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=STOP_S)
