"""Ray for one run on this machine, and Ray clusters that others have started."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import ray
from listening import is_loopback, listeners
from ray._private import worker as ray_worker

from rlflow.cluster import ray as local_ray
from rlflow.cluster.start import ray_cluster
from rlflow.config import Config
from rlflow.errors import ConfigError
from rlflow.runtime import scratch

pytestmark = pytest.mark.slow


def test_a_cluster_that_does_not_answer_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(address: str, message: str) -> None:
        config = Config()
        config.cluster.address = address
        with pytest.raises(ConfigError, match=message), ray_cluster(config):
            raise AssertionError("joined a cluster that is not there")

    refused("127.0.0.1:1", r"cluster\.address is '127\.0\.0\.1:1', but no Ray cluster answers there: .*refused")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")  # as a file that a cluster has left behind
    refused("auto", r"is 'auto', which is [0-9.]*:1 here, but no Ray cluster answers there: .*refused")
    monkeypatch.setattr(local_ray, "ANSWER_TIMEOUT_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        refused(f"127.0.0.1:{silent.getsockname()[1]}", "answers there: it takes connections, but said nothing in 1 s")


_JOIN = """
import sys
from rlflow.cluster.start import ray_cluster
from rlflow.config import Config
config = Config()
config.cluster.address = sys.argv[1]
with ray_cluster(config):
    print("joined")
"""


def _join(address: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Join a cluster as somebody who was given none of its tokens."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH_")}
    environment = own | {"RAY_NUM_REDIS_GET_RETRIES": "1", **variables}
    command = [sys.executable, "-c", _JOIN, address]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def _what_ray_is_told() -> dict[str, str]:
    """What would keep a later cluster of this process from having other machines, or tokens of its own."""
    return {name: value for name, value in os.environ.items() if name.startswith(("RAY_AUTH_", "RAY_ENABLE_"))}


def test_ray_on_this_machine_is_for_this_run_alone() -> None:
    before = _what_ray_is_told()
    with ray_cluster(Config()):
        assert [node["NodeManagerAddress"] for node in ray.nodes()] == ["127.0.0.1"]
        found = listeners(os.getpid())
        token = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
        assert stat.S_IMODE(token.stat().st_mode) == 0o600
        assert stat.S_IMODE(token.parent.stat().st_mode) == 0o700
        assert (token.parent / "ray/session_latest/sockets/raylet").is_socket()
        assert "RAY_AUTH_TOKEN" not in ray.get(ray.remote(lambda: list(os.environ)).remote())
        with_none = _join(ray.get_runtime_context().gcs_address)
        with_another = _join(ray.get_runtime_context().gcs_address, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="0" * 64)
    assert {"gcs_server", "raylet"} <= found.keys()
    assert all(is_loopback(address) for addresses in found.values() for address in addresses), found
    assert "joined" not in with_none.stdout + with_another.stdout
    assert "asks for a token, and this process showed none, as RAY_AUTH_MODE is not token" in with_none.stderr
    assert "asks for a token, and this process showed the one of RAY_AUTH_TOKEN;" in with_another.stderr
    assert not token.parent.exists()
    assert _what_ray_is_told() == before


_KILLED = """
import os, signal, sys
import ray
from pathlib import Path
from rlflow.cluster.start import ray_cluster
from rlflow.config import Config
from rlflow.runtime import scratch
with ray_cluster(Config(), Path(sys.argv[1])):
    from ray._private import worker
    raylet = worker._global_node.all_processes["raylet"][0].process.pid
    print(scratch.folder(), raylet, flush=True)
    sys.stdin.read()
"""


def test_a_killed_driver_takes_all_of_ray_with_it_and_the_next_start_keeps_its_logs(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _KILLED, str(tmp_path)]
    driver = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    folder, raylet = driver.stdout.readline().split()
    processes = [psutil.Process(int(raylet)), *psutil.Process(driver.pid).children(recursive=True)]
    agents = [child for child in psutil.Process(int(raylet)).children() if local_ray._is_agent(child)]
    assert len(agents) == 2
    driver.kill()
    driver.communicate(timeout=60)
    # Agents that are left to themselves stay for more than a minute.
    assert psutil.wait_procs(processes, timeout=30)[1] == []
    assert (Path(folder) / "token").is_file()
    with scratch.opened(tmp_path):
        assert not Path(folder).exists()
    assert (tmp_path / "logs/raylet.out").stat().st_size > 0
    assert not list(tmp_path.rglob("token"))


@pytest.mark.parametrize(
    ("addresses", "warned"),
    [(["127.0.0.1", "127.0.0.2"], ""), (["127.0.0.1", "10.0.0.7"], "whoever reaches 10.0.0.7 can run programs as you")],
)
def test_a_cluster_that_anyone_may_join_is_warned_of(
    addresses: list[str], warned: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = [{"Alive": True, "NodeManagerAddress": address} for address in addresses]
    nodes.append({"Alive": False, "NodeManagerAddress": "10.0.0.9"})
    monkeypatch.setattr(ray, "init", lambda **_: None)
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    monkeypatch.setattr(local_ray, "is_token_auth_enabled", lambda: False)
    local_ray.join_ray("ray://head:10001")
    written = capsys.readouterr().err
    assert warned in written
    assert bool(warned) == bool(written)


def test_a_lost_machine_is_told_without_dumps_of_rays_state(capsys: pytest.CaptureFixture[str]) -> None:
    show = ray_worker.print_to_stdstream
    dumps = "\n".join(f"    [2026-01-01 00:00:00,000 I 7 7] raylet.cc:1: [state-dump] line {i}" for i in range(20))
    lost = {"lines": [f"Raylet is terminated.\n{dumps}\n    killed by a signal"], "pid": "raylet", "is_err": False}
    with local_ray.without_dumps():
        ray_worker.print_to_stdstream(lost, ignore_prefix=False)
    said = capsys.readouterr().out
    assert "Raylet is terminated." in said and "killed by a signal" in said
    assert "state-dump" not in said and said.count("\n") <= 3
    assert ray_worker.print_to_stdstream is show
