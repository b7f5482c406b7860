"""The proof kit: shares of time, stages that fail, hang or are killed, what it writes, and its kernels' oracle."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from rlflow.batching.pack import pack
from rlflow.cli import main
from rlflow.errors import ConfigError, RunError
from rlflow.models.resolve import resolve_model
from rlflow.tools.bench.gpu import kernels, kit
from rlflow.tools.bench.gpu.kit import STAGES, Kit, Result, Stage, chosen, limit_of, line_of, run_stage
from rlflow.tools.bench.gpu.machine import write_random
from rlflow.tools.bench.gpu.plan import SHAPES, Plan, Report
from rlflow.tools.bench.gpu.stage import FUNCTIONS
from rlflow.tools.bench.training_sides import Workload, groups_of
from rlflow.workers.engine.setup import stop_token_ids

SCRIPT = """
import json, os, pathlib, signal, subprocess, sys, time
name, folder = sys.argv[1], pathlib.Path(sys.argv[2])
print("what it printed", flush=True)
figures = {"tokens_per_s": 12.5}
(folder / f"{name}.json").write_text(json.dumps({"figures": figures, "skipped": "needs two GPUs" * (name == "skips")}))
if name == "fails":
    raise ValueError("the cause")
if name == "dies":
    os.kill(os.getpid(), signal.SIGKILL)
if name == "hangs":
    sleeping = [sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"]
    child = subprocess.Popen(sleeping, start_new_session=True)
    (folder / "child.pid").write_text(str(child.pid))
    time.sleep(600)
"""


@pytest.fixture
def stage_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module whose stages behave as their names say."""
    (tmp_path / "behaving.py").write_text(SCRIPT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(kit, "GRACE_S", 0.5)
    return "behaving"


def is_alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    return status.is_file() and "State:\tZ" not in status.read_text()


@pytest.mark.parametrize(
    ("name", "status", "why"),
    [
        ("ends", "done", ""),
        ("skips", "skipped", "needs two GPUs"),
        ("fails", "failed", "exit code 1"),
        ("dies", "failed", "killed by signal SIGKILL"),
    ],
)
def test_a_stage_ends_as_it_says(tmp_path: Path, stage_module: str, name: str, status: str, why: str) -> None:
    result = run_stage(name, 60, tmp_path, stage_module)
    assert (result.status, result.why) == (status, why)
    assert result.figures == {"tokens_per_s": 12.5}
    log = Path(result.log).read_text()
    assert log.startswith("what it printed\n") and ("ValueError: the cause" in log) == (name == "fails")


@pytest.mark.slow
def test_a_stage_over_its_limit_ends_with_all_that_it_started_and_keeps_its_figures(
    tmp_path: Path, stage_module: str
) -> None:
    result = run_stage("hangs", 5, tmp_path, stage_module)
    assert (result.status, result.why) == ("failed", "over its limit of 5 s")
    assert result.figures == {"tokens_per_s": 12.5}
    # The child is in a session of its own and ignores SIGTERM.
    assert not is_alive(int((tmp_path / "child.pid").read_text()))


@pytest.mark.slow
def test_an_interrupt_ends_the_stage(tmp_path: Path, stage_module: str) -> None:
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.alarm(3)
    try:
        assert run_stage("hangs", 60, tmp_path, stage_module).why == "interrupted"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def stage(name: str, share: float, least_s: float) -> Stage:
    return Stage(name=name, share=share, least_s=least_s, measures="")


def test_time_is_shared_by_the_stages_that_are_left() -> None:
    first, second = stage("first", 6, 10), stage("second", 2, 30)
    assert limit_of([first, second], 80) == 60
    assert limit_of([second], 60) == 60
    assert limit_of([first, second], 12) == 10  # it runs, and the second will not
    assert limit_of([second], 29) == 0


def test_stages_are_named_whole_or_by_what_they_begin_with() -> None:
    assert [each.name for each in chosen(["weights", "engine/sleep"])] == [
        "weights/ipc",
        "weights/shm",
        "weights/p2p",
        "engine/sleep",
    ]
    assert chosen(None) == list(STAGES)
    with pytest.raises(ConfigError, match=r"got engines; choose among tests/cuda, trainer/kernels"):
        chosen(["engines"])
    assert set(FUNCTIONS) == {each.name for each in STAGES} | {"machine", "model"}


def test_results_are_lines_and_a_table(tmp_path: Path) -> None:
    failed = Result(
        stage="weights/shm", status="failed", why="exit code 1", seconds=3, figures={"pause_s": 0.25}, log="/x/y.log"
    )
    assert line_of(failed, on_gpu=True) == (
        "weights/shm          failed       3 s  exit code 1  pause_s 0.25  log: /x/y.log"
    )
    assert line_of(Result(stage="run/trl", why="no time left"), on_gpu=False).endswith("skipped      0 s  no time left")
    found = Kit(folder=tmp_path / "bench-gpu", machine={"on_gpu": 0.0, "device": "x86"}, model="tiny", results=[failed])
    found.write()
    table = (tmp_path / "bench-gpu.md").read_text()
    assert "every stage is a stand-in on the CPU" in table
    row = "| weights/shm | new weights through the memory of the CPU | failed: exit code 1 | pause_s 0.25 | 3 |"
    assert table.splitlines()[-1] == row
    assert json.loads((tmp_path / "bench-gpu.json").read_text())["stages"][0]["figures"] == {"pause_s": 0.25}


def test_what_other_measurements_do_not_take_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for words, problem in (
        (["queue", "--minutes", "3"], "bench queue takes no --minutes; leave it out, or measure gpu"),
        (["gpu", "run.steps=3"], "bench gpu takes no settings; got run.steps=3"),
        (["gpu", "--minutes", "0"], "--minutes must be positive; got 0"),
        (["gpu", "--only", "trainers"], "--only names stages, or what they begin with; got trainers"),
        (["gpu", "--model", "random-9b"], "--model random-9b is none of random-0.5b, random-1.5b, random-7b"),
    ):
        assert main(["bench", *words]) == 2
        assert problem in capsys.readouterr().err


def test_each_query_sees_its_prompt_and_itself() -> None:
    workload = Workload(groups=1, group_size=2, prompt=2, shortest=3, longest=3)
    packed = pack(groups_of(workload.arrays(9)))
    # The prompt, then two completions of which the last token predicts nothing.
    assert kernels.sees(packed).int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],
        [1, 1, 0, 0, 1, 1],
    ]


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return Plan(folder=str(tmp_path), on_gpu=torch.cuda.is_available(), num_gpus=1, model="tiny")


