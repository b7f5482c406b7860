"""Who writes a run's directory, and how that process is asked to end."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from rlflow.cli import main
from rlflow.config import DeadlinesConfig
from rlflow.errors import ConfigError, RunError
from rlflow.rundir.lock import NAME, hold, seconds_to_stop, stop

HOLDER = """
import signal, sys
from pathlib import Path
from rlflow.rundir.lock import hold
asked = []
signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
with hold(Path(sys.argv[1])):
    print("held", flush=True)
    while len(asked) < int(sys.argv[2]):
        signal.pause()
sys.exit(143)
"""


@contextmanager
def holder(folder: Path, signals: int = 1) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock until it was asked so many times to end."""
    command = [sys.executable, "-c", HOLDER, str(folder), str(signals)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate(timeout=30)


def test_stop_asks_the_process_and_waits_for_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with holder(tmp_path) as process:
        name = f"process {process.pid} on {socket.gethostname()}"
        with pytest.raises(ConfigError, match=f"being written by {name}.*rlflow stop {tmp_path}"), hold(tmp_path):
            pass
        assert main(["stop", str(tmp_path)]) == 0
        assert process.wait(timeout=30) == 143
    assert capsys.readouterr().out.startswith(f"{name} has ended")
    assert (tmp_path / NAME).read_text() == ""
    assert main(["stop", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"no run is writing {tmp_path}\n"


def test_a_process_that_takes_too_long_is_left_alone(tmp_path: Path) -> None:
    with holder(tmp_path, signals=2) as process:
        with pytest.raises(RunError, match=r"still writing .* after 0.2 s; .*--timeout"):
            stop(tmp_path, 0.2)
        assert process.poll() is None
        stop(tmp_path, 30)
        assert process.wait(timeout=30) == 143


def test_a_killed_process_leaves_its_name_and_no_lock(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        process.kill()
        process.wait(timeout=30)
    assert json.loads((tmp_path / NAME).read_text())["pid"] == process.pid
    assert stop(tmp_path, 1) == f"no run is writing {tmp_path}"
    with hold(tmp_path):
        assert json.loads((tmp_path / NAME).read_text())["pid"] == os.getpid()


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"host": "elsewhere"}, "process .* on elsewhere, and this is .*rlflow submit --stop JOB"),
        ({"pid": 2**22 + 1}, "cannot be seen from here; call `rlflow stop` in its container"),
        ({"started": 1}, "cannot be seen from here"),  # the number belongs to another process by now
    ],
)
def test_only_the_process_that_holds_the_lock_is_asked(tmp_path: Path, record: dict[str, object], message: str) -> None:
    with holder(tmp_path) as process:
        lock = tmp_path / NAME
        lock.write_text(json.dumps({**json.loads(lock.read_text()), **record}))
        with pytest.raises(ConfigError, match=message):
            stop(tmp_path, 30)
        assert process.poll() is None


def test_a_lock_of_another_machine_that_is_free_here_is_no_proof(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text(json.dumps({"host": "elsewhere", "pid": 7, "started": 1}))
    assert stop(tmp_path, 1) == (
        f"no run holds {tmp_path} on this machine; the last one, process 7 on elsewhere, did not end by itself"
    )


def test_a_stop_waits_as_long_as_the_runs_deadlines_allow(tmp_path: Path) -> None:
    assert seconds_to_stop(DeadlinesConfig()) == 900 + 1800 + 600 + 2 * 1800
    deadlines = {"start_s": 1.0, "group_s": 0.0, "train_s": 0.05, "weights_s": 0.05, "checkpoint_s": 0.05}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"deadlines": deadlines}))
    with holder(tmp_path, signals=2), pytest.raises(RunError, match=r"after 0.2 s"):
        stop(tmp_path, None)


def test_mistakes_of_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stop", str(tmp_path / "missing")]) == 2
    assert main(["stop", str(tmp_path), "--timeout", "0"]) == 2
    assert "--timeout must be positive; got 0" in capsys.readouterr().err
