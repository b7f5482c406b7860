"""`rlflow runs` and `rlflow compare` on folders as runs leave them."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from rlflow.cli import main
from rlflow.config import Config
from rlflow.errors import RunError
from rlflow.rundir.directory import claim, plain
from rlflow.rundir.lock import hold, is_held
from rlflow.telemetry.status import Status, StatusFile, read_status
from rlflow.tools.runs.compare import welch
from rlflow.tools.runs.read import read_run
from rlflow.tools.runs.status import lines


def write_run(
    folder: Path, rewards: Sequence[float], evaluations: dict[int, float] | None = None, **settings: object
) -> Path:
    """A run of `len(rewards)` steps; settings are dotted keys with __ for the dot."""
    config = plain(Config())
    config["run"] |= {"name": "smoke", "steps": 10}
    for key, value in settings.items():
        section, name = key.split("__")
        config[section][name] = value
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    lines = [json.dumps({"step": step, "reward": reward}) for step, reward in enumerate(rewards, start=1)]
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    if evaluations:
        lines = [json.dumps({"step": step, "eval/reward": reward}) for step, reward in evaluations.items()]
        (folder / "evaluations.jsonl").write_text("".join(f"{line}\n" for line in lines))
    os.utime(folder / "config.yaml", (0, 0))
    return folder


def test_runs_are_listed_with_their_state(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(Path("runs/done"), [0.1] * 9 + [0.5], {0: 0.2, 5: 0.8, 10: 0.7}, model__path="tiny")
    write_run(Path("runs/cut"), [0.25])
    write_run(Path("runs/sweep/run.seed=1"), [])
    write_run(Path("runs/early"), [0.25, 0.5], {2: 0.75}, run__stop_when="eval/reward>=0.7")
    (Path("runs/cut") / "failure.txt").write_text("no engine is left\nsecond line\n")
    Path("runs/not_a_run").mkdir()
    assert main(["runs", "--json"]) == 0
    listed = {each["run"]: each for each in json.loads(capsys.readouterr().out)}
    assert {name: each["state"] for name, each in listed.items()} == {
        "runs/done": "finished",
        "runs/cut": "failed",
        "runs/early": "finished",
        "runs/sweep/run.seed=1": "interrupted",
    }
    done = listed["runs/done"]
    assert (done["recipe"], done["model"], done["step"], done["steps"]) == ("smoke", "tiny", 10, 10)
    assert (done["reward"], done["best_evaluation"], done["last_evaluation"]) == (0.5, 0.8, 0.7)
    with hold(Path("runs/cut")):
        assert main(["runs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["run", "recipe", "model", "step", "reward", "eval", "best/last", "when", "state"]
    assert next(line for line in lines if line.startswith("runs/cut ")).endswith("running")
    assert next(line for line in lines if line.startswith("runs/done ")).split()[1:6] == [
        "smoke", "tiny", "10/10", "0.5", "0.8/0.7",
    ]  # fmt: skip
    assert main(["runs"]) == 0
    cut = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("runs/cut "))
    assert cut.endswith("failed: no engine is left second line")


def test_a_folder_that_is_no_run_is_left_out_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "good", [0.5])
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "config.yaml").write_text("model: 3\n")
    assert main(["runs", str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert len(said.out.splitlines()) == 2
    assert f"left out: {tmp_path / 'bad'} is not a run's directory" in said.err
    assert main(["runs", str(tmp_path / "none")]) == 2


def test_a_killed_run_is_not_running(tmp_path: Path) -> None:
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom rlflow.rundir.lock import hold\n"
        "with hold(Path(sys.argv[1])):\n    os._exit(0)\n"
    )
    assert not is_held(tmp_path)
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=60)
    assert (tmp_path / ".lock").read_text() != ""
    assert not is_held(tmp_path)
    with hold(tmp_path):
        assert is_held(tmp_path)


def test_why_a_run_failed_is_kept_until_it_goes_on(tmp_path: Path) -> None:
    config = Config()
    config.run.dir = str(tmp_path / "run")
    with pytest.raises(RunError), claim(config):
        raise RunError("no engine is left")
    assert (tmp_path / "run" / "failure.txt").read_text() == "no engine is left\n"
    with claim(config):
        assert not (tmp_path / "run" / "failure.txt").exists()


# -- compare


def test_seeds_are_one_band_and_the_difference_is_tested(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow = [write_run(tmp_path / f"slow{s}", [0.1, 0.1 + s / 100], run__seed=s) for s in range(3)]
    fast = [
        write_run(tmp_path / f"fast{s}", [0.1, 0.9 + s / 100], run__seed=s, trainer__learning_rate=0.5)
        for s in range(3)
    ]
    assert main(["compare", *map(str, [*slow, *fast])]) == 0
    said = capsys.readouterr().out
    assert [line.split() for line in said.splitlines() if line.startswith("step 2")] == [
        ["step", "2", "0.11", "(0.1", "to", "0.12)", "0.91", "(0.9", "to", "0.92)"]
    ]
    assert [line.split() for line in said.splitlines() if "learning_rate" in line] == [
        ["trainer.learning_rate", str(Config().trainer.learning_rate), "0.5"]
    ]
    assert "B - A: +0.400 (0.505 - 0.105; the mean of the last 5 steps): more than noise" in said
    assert "over 3 and 3 seeds" in said
    assert main(["compare", *map(str, slow)]) == 0
    assert "no setting differs but the seed" in capsys.readouterr().out


def test_one_seed_each_is_not_told_from_noise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write_run(tmp_path / "a", [0.5], {0: 0.25, 5: 0.5, 10: 0.75})
    b = write_run(tmp_path / "b", [0.5], {0: 0.25, 10: 0.5}, trainer__clip_grad_norm=9.0)
    assert main(["compare", str(a), str(b)]) == 0
    said = capsys.readouterr().out
    assert "B - A: -0.250 (0.5 - 0.75; the last evaluation): with one seed this cannot be told from noise" in said
    assert "each varies by 0.250 and 0.177" in said
    assert "▁" in said
    assert main(["compare", str(a), str(b), "--metric", "entropy"]) == 2
    assert f"{a} has no entropy" in capsys.readouterr().err
    assert main(["compare", str(a)]) == 2


def test_a_band_that_overlaps_is_noise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rewards = {"a": (0.4, 0.6), "b": (0.5, 0.8)}
    runs = [
        write_run(tmp_path / f"{name}{seed}", [reward], run__seed=seed, algorithm__group_size=4 + (name == "b"))
        for name, pair in rewards.items()
        for seed, reward in enumerate(pair)
    ]
    assert main(["compare", *map(str, runs)]) == 0
    assert "B - A: +0.150 (0.65 - 0.5; the mean of the last 5 steps): not more than noise" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("a", "b", "p"),
    [
        # Student's t with 2 degrees of freedom: p = 1 - t / sqrt(2 + t^2); here t = 1 / sqrt(0.5).
        ([0.0, 1.0], [1.0, 2.0], 1 - 2**0.5 / 2),
        ([1.0, 1.0], [1.0, 1.0], 1.0),
        ([1.0, 1.0], [2.0, 2.0], 0.0),
        # scipy.stats.ttest_ind(a, b, equal_var=False)
        ([1, 2, 3, 4, 5], [2, 4, 6, 8, 10], 0.10753),
    ],
)
def test_welchs_p_value(a: list[float], b: list[float], p: float) -> None:
    assert welch(a, b) == pytest.approx(p, abs=1e-5)


def test_a_page_lays_the_curves_of_arms_over_each_other_below_the_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = [write_run(tmp_path / f"<slow>{s}", [0.1, 0.1 + s / 100], {0: 0.25}, run__seed=s) for s in range(3)]
    fast = [write_run(tmp_path / f"fast{s}", [0.1, 0.9 + s / 100], run__seed=s, model__path="tiny") for s in range(2)]
    page = tmp_path / "pages" / "both.html"
    assert main(["compare", *map(str, [*slow, *fast]), "--html", str(page)]) == 0
    assert capsys.readouterr().out.endswith(f"\n{page}\n")
    text = page.read_text()
    parts = "<h1>reward of A and B</h1>", "Welch&#x27;s", 'id="charts"', "model.path"
    places = [text.index(part) for part in parts]
    assert places == sorted(places)
    assert f"{tmp_path}/&lt;slow&gt;0 (seed 0" in text
    data = json.loads(text.partition('id="data">')[2].partition("</script>")[0])
    assert (data["first"], data["last"]) == ([0, 1, 2], [0, 1, 2])
    assert data["columns"]["A reward"]["values"] == [None, 0.1, 0.11]
    assert (data["columns"]["A reward"]["low"][2], data["columns"]["A reward"]["high"][2]) == (0.1, 0.12)
    assert [(chart["title"], chart["metrics"]) for chart in data["charts"]] == [
        ("Reward: training", {"A reward": "A", "B reward": "B"}),
        ("Reward: held-out tasks", {"A eval/reward": "A"}),
    ]


def test_one_run_of_each_has_no_band_on_the_page(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, [0.5, 0.75], trainer__clip_grad_norm=float(name)) for name in ("1", "2")]
    assert main(["compare", *map(str, runs), "--html", str(tmp_path / "page.html")]) == 0
    data = json.loads((tmp_path / "page.html").read_text().partition('id="data">')[2].partition("</script>")[0])
    assert (data["columns"]["B reward"]["values"], data["columns"]["B reward"]["low"]) == ([0.5, 0.75], [])


def test_a_page_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [write_run(tmp_path / name, [0.5, 0.75]) for name in ("one", "two")]
    assert main(["compare", *map(str, runs), "--html", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"rlflow: error: --html={tmp_path} cannot be written (Is a directory); give another file"


def test_the_status_of_a_run_that_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "run", [0.25, 0.5], {2: 0.75})
    began = {"step": 1, "name": "entropy", "state": "began", "since": 1, "level": 1, "what": "0.01 nats"}
    ended = {**began, "name": "truncation", "state": "ended"}
    alarms = [{**each, "cause": "a rate", "remedy": "a lower one"} for each in (began, ended)]
    (folder / "alarms.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in alarms))
    found = read_run(folder)
    running = replace(found, state="running")
    head = f"{folder}: running, step 2 of 10, reward 0.5, held-out 0.75 at step 2"
    alarm = "alarm: entropy since step 1: 0.01 nats. Likely cause: a rate. Try: a lower one"
    assert lines(running, None, 100.0) == [head, alarm, "it has not said yet what it does"]
    status = Status(written_s=97.0, phase="waiting", phase_since_s=90.0, doing=["engine 0: up"])
    assert lines(running, status, 100.0) == [head, alarm, "waiting, for 7.0 s (3.0 s ago)", "engine 0: up"]
    assert lines(running, status, 200.0)[2].startswith("its driver has written nothing for 1m 43s, if the clocks")
    assert lines(found, status, 100.0)[0].startswith(f"{folder}: interrupted")
    assert len(lines(found, status, 100.0)) == 2
    assert main(["status", str(folder), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["state"], facts["step"], facts["silent_s"], len(facts["alarms"])) == ("interrupted", 2, None, 1)


async def test_a_status_is_written_while_a_run_goes_on_and_a_full_disk_does_not_end_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    (tmp_path / "status.json").write_text("of an earlier start")
    file = StatusFile(tmp_path, told.append)
    assert read_status(tmp_path) is None
    file.phase("starting")
    assert (status := read_status(tmp_path)) is not None
    assert (status.phase, status.doing) == ("starting", [])
    file.describe = lambda: "engine 0: up\nengine 1: gone"
    keeping = asyncio.create_task(file.keep())
    await asyncio.sleep(0)
    file.phase("training")
    assert (status := read_status(tmp_path)) is not None
    assert (status.phase, status.doing) == ("training", ["engine 0: up", "engine 1: gone"])
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)

    def refuse(*_: object) -> None:
        raise RunError("the disk is full")

    monkeypatch.setattr("rlflow.telemetry.status.write_whole", refuse)
    for phase in ("saving", "training"):
        file.phase(phase)
    assert len(told) == 1 and "status.json cannot be written: the disk is full" in told[0]
    (tmp_path / "status.json").write_text("[]")
    with pytest.raises(RunError, match="does not hold the status of a run"):
        read_status(tmp_path)