def test_kernels_agree_with_float64(plan: Plan, tmp_path: Path) -> None:
    report = Report(path=tmp_path / "kernels.json")
    kernels.kernels(plan, report)
    of_float32: Mapping[str, float] = {name: float(each) for name, each in report.figures.items() if "32" in name}
    assert len(of_float32) == 4 and len(report.figures) == 8
    assert Report.read(report.path).figures == report.figures


def test_a_wrong_kernel_is_found(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "sees", lambda packed: torch.ones(len(packed.input_ids), 1).bool().expand(-1, 1))
    with pytest.raises(RunError, match=r"attention_float32 is [\d.]+, more than rounding explains \(0.002\)"):
        kernels.kernels(plan, Report(path=tmp_path / "kernels.json"))


def test_a_model_of_random_weights_is_one_that_a_run_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    monkeypatch.setitem(SHAPES, "small", {**small, "num_key_value_heads": 1})  # pyright: ignore[reportArgumentType]
    folder = write_random("small", tmp_path / "model")
    assert resolve_model(folder) == folder
    assert stop_token_ids(folder) == [2]
    (weights,) = (tmp_path / "model").glob("*.safetensors")
    with safe_open(weights, framework="pt") as file:
        assert file.get_tensor("model.embed_tokens.weight").dtype == torch.bfloat16
        assert file.get_tensor("lm_head.weight").shape == (151936, 16)


def test_the_trainers_stages_need_neither_ray_nor_vllm_nor_hydra() -> None:
    script = """
import sys
for name in ("ray", "vllm", "hydra", "omegaconf", "aiohttp", "rich", "tensorboard", "reasoning_gym"):
    sys.modules[name] = None
from rlflow.cli import main
from rlflow.tools.bench.gpu import kernels, machine, trainer
from rlflow.workers.trainer.actor import build_backend
sys.exit(main(["bench", "gpu", "--only", "nothing"]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2, done.stderr
    assert "--only names stages" in done.stderr
