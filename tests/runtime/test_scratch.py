"""What runs leave behind: who owns it, who removes it, and what is never touched. Processes are killed for real."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rlflow.errors import ConfigError, RunError
from rlflow.runtime import scratch

TIMEOUT_S = 60


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A /tmp and a /dev/shm of the test's own."""
    for name, place in (("ROOT", tmp_path / "tmp"), ("SHARED", tmp_path / "shm")):
        place.mkdir()
        monkeypatch.setattr(scratch, name, place)
    monkeypatch.delenv(scratch.VARIABLE, raising=False)


_DRIVER = """
import sys
from pathlib import Path
from rlflow.runtime import scratch
scratch.ROOT, scratch.SHARED, run_dir = map(Path, sys.argv[1:4])
with scratch.opened(run_dir) as folder:
    (folder / "token").write_text("secret")
    logs = folder / "ray/session_2026/logs"
    logs.mkdir(parents=True)
    (logs / "worker-1.err").write_text("the cause")
    (folder / "ray/session_latest").symlink_to("session_2026")
    (scratch.SHARED / f"{folder.name}-weights").write_bytes(bytes(8192))
    print(folder, flush=True)
    sys.stdin.read()
"""


@contextmanager
def driver(run_dir: Path, script: str = _DRIVER) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process with a run, and its folder."""
    words = [sys.executable, "-c", script, str(scratch.ROOT), str(scratch.SHARED), str(run_dir)]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, Path(process.stdout.readline().strip())
    finally:
        process.kill()
        process.communicate(timeout=TIMEOUT_S)


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    assert process.wait(TIMEOUT_S) == -signal.SIGKILL


def left() -> list[str]:
    return sorted(path.name for place in (scratch.ROOT, scratch.SHARED) for path in place.iterdir())


def test_a_run_has_one_folder_that_only_its_user_can_enter_and_that_goes_with_it(tmp_path: Path) -> None:
    with scratch.opened(tmp_path) as folder:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert folder == scratch.folder() == scratch.ROOT / f"{os.environ[scratch.VARIABLE]}-{os.geteuid()}"
        assert left() == [folder.name]
    assert left() == []
    assert scratch.VARIABLE not in os.environ


def test_the_next_run_removes_what_a_killed_one_left_with_its_shared_memory_and_nothing_of_a_living_one(
    tmp_path: Path,
) -> None:
    with driver(tmp_path / "a") as (killed, killed_folder), driver(tmp_path / "b") as (_, living):
        kill(killed)
        names = [killed_folder.name, f"{killed_folder.name}-weights", living.name, f"{living.name}-weights"]
        assert left() == sorted(names)
        found = scratch.leavings(remove=False)
        assert list(found) == [killed_folder]
        assert found[killed_folder] >= 8192
        assert left() == sorted(names)
        with scratch.opened(tmp_path / "c") as own:
            assert left() == sorted([own.name, living.name, f"{living.name}-weights"])
        assert (living / "token").read_text() == "secret"


def test_a_folder_is_in_use_until_the_last_process_of_its_run_has_ended(tmp_path: Path) -> None:
    worker = """
