"""Checkpoints and run directories: atomic, checked, exclusive."""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest
from checkpoints import commit
from fakes import make_episode
from safetensors import SafetensorError

from rlflow.config import Config, OnExists
from rlflow.errors import ConfigError, RunError
from rlflow.groups.ledger import Ledger
from rlflow.groups.sampler import SamplerState
from rlflow.roles import REFERENCE
from rlflow.rundir.directory import claim
from rlflow.rundir.store import CheckpointStore, RunState, read_state, state_to_json
from rlflow.runtime.disk import disk_errors
from rlflow.types import ReadyGroup


def make_state(step: int) -> RunState:
    group = ReadyGroup(
        group_id=4,
        task_id="t",
        episodes=[make_episode(1.0, 2), make_episode(0.0, 3)],
        payloads=[],
        task_kind="sums",
        advantages=[[0.7], [-0.7, 0.1]],
        num_bytes=10,
    )
    curriculum = {"pass": 1, "position": 5}
    sampler = SamplerState(kind="uniform", tasks="e3b0", rows="00ff", put_back=[("t3", 0)], curriculum=curriculum)
    return RunState(step=step, version=step - 1, sampler=sampler, ready=[group])


def write(store: CheckpointStore, step: int) -> Path:
    partial = store.begin(step)
    (partial / "trainer").mkdir()
    (partial / "trainer" / "weights").write_bytes(b"12345")
    Ledger(partial / "ledger.db").close()
    return commit(store, partial, make_state(step))


def test_a_state_comes_back_as_it_was(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    assert read_state(write(store, 7)) == make_state(7)


def test_what_a_killed_runner_left_half_written_is_not_in_the_checkpoint(tmp_path: Path) -> None:
    """Ray has another one write the payloads again."""
    store = CheckpointStore(tmp_path, keep=2)
    partial = store.begin(7)
    Ledger(partial / "ledger.db").close()
    (partial / "ready").write_bytes(b"12345")
    digests = {name: sha256((partial / name).read_bytes()).hexdigest() for name in ("ledger.db", "ready")}
    (partial / "ready.4711.partial").write_bytes(b"123")
    folder = store.commit(partial, state_to_json(make_state(7)), digests)
    assert sorted(path.name for path in folder.iterdir()) == ["ledger.db", "ready", "state.json"]
    assert read_state(folder) == make_state(7)


def test_the_form_on_disk_stays_so_that_older_checkpoints_are_read() -> None:
    state = make_state(7)
    state.ready[0].payloads, state.ready[0].frozen = [object()], {REFERENCE: [object()]}
    state.ready[0].episodes[0].metrics["turns"] = 2.0
    written = json.loads(json.dumps(state_to_json(state)))
    first = {
        "end": "completed",
        "reward": 1.0,
        "num_prompt_tokens": 3,
        "num_completion_tokens": 2,
        "num_loss_tokens": 2,
        "oldest_version": 2,
        "newest_version": 2,
        "detail": "",
        "close_failure": "",
        "metrics": {"turns": 2.0},
        "turns": [],
    }
    [group] = written.pop("ready")
    assert written == {
        "step": 7,
        "version": 6,
        "sampler": {
            "kind": "uniform",
            "tasks": "e3b0",
            "rows": "00ff",
            "put_back": [["t3", 0]],
            "curriculum": {"pass": 1, "position": 5},
            "deferred": [],  # absent in those of releases without rollout.oversample
        },
    }
    assert group.pop("episodes")[0] == first
    assert group == {
        "group_id": 4,
        "task_id": "t",
        "task_kind": "sums",
        "baseline": None,
        "advantages": [[0.7], [-0.7, 0.1]],
        "num_bytes": 10,
        "num_images": 0,  # absent in those of releases without images
    }


def test_the_last_ones_are_kept_and_half_written_ones_removed(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step in (2, 10, 9, 11):
        write(store, step)
    store.begin(12)
    assert store.steps() == [10, 11]
    found = store.newest_whole()
    assert found is not None
    assert (found.folder, found.state, found.alarms) == (tmp_path / "step_11", make_state(11), ())
    store.begin(13)
    assert not (tmp_path / "step_12.partial").exists()


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    folder = write(CheckpointStore(tmp_path, keep=1), 3)
    (folder / "trainer" / "weights").write_bytes(b"1234")
    with pytest.raises(RunError, match="trainer/weights should have 5 bytes, found 4"):
        read_state(folder)


def test_a_full_disk_says_what_to_do(tmp_path: Path) -> None:
    full = r"no disk space left for a checkpoint in .*run the same command again"
    with pytest.raises(RunError, match=full), disk_errors("a checkpoint", tmp_path / "not" / "yet"):
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(FileNotFoundError), disk_errors("a checkpoint", tmp_path):
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (errno.EROFS, "Read-only file system; have it mounted for writing and"),
        (errno.EACCES, "Permission denied; give yourself the right to write there and"),
        (errno.EPERM, "Operation not permitted; give yourself the right to write there and"),
        (errno.EDQUOT, "Disk quota exceeded; free some of your quota and"),
        (errno.EIO, r"Input/output error; look at that disk \(dmesg\) and"),
    ],
)
def test_a_disk_that_refuses_says_why_and_what_to_do(tmp_path: Path, number: int, told: str) -> None:
    said = f"a checkpoint cannot be written in {tmp_path / 'ro'}: {told} run the same command again"
    with pytest.raises(RunError, match=said), disk_errors("a checkpoint", tmp_path / "ro"):
        raise OSError(number, os.strerror(number))


