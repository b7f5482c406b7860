"""`rlflow train --multirun`: folders, table and objective, with a run that only writes its files."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from hydra.plugins.sweeper import Sweeper

from rlflow.cli import main
from rlflow.config import Config
from rlflow.errors import RunError
from rlflow.rundir.directory import claim


def play(config: Config) -> int:
    """A run whose reward is its learning rate, and whose evaluation, if it has any, is twice that."""
    with claim(config) as run_dir:
        rate = config.trainer.learning_rate
        if rate == 0.5:
            raise RunError("no engine is left")
        run_dir.metrics.write_text(json.dumps({"step": config.run.steps, "reward": rate}) + "\n")
        if config.eval.every:
            run_dir.evaluations.write_text(json.dumps({"step": config.run.steps, "eval/reward": 2 * rate}) + "\n")
    return 0


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rlflow.tools.train._start", play)

    def run(*words: str) -> SimpleNamespace:
        code = main(["train", "recipe=smoke", "--multirun", "hydra.sweep.dir=swept", *words])
        said = capsys.readouterr()
        return SimpleNamespace(code=code, lines=said.out.splitlines(), error=said.err)

    return run


def test_each_job_has_a_folder_named_by_what_is_swept_and_a_line_in_the_table(sweep, tmp_path: Path) -> None:
    ended = sweep("trainer.learning_rate=0.25,0.5", "run.seed=1,2", "run.steps=4", "env.args.operators='+'")
    assert ended.code == 1
    assert [line.split() for line in ended.lines] == [
        ["run", "reward", "eval/reward", "state"],
        ["trainer.learning_rate=0.25_run.seed=1", "0.25", "-", "finished"],
        ["trainer.learning_rate=0.25_run.seed=2", "0.25", "-", "finished"],
        ["trainer.learning_rate=0.5_run.seed=1", "-", "-", "failed"],
        ["trainer.learning_rate=0.5_run.seed=2", "-", "-", "failed"],
        ["in", f"{tmp_path}/swept;", "rlflow", "compare", "lays", "their", "curves", "side", "by", "side"],
    ]
    assert ended.error.count("no engine is left") == 2


def test_a_sweep_with_evaluations_says_them(sweep) -> None:
    ended = sweep("trainer.learning_rate=0.25", "run.seed=1", "eval.every=2")
    assert ended.lines[1].split() == ["0", "0.25", "0.5", "finished"]


def test_a_folder_that_was_given_is_not_shared(sweep) -> None:
    ended = sweep("run.seed=1,2", "run.dir=mine")
    assert ended.code == 2
    assert "run.dir=mine is used by two jobs of this sweep; leave it out, and each gets its own" in ended.error


def test_a_job_that_a_signal_ended_ends_the_sweep(sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlflow.tools.train._start", lambda config: play(config) or 130)
    ended = sweep("run.seed=1,2")
    assert (ended.code, len(ended.lines)) == (130, 3)


def test_a_sweeper_gets_the_evaluation_or_else_the_reward(sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hydra's Optuna sweeper calls the launcher so, and maximizes or minimizes the return values."""
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

    assert issubclass(BasicSweeper, Sweeper)
    values: list[object] = []

    def ask(self: BasicSweeper, arguments: list[str]) -> list[object]:
        assert self.launcher is not None
        for number, (rate, every) in enumerate([("0.125", "0"), ("0.125", "1"), ("0.5", "1"), ("0.125", "0")]):
            job = [[*arguments, f"trainer.learning_rate={rate}", f"eval.every={every}"]]
            values.extend(each.return_value for each in self.launcher.launch(job, initial_job_idx=number))
        return values

    monkeypatch.setattr(BasicSweeper, "sweep", ask)
    ended = sweep("run.steps=4")
    assert values == [0.125, 0.25, None, 0.125]
    assert [line.split()[0] for line in ended.lines[1:-1]] == [
        "trainer.learning_rate=0.125_eval.every=0",
        "trainer.learning_rate=0.125_eval.every=1",
        "trainer.learning_rate=0.5_eval.every=1",
        "trainer.learning_rate=0.125_eval.every=0_3",
    ]