import os, sys
from pathlib import Path
from rlflow.runtime import scratch
scratch.ROOT, scratch.SHARED, folder = map(Path, sys.argv[1:4])
os.environ[scratch.VARIABLE] = folder.name.rpartition("-")[0]
scratch.enter("engine-0")
print(os.environ["TMPDIR"], flush=True)
sys.stdin.read()
"""
    with driver(tmp_path / "a") as (killed, folder), driver(folder, worker) as (process, place):
        assert place == folder / "engine-0"
        kill(killed)
        assert scratch.leavings(remove=True) == {}
        kill(process)
        assert list(scratch.leavings(remove=True)) == [folder]
    assert left() == []


def test_a_program_that_a_process_of_the_run_started_does_not_keep_its_folder(tmp_path: Path) -> None:
    started = _DRIVER.replace("print(folder", "import subprocess; subprocess.Popen(['sleep', '60']); print(folder")
    with driver(tmp_path / "a", started) as (killed, folder):
        (child,) = subprocess.check_output(["pgrep", "-P", str(killed.pid)], text=True).split()
        try:
            kill(killed)
            assert list(scratch.leavings(remove=True)) == [folder]
        finally:
            os.kill(int(child), signal.SIGKILL)


def test_the_first_process_on_another_machine_makes_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with driver(tmp_path / "a") as (killed, old):
        kill(killed)
        monkeypatch.setenv(scratch.VARIABLE, "rlflow-run-ba9876543210")
        folder = scratch.folder()
        lock = scratch.hold()
        assert not old.exists()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert scratch.hold() == lock
        assert scratch.leavings(remove=True) == {}
        os.close(scratch._held.pop(folder))
        assert list(scratch.leavings(remove=True)) == [folder]


def test_a_restarted_actor_removes_what_its_predecessor_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TMPDIR", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.setenv(name, "/somewhere")
    monkeypatch.setattr("tempfile.tempdir", "/somewhere")
    with scratch.opened(tmp_path) as folder:
        scratch.enter("engine-1")
        scratch.enter("tmp")
        (folder / "tmp/of-another").touch()
        (folder / "engine-1/vllm_dist_12ab").touch()
        (scratch.SHARED / "vllm_dist_12ab-tp:0-[0-1]-cpushm_0").write_bytes(bytes(100))
        (scratch.SHARED / "vllm_dist_34cd-tp:0-[0-1]-cpushm_0").write_bytes(bytes(100))
        (scratch.SHARED / f"{folder.name}-weights").write_bytes(bytes(100))
        scratch.enter("engine-1")
        assert os.environ["TMPDIR"] == str(folder / "engine-1")
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/somewhere"
        assert list((folder / "engine-1").iterdir()) == []
        assert (folder / "tmp/of-another").exists()
        shared = ["vllm_dist_34cd-tp:0-[0-1]-cpushm_0", f"{folder.name}-weights"]
        assert sorted(path.name for path in scratch.SHARED.iterdir()) == sorted(shared)
        (folder / "engine-1/vllm_dist_56ef").touch()
        (scratch.SHARED / "vllm_dist_56ef-tp:0-[0-1]-cpushm_0").write_bytes(bytes(100))
    assert left() == ["vllm_dist_34cd-tp:0-[0-1]-cpushm_0"]


def test_what_an_actor_compiles_stays_for_later_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/somewhere")
    monkeypatch.setenv("TMPDIR", "/somewhere")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    with scratch.opened(tmp_path):
        scratch.enter("trainer-0")
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == f"/somewhere/torchinductor_{os.geteuid()}"


def test_a_process_of_no_run_has_a_folder_until_it_ends(tmp_path: Path) -> None:
    script = """
import os, sys
from pathlib import Path
from rlflow.runtime import scratch
scratch.ROOT, scratch.SHARED = map(Path, sys.argv[1:3])
folder = scratch.folder()
if os.fork() == 0:
    sys.exit()  # a copy that ends removes nothing
