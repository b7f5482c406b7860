"""Jobs on a real Ray cluster of one machine, in processes of its own, with token authentication."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest
from ledgers import trained_tasks
from ray._private.ray_constants import ENABLE_RAY_CLUSTERS_ENV_VAR

from rlflow.groups.ledger import counts_by_state
from rlflow.rundir.lock import NAME
from rlflow.telemetry import metrics

pytestmark = pytest.mark.slow

TIMEOUT_S = 300
SAVED, RESUMED = r"saved \S+/step_(\d+)", r"resumed at step (\d+)"
MARK = "RLFLOW_TEST_CLUSTER"
"""In the environment of all processes of a cluster; its value is found in no others."""


class Cluster:
    """A head on loopback, and whatever jobs leave; `close` ends it all."""

    def __init__(self) -> None:
        self._mark = secrets.token_hex(16)
        self._folder = Path(tempfile.mkdtemp(prefix="ray-"))  # short: paths of sockets are
        self._port, self._dashboard, self._client, self._agent = free_ports(4)
        self._head: subprocess.Popen[bytes] | None = None
        self.address = f"http://127.0.0.1:{self._dashboard}"
        self.environment = {
            **os.environ,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }

    def start(self) -> None:
        command = [
            *("ray", "start", "--head", "--block", "--node-ip-address=127.0.0.1", f"--port={self._port}"),
            *("--dashboard-host=127.0.0.1", f"--dashboard-port={self._dashboard}"),
            *(f"--ray-client-server-port={self._client}", f"--dashboard-agent-listen-port={self._agent}"),
            *("--min-worker-port=0", "--max-worker-port=0", "--num-cpus=8", "--num-gpus=0"),
            *("--object-store-memory=200000000", f"--temp-dir={self._folder}", "--disable-usage-stats"),
        ]
        # The variable lets Ray stay on loopback.
        environment = {**self.environment, MARK: self._mark, ENABLE_RAY_CLUSTERS_ENV_VAR: "0"}
        with (self._folder / "head.log").open("ab") as log:
            self._head = subprocess.Popen(
                command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        deadline = time.monotonic() + TIMEOUT_S
        while not self._answers():
            assert self._head.poll() is None and time.monotonic() < deadline, (self._folder / "head.log").read_text()
            time.sleep(0.2)

    def _answers(self) -> bool:
        headers = {"Authorization": f"Bearer {self.environment['RAY_AUTH_TOKEN']}"}
        try:
            with urlopen(Request(f"{self.address}/api/version", headers=headers), timeout=TIMEOUT_S):
                return True
        except (URLError, ConnectionError):
            return False

    def kill(self) -> None:
        """As a machine that loses its power: Ray's processes are in one session, a job's driver is not."""
        assert self._head is not None
        for pid in processes():
            if session_of(pid) == self._head.pid:
                kill(pid)
        self._head.wait(timeout=TIMEOUT_S)

    def close(self) -> None:
        while pids := [pid for pid in processes() if self._is_ours(pid)]:
            for pid in pids:
                kill(pid)
        if self._head is not None:
            self._head.wait(timeout=TIMEOUT_S)
        shutil.rmtree(self._folder)

    def _is_ours(self, pid: int) -> bool:
        try:
            return f"{MARK}={self._mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:  # it has ended, or is another user's
            return False


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def processes() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


class Client:
    """`rlflow submit` in a process of its own, whose output is read as it comes."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.output = ""

    def until(self, pattern: str) -> re.Match[str]:
        """Read up to the line in which the pattern is."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line
            if found := re.search(pattern, line):
                return found
        raise AssertionError(f"it ended without {pattern!r}:\n{self.output}")

    def ended(self) -> int:
        assert self.process.stdout is not None
        self.output += self.process.stdout.read()
        return self.process.wait(timeout=TIMEOUT_S)


Submit = Callable[..., AbstractContextManager[Client]]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    cluster = Cluster()
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()


@pytest.fixture
def submit(cluster: Cluster, tmp_path: Path) -> Submit:
    """Starts `rlflow submit ARGUMENTS` in a folder with some code; a context manager, which ends it."""
    code = tmp_path / "code"
    code.mkdir()
    (code / "my.py").write_text("def digits(completion):\n    return sum(map(str.isdecimal, completion)) / 8\n")

    @contextmanager
    def run(*arguments: str) -> Iterator[Client]:
        command = [sys.executable, "-m", "rlflow", "submit", *arguments]
        where = ["cluster=ray", f"cluster.address={cluster.address}"]
        process = subprocess.Popen(
            [*command, *where],
            cwd=code,
            env=cluster.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        watch = threading.Timer(TIMEOUT_S, process.kill)
        watch.start()
        try:
            yield Client(process)
        finally:
            watch.cancel()
            process.kill()
            process.communicate(timeout=TIMEOUT_S)

    return run


@pytest.mark.parametrize(
    "loses_its_head", [pytest.param(False, id="short"), pytest.param(True, id="whole", marks=pytest.mark.proof)]
)
def test_a_job_is_followed_left_found_killed_resumed_and_stopped(
    cluster: Cluster, submit: Submit, tmp_path: Path, loses_its_head: bool
) -> None:
    """One run by several jobs. In short, the driver is killed, then the run is stopped. The whole loses the head in
    between, and lets the run end."""
    run, wheel = tmp_path / "run", tmp_path / "mine-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("mine/rewards.py", "def length(completion):\n    return len(completion) / 100\n")
    same = [
        "recipe=smoke", f"run.dir={run}", "run.steps=100000", "run.checkpoint_every=5", "run.show_samples_every=1000",
        "algorithm.groups_per_step=1", "algorithm.group_size=2", "env.args.size=5000",
        "reward.function=[my.py:digits,mine.rewards:length]", "--working-dir", ".", "--wheel", str(wheel),
    ]  # fmt: skip

    with submit(*same) as client:
        job = client.until(r"--attach (\S+)")[1]
        client.until(SAVED)
        client.process.send_signal(signal.SIGINT)
        assert client.ended() == 0
        assert "the job goes on" in client.output
    with submit("--attach", job) as client:
        client.until("step 1/")  # the log from its beginning
        kill(json.loads((run / NAME).read_text())["pid"])
        assert client.ended() == 128 + signal.SIGKILL
        assert f"job {job} failed by signal 9" in client.output

    first = 0
    if loses_its_head:
        with submit(*same) as client:
            first = int(client.until(RESUMED)[1])
            client.until(SAVED)
            cluster.kill()
            client.until("no connection to the cluster .*; trying again")
            cluster.start()
            assert client.ended() == 1
            assert "its head may have been started anew" in client.output

    with submit(*same) as client:
        job = client.until(r"--attach (\S+)")[1]
        assert int(client.until(RESUMED)[1]) > first  # the checkpoint of the job that was lost with its head
        client.until("step ")
        with submit("--stop", job) as stopping:
            assert stopping.ended() == 0
        assert client.ended() == 128 + signal.SIGTERM
        last = re.findall(SAVED, client.output)[-1]
        assert last == re.findall(r"(?m)^step (\d+)/", client.output)[-1]
        assert (run / "checkpoints" / f"step_{last}" / "state.json").is_file()

    steps = int(last)
    if loses_its_head:
        steps += 5
        with submit(*same, f"run.steps={steps}") as client:
            client.until(f"resumed at step {last} of {steps}")
            assert client.ended() == 0
            assert f"succeeded: {run}" in client.output
            assert "\x1b" not in client.output
    counts = counts_by_state(run / "ledger.db")
    assert counts.pop("admitted_total") == sum(counts.values())
    assert (counts["trained"], counts["ready"], counts["running"]) == (steps, 0, 0)
    assert len(set(trained_tasks(run))) == steps  # none twice: there are more tasks than that
    assert [record["step"] for record in metrics.read(run / "metrics.jsonl")] == list(range(1, steps + 1))