def test_a_full_disk_under_safetensors_says_what_to_do(tmp_path: Path) -> None:
    full = r"no disk space left for a checkpoint in .*run the same command again"
    with pytest.raises(RunError, match=full), disk_errors("a checkpoint", tmp_path):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    with pytest.raises(SafetensorError), disk_errors("a checkpoint", tmp_path):
        raise SafetensorError("Error while serializing: I/O error: Invalid argument (os error 22)")


def test_safetensors_names_the_error_number_of_a_failed_write(tmp_path: Path) -> None:
    """What the mapping above leans on. A limit on the size of files stands in for a full disk: number 27, not 28."""
    script = (
        "import resource, numpy, safetensors.numpy\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        f"safetensors.numpy.save_file({{'a': numpy.zeros(9999)}}, {str(tmp_path / 'a.safetensors')!r})"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert re.search(r"SafetensorError: .*\(os error 27\)", ended.stderr)


def make_config(path: Path, on_exists: OnExists = OnExists.resume) -> Config:
    config = Config()
    config.run.dir, config.run.on_exists = str(path), on_exists
    return config


def test_a_second_process_is_kept_out(tmp_path: Path) -> None:
    busy = pytest.raises(ConfigError, match=f"is being written by process {os.getpid()} on {socket.gethostname()}")
    with claim(make_config(tmp_path)), busy, claim(make_config(tmp_path)):
        raise AssertionError("both hold the lock")
    with claim(make_config(tmp_path)):
        pass


def test_on_exists(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with claim(make_config(run, OnExists.fail)) as run_dir:
        assert run_dir.resume_from is None
        write(run_dir.checkpoints, 4)
    refused = pytest.raises(ConfigError, match=r"already holds a run and run\.on_exists is fail")
    with refused, claim(make_config(run, OnExists.fail)):
        raise AssertionError("claimed a run that exists")
    with claim(make_config(run)) as run_dir:
        assert run_dir.resume_from == run / "checkpoints" / "step_4"
        assert run_dir.ledger.is_file()
    with claim(make_config(run, OnExists.fresh)) as run_dir:
        assert run_dir.resume_from is None
    assert (tmp_path / "run.old-1" / "checkpoints" / "step_4").is_dir()


def test_a_run_is_not_resumed_with_other_tasks(tmp_path: Path) -> None:
    with claim(make_config(tmp_path)) as run_dir:
        write(run_dir.checkpoints, 4)
    config = make_config(tmp_path)
    config.run.seed = 5
    with pytest.raises(ConfigError, match="run.seed is 5, but the run in .* was begun with 0"), claim(config):
        raise AssertionError("resumed another run")
    config = make_config(tmp_path)
    config.curriculum.kind = "difficulty"
    begun = "curriculum.kind is 'difficulty', but the run in .* was begun with 'uniform'"
    with pytest.raises(ConfigError, match=begun), claim(config):
        raise AssertionError("resumed another run")
    config = make_config(tmp_path)
    config.lora.rank = 4
    with pytest.raises(ConfigError, match="lora.rank is 4, but the run in .* was begun with None"), claim(config):
        raise AssertionError("resumed another run")