os.wait()
assert folder.is_dir()
print(folder, flush=True)
sys.stdin.read()
"""
    with driver(tmp_path, script) as (process, folder):
        assert left() == [folder.name]
        process.communicate(timeout=TIMEOUT_S)
        assert (process.returncode, left()) == (0, [])
    with driver(tmp_path, script) as (process, folder):
        kill(process)
        assert list(scratch.leavings(remove=True)) == [folder]


def test_no_link_is_followed_and_nothing_of_others_is_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    precious = tmp_path / "precious"
    (precious / "logs").mkdir(parents=True)
    (precious / "logs/file").write_text("kept")
    prepared = scratch.ROOT / f"rlflow-run-0123456789ab-{os.geteuid()}"
    prepared.symlink_to(precious)
    (scratch.SHARED / f"{prepared.name}-weights").symlink_to(precious / "logs/file")
    (scratch.ROOT / "rlflow-run-file").touch()
    (scratch.ROOT / "rlflow-runs").mkdir()
    before = left()
    assert scratch.leavings(remove=True) == {}
    monkeypatch.setenv(scratch.VARIABLE, "rlflow-run-0123456789ab")
    with pytest.raises(ConfigError, match="-[0-9]+ must be a folder that only this user can enter"):
        scratch.hold()
    assert left() == before

    (tmp_path / "a").mkdir()
    with driver(tmp_path / "a") as (killed, folder):
        kill(killed)
        (folder / "link").symlink_to(precious)
        (folder / "locked").mkdir(mode=0o000)
        (folder / "ray/session_2026/logs/linked.err").symlink_to(precious / "logs/file")
        with scratch.opened(tmp_path / "a"):
            pass
        assert not folder.exists()
    assert left() == before
    assert (precious / "logs/file").read_text() == "kept"
    assert [path.name for path in (tmp_path / "a/logs").iterdir()] == ["worker-1.err"]


@pytest.mark.parametrize("mode", [0o777, 0o750])
def test_a_folder_that_others_can_enter_is_refused(mode: int, monkeypatch: pytest.MonkeyPatch) -> None:
    open_to_all = scratch.ROOT / f"rlflow-run-0123456789ab-{os.geteuid()}"
    open_to_all.mkdir()
    open_to_all.chmod(mode)
    monkeypatch.setenv(scratch.VARIABLE, "rlflow-run-0123456789ab")
    with pytest.raises(ConfigError, match="only this user can enter"):
        scratch.hold()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a folder of somebody else")
def test_a_folder_of_another_user_is_left_alone_and_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = scratch.ROOT / f"rlflow-run-0123456789ab-{os.geteuid()}"
    theirs.mkdir(mode=0o700)
    memory = scratch.SHARED / f"{theirs.name}-weights"
    memory.touch()
    for path in (theirs, memory):
        os.chown(path, 12345, 12345)
    assert scratch.leavings(remove=True) == {}
    assert left() == [theirs.name, memory.name]
    monkeypatch.setenv(scratch.VARIABLE, "rlflow-run-0123456789ab")
    with pytest.raises(ConfigError, match="only this user can enter"):
        scratch.hold()
    os.chown(theirs, os.geteuid(), os.getegid())
    assert list(scratch.leavings(remove=True)) == [theirs]
    assert left() == [memory.name]


def test_shared_memory_that_its_process_removes_meanwhile_is_nobodys_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    place = scratch.ROOT / "rlflow-run-0123456789ab-1000"
    place.mkdir(mode=0o700)
    memory = scratch.SHARED / f"{place.name}-weights"

    class Removed(type(scratch.SHARED)):
        def iterdir(self) -> Generator[Path, None, None]:
            yield memory

    monkeypatch.setattr(scratch, "SHARED", Removed(scratch.SHARED))
    assert list(scratch.leavings(remove=True)) == [place]
    assert list(scratch.ROOT.iterdir()) == []


def test_a_removal_that_was_interrupted_is_finished() -> None:
    renamed = scratch.ROOT / "rlflow-run-0123456789ab.89abcdef"
    (renamed / "ray").mkdir(parents=True)
    (scratch.SHARED / "rlflow-run-0123456789ab-weights").touch()
    assert list(scratch.leavings(remove=True)) == [renamed]
    assert left() == []


def test_what_a_failed_run_logged_is_kept_and_the_error_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scratch, "MAX_LOG_BYTES", 6)
    monkeypatch.setattr(scratch, "MAX_LOGS_BYTES", 10)
    run = tmp_path / "run"
    (run / "logs").mkdir(parents=True)
    (run / "logs/of-an-earlier-failure").touch()
    with pytest.raises(RunError) as failure, scratch.opened(run) as folder:
        logs = folder / "ray/session_2026-11-22/logs"
        logs.mkdir(parents=True)
        (folder / "token").write_text("secret")
        for age, (name, text) in enumerate([("new.err", "begin end"), ("old.err", "older"), ("oldest.err", "gone")]):
            (logs / name).write_text(text)
            os.utime(logs / name, (1000 - age, 1000 - age))
        (logs / "empty.out").touch()
        raise RunError(f"vLLM died; the cause is in {logs}/new.err")
    kept = {path.name: path.read_text() for path in (run / "logs").iterdir()}
    assert kept == {"new.err": "in end", "old.err": "lder"}
    assert str(failure.value) == f"vLLM died; the cause is in {run}/logs/new.err"
    assert failure.value.__notes__ == [f"what the processes of the run have logged is in {run}/logs"]
    assert left() == []


def test_a_wrong_setting_keeps_no_logs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as failure, scratch.opened(tmp_path) as folder:
        (folder / "ray/session_2026/logs").mkdir(parents=True)
        (folder / "ray/session_2026/logs/raylet.out").write_text("text")
        raise ConfigError("the person knows what to do")
    assert not hasattr(failure.value, "__notes__")
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize(("next_run", "kept"), [("a", True), ("b", False)])
def test_what_a_killed_run_logged_is_kept_by_the_next_start_in_its_directory(
    tmp_path: Path, next_run: str, kept: bool
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    with driver(tmp_path / "a") as (killed, _):
        kill(killed)
    with scratch.opened(tmp_path / next_run):
        pass
    assert left() == []
    assert not (tmp_path / "b/logs").exists()
    assert (tmp_path / "a/logs").exists() == kept
    if kept:
        assert [path.name for path in (tmp_path / "a/logs").iterdir()] == ["worker-1.err"]
        assert (tmp_path / "a/logs/worker-1.err").read_text() == "the cause"
