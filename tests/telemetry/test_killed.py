"""What became of hung processes, as the driver reads it and shows it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlflow.config import Config
from rlflow.rundir.directory import claim
from rlflow.rundir.killed import NAME, KilledLog
from rlflow.telemetry.observer import RunObserver


def test_each_whole_line_is_told_once_and_none_of_an_earlier_run(tmp_path: Path) -> None:
    file = tmp_path / NAME
    assert KilledLog(tmp_path).news() == []
    file.write_text("earlier\n")
    log = KilledLog(tmp_path)
    assert log.news() == []
    with file.open("a") as added:
        added.write("reward was killed\nrank 0 was ki")
    assert log.news() == ["reward was killed"]
    with file.open("a") as added:
        added.write("lled\n")
    assert log.news() == ["rank 0 was killed"]
    assert log.news() == []


def test_a_killed_process_is_told_before_what_follows_from_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = Config()
    config.run.dir, config.trackers.tensorboard = str(tmp_path / "run"), False
    with claim(config) as run_dir, RunObserver(config, run_dir) as observer:
        (run_dir.path / NAME).write_text("rank 0 was killed\n")
        observer.alarm("rank 0 died")
    out = capsys.readouterr().out
    assert out.splitlines()[:2] == ["ALARM: rank 0 was killed", "ALARM: rank 0 died"]
