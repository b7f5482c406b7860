"""The command line: light, and one clear line for every mistake."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import yaml
from checkpoints import commit
from safetensors.numpy import load_file

from rlflow import __version__
from rlflow.cli import main
from rlflow.errors import ConfigError
from rlflow.groups.sampler import SamplerState
from rlflow.models.resolve import check_folder, resolve_model
from rlflow.rundir.store import CheckpointStore, RunState
from rlflow.tools.export import export

Cli = Callable[..., tuple[int, str, str]]
SAMPLER = SamplerState(kind="uniform", tasks="", rows="", put_back=[], curriculum={})
RECIPES = [
    "agent_calculator",
    "aipo_arithmetic_async",
    "async_latency",
    "calculator",
    "dapo_arithmetic",
    "decoupled_arithmetic_async",
    "dialogue",
    "distil_arithmetic",
    "dpo",
    "environment",
    "grpo_32b",
    "grpo_7b",
    "grpo_arithmetic",
    "grpo_arithmetic_async",
    "gsm8k_1gpu",
    "gspo_arithmetic",
    "guess_number",
    "lora_arithmetic",
    "ppo_arithmetic",
    "python_repair",
    "search",
    "sft",
    "smoke",
    "squares",
]
BEGAN = f"rlflow {__version__}: reading settings, tasks and model ...\n"
"""What a person sees at once."""
HEAVY = ("torch", "vllm", "ray", "hydra", "transformers", "numpy")


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Runs `rlflow ARGUMENTS`; exit code, stdout, stderr."""

    def run(*arguments: str, **environment: str) -> tuple[int, str, str]:
        monkeypatch.setenv("HYDRA_FULL_ERROR", "0")  # registers it, so that what the command sets is undone
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        code = main(list(arguments))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.mark.parametrize("arguments", [["--help"], ["recipes"], ["recipes", "smoke"]])
def test_help_and_recipes_import_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom rlflow.cli import main\n"
        f"try:\n    main({arguments!r})\nexcept SystemExit:\n    pass\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_help_of_train_imports_neither_torch_nor_ray() -> None:
    code = (
        "import sys\nfrom rlflow.cli import main\nmain(['train', 'recipe=smoke', '--help', 'trainer'])\n"
        "print([name for name in ('torch', 'vllm', 'ray', 'transformers', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    lines = done.stdout.splitlines()
    assert (lines[0], lines[-1]) == ("trainer: What computes gradients and updates the weights.", "[]")
    assert "  trainer.learning_rate=1.0e-06" in lines


def test_recipes_lists_and_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed] == RECIPES
    assert main(["recipes", "smoke"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["model"]["path"] == "tiny"


def test_algorithms_are_listed_with_their_options(cli: Cli) -> None:
    code, out, _ = cli("algorithms")
    assert code == 0
    assert "  gspo (clip_low=0.0003, clip_high=0.0004)\n      max(-A s, -A clip(s, 1 - clip_low, 1 + clip_high))" in out


def test_an_unknown_recipe_to_print(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "smok"]) == 2
    error = capsys.readouterr().err
    assert error == f"rlflow: error: there is no recipe smok; did you mean smoke? There are: {', '.join(RECIPES)}\n"


REFUSED = [
    ([], f"no recipe given; add recipe=<name> with one of: {', '.join(RECIPES)}"),
    (["recipe=smok"], f"there is no recipe smok; did you mean smoke? There are: {', '.join(RECIPES)}"),
    (["recipe=smoke", "run.stepz=3"], "run.stepz is not a setting; did you mean run.steps?"),
    (
        ["recipe=smoke", "actor_rollout_ref.rollout.n=4"],
        "actor_rollout_ref.rollout.n is not a setting; verl's actor_rollout_ref.rollout.n is algorithm.group_size here",
    ),
    (
        ["recipe=smoke", "--init_kl_coef", "0.1"],
        "write --init_kl_coef as key=value: init_kl_coef is not a setting; OpenRLHF's init_kl_coef is "
        "algorithm.kl_coefficient here",
    ),
    (
        ["recipe=smoke", "--learning-rate=1e-5"],
        "write --learning-rate=1e-5 as key=value: learning_rate is not a setting; did you mean trainer.learning_rate?",
    ),
    (["recipe=smoke", "+run.stepz=3"], "run.stepz is not a setting; did you mean run.steps?"),
    (["recipe=smoke", "run.steps=many"], "run.steps must be a whole number; got many"),
    (["recipe=smoke", "run.steps=null"], "run.steps must be a whole number; got null"),
    (["recipe=smoke", "run.on_exists=never"], "run.on_exists must be one of resume, fail, fresh; got never"),
    (["recipe=smoke", "trackers.tensorboard=perhaps"], "trackers.tensorboard must be true or false; got perhaps"),
    (["recipe=smoke", "run.steps=-1"], "run.steps must be positive; got -1"),
    (
        ["recipe=smoke", "env=dataset"],
        "env is a section and takes no value itself; set one of its keys, such as env.name",
    ),
    (
        ["recipe=smoke", "run.steps"],
        "cannot read 'run.steps'; write key=value, and quote values with special characters",
    ),
    (
        ["--experimental-rerun", "config.pickle"],
        "--experimental-rerun is not supported: it would run a pickle file; to go on with a run, give run.dir",
    ),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_a_mistake_costs_one_line_and_exit_code_2(arguments: list[str], message: str, cli: Cli) -> None:
    began = "" if any(word.startswith("-") for word in arguments) else BEGAN
    assert cli("train", *arguments) == (2, began, f"rlflow: error: {message}\n")


def test_a_mistake_in_a_recipe_file_names_the_file(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text("# @package _global_\nrun:\n  stepz: 3\n")
    code, _, error = cli("train", "--config-dir", str(tmp_path), "recipe=mine")
    assert (code, error) == (2, "rlflow: error: in recipe/mine: run.stepz is not a setting; did you mean run.steps?\n")


def test_a_recipe_file_without_its_package_line_is_told_so(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text("run:\n  steps: 3\n")
    code, _, error = cli("train", "--config-dir", str(tmp_path), "recipe=mine")
    cure = "the keys are below `recipe`; make `# @package _global_` the first line of that file"
    assert (code, error) == (2, f"rlflow: error: in recipe/mine: {cure}\n")


def test_a_traceback_is_shown_on_request(cli: Cli) -> None:
    code, _, error = cli("train", "recipe=smok", RLFLOW_TRACEBACK="1")
    assert code == 2
    assert "Traceback" in error
    assert error.splitlines()[-1].startswith("rlflow: error: there is no recipe smok")


def test_cfg_job_prints_the_composed_configuration(cli: Cli) -> None:
    free = ("env.args.seed=3", "curriculum.kind=difficulty", "curriculum.args.explore=0.3")
    code, out, _ = cli("train", *free, "--cfg", "job", "recipe=smoke", "run.steps=2")
    composed = yaml.safe_load(out)
    assert code == 0
    assert composed["run"]["steps"] == 2
    assert (composed["env"]["name"], composed["env"]["args"]) == ("arithmetic", {"seed": 3})
    assert composed["curriculum"] == {"kind": "difficulty", "args": {"explore": 0.3}}


@pytest.mark.parametrize(
    "typed", ["rollout.engine_args.kv_cache_dtype=fp8", "rollout.engine_args={kv_cache_dtype: fp8}"]
)
def test_a_mapping_of_arguments_takes_new_keys(typed: str, cli: Cli) -> None:
    schedule = ("trainer.schedule=linear", "trainer.schedule_args.floor=0.1")
    code, out, error = cli("train", "--cfg", "job", "recipe=smoke", typed, *schedule)
    assert (code, error) == (0, "")
    composed = yaml.safe_load(out)
    assert composed["rollout"]["engine_args"] == {"kv_cache_dtype": "fp8"}
    assert composed["trainer"]["schedule_args"] == {"floor": 0.1}


def test_the_run_is_named_after_its_recipe(cli: Cli) -> None:
    _, out, _ = cli("train", "--cfg", "job", "--resolve", "recipe=smoke")
    assert yaml.safe_load(out)["run"]["name"] == "smoke"


def test_a_sweep_goes_through_all_its_jobs(tmp_path: Path, cli: Cli) -> None:
    code, _, error = cli("train", "recipe=smoke", "--multirun", "run.steps=-1,-2", f"hydra.sweep.dir={tmp_path}")
    assert code == 2
    assert error.splitlines() == [
        "rlflow: error: run.steps must be positive; got -1",
        "rlflow: error: run.steps must be positive; got -2",
    ]


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("rlflow re", "recipes report"),
        ("rlflow train recipe=sm", "recipe=smoke"),
        ("rlflow submit recipe=sm", "recipe=smoke"),
        ("rlflow train recipe=smoke run.s", "run.seed= run.show_samples_every= run.steps= run.stop_when="),
    ],
)
def test_the_shell_completes_verbs_recipes_and_keys(line: str, answer: str, cli: Cli) -> None:
    code, out, _ = cli("-sc", "query=bash", COMP_LINE=line)
    assert (code, out.strip()) == (0, answer)


@pytest.mark.parametrize("verb", ["report", "ledger"])
def test_a_run_that_does_not_exist(verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, str(tmp_path / "none")]) == 2
    assert f"{tmp_path / 'none'} is not a run's directory" in capsys.readouterr().err


def test_ledger_counts_states(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from rlflow.groups.ledger import Ledger

    assert main(["ledger", str(tmp_path)]) == 2
    assert "has no ledger.db" in capsys.readouterr().err
    Ledger(tmp_path / "ledger.db")
    assert main(["ledger", str(tmp_path), "--json"]) == 0
    counts = json.loads(capsys.readouterr().out)
    assert sum(counts.values()) == 0


def write_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of the tiny model with a checkpoint of step 2, written by two ranks; returns the model's folder."""
    import torch

    from rlflow.weights.shape.layout import chunk_of
    from rlflow.workers.trainer.shards import PARAMETER, Shard, Snapshot

    monkeypatch.setenv("RLFLOW_CACHE", str(folder / "cache"))
    model = Path(resolve_model("tiny"))
    weights = {name: torch.from_numpy(array) for name, array in load_file(model / "model.safetensors").items()}
    store = CheckpointStore(folder / "run" / "checkpoints", keep=1)
    partial = store.begin(2)
    for rank in range(2):
        shards = []
        for name, weight in weights.items():
            start, stop = chunk_of(len(weight), rank, 2)
            elements = {PARAMETER: weight[start:stop].flatten()}
            first = start * weight[0].numel()
            shards.append(Shard(name=name, shape=tuple(weight.shape), start=first, tensors=elements))
        Snapshot(rank=rank, num_ranks=2, shards=shards, updates=2, steps=2).write(partial / "trainer")
    commit(store, partial, RunState(step=2, version=2, sampler=SAMPLER, ready=[]))
    (folder / "run" / "config.yaml").write_text("run:\n  name: smoke\n  steps: 2\nmodel:\n  path: tiny\n")
    return model


def test_export_writes_what_transformers_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    model = write_run(tmp_path, monkeypatch)
    out = tmp_path / "models" / "exported"
    assert cli("export", str(tmp_path / "run"), str(out))[:2] == (0, f"{out}\n")
    check_folder(out)
    from transformers import AutoConfig, AutoTokenizer

    assert str(AutoConfig.from_pretrained(out).dtype) == "torch.bfloat16"
    assert AutoTokenizer.from_pretrained(out).eos_token == "<|im_end|>"
    import torch
    from safetensors.torch import load_file as load_torch

    before, after = load_torch(model / "model.safetensors"), load_torch(out / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], before[name].to(torch.bfloat16)) for name in before)
    assert [path.name for path in out.parent.iterdir()] == ["exported"]


def test_export_in_float32_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_run(tmp_path, monkeypatch)
    export(tmp_path / "run", tmp_path / "out", step="2", dtype="float32")
    before, after = load_file(model / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_export_splits_a_large_model_into_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path, monkeypatch)
    monkeypatch.setattr("rlflow.tools.export._MAX_FILE_BYTES", 200_000)
    out = export(tmp_path / "run", tmp_path / "out", step=None, dtype="float32")
    check_folder(out)
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert files == [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM.from_pretrained(out).num_parameters() == 115_200


@pytest.mark.parametrize(("umask", "file_mode", "folder_mode"), [(0o022, 0o644, 0o755), (0o077, 0o600, 0o700)])
def test_who_may_read_an_exported_model_is_what_the_umask_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, umask: int, file_mode: int, folder_mode: int
) -> None:
    write_run(tmp_path, monkeypatch)
    before = os.umask(umask)
    try:
        out = export(tmp_path / "run", tmp_path / "out", step=None, dtype="bfloat16")
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in out.iterdir()} == {file_mode}
    assert out.stat().st_mode & 0o777 == folder_mode


def test_an_exported_model_says_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path, monkeypatch)
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1, "reward": 0.25}\n{"step": 2, "reward": 0.5}\n')
    (tmp_path / "run" / "evaluations.jsonl").write_text(
        '{"step": 0, "eval/reward": 0.125}\n{"step": 2, "eval/reward": 0.75}\n'
    )
    card = (export(tmp_path / "run", tmp_path / "out", step=None, dtype="float32") / "README.md").read_text()
    _, header, body = card.split("---\n", 2)
    assert yaml.safe_load(header) == {"library_name": "transformers", "tags": ["rlflow", "reinforcement-learning"]}
    assert "A version of `tiny`" in body
    assert "recipe `smoke`" in body
    assert "checkpoint of step 2" in body
    assert "| reward, mean of the last 5 steps | 0.375 |" in body
    assert "| held-out reward before | 0.125 |\n| held-out reward at the end | 0.75 |" in body
    assert "Add `license:` to the header" in body


def test_a_push_without_the_hub_ends_before_any_work(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "run").mkdir()
    code, out, error = cli("export", str(tmp_path / "run"), str(tmp_path / "out"), "--push", "me/model")
    told = "--push needs the hub, and HF_HUB_OFFLINE is set; unset it, or leave --push out"
    assert (code, out, error) == (2, "", f"rlflow: error: {told}\n")
    code, _, error = cli("export", str(tmp_path / "run"), str(tmp_path / "out"), "--push", "a/b/c")
    assert (code, error.count("\n")) == (2, 1)
    assert "--push must be ORG/NAME" in error


def test_export_refuses_what_it_cannot_write(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with pytest.raises(ConfigError, match="already exists; give a new folder, or remove it first"):
        export(tmp_path / "run", tmp_path, step=None, dtype="float32")
    with pytest.raises(ConfigError, match="has no complete checkpoint"):
        export(tmp_path / "run", tmp_path / "out", step=None, dtype="float32")
    (tmp_path / "run" / "checkpoints" / "step_2").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"has no checkpoint of step 3; it has 2$"):
        export(tmp_path / "run", tmp_path / "out", step="3", dtype="float32")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_figures_are_printed_for_people_too(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = {"seeds": 3, "4/speed_up": 2.51234, "4/final_reward": [0.5, 0.61234]}
    monkeypatch.setattr("rlflow.tools.bench.runs.asynchrony", lambda overrides: figures)
    assert cli("bench", "async")[1].splitlines() == [
        "seeds                    3",
        "4/speed_up               2.512",
        "4/final_reward           0.5 0.612",
    ]


def test_an_installation_without_torch_is_told_what_to_install(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_recipe(name: str) -> str:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr("rlflow.settings.recipe_files.recipe_text", read_recipe)
    message = "torch is not installed; pip install 'rlflow[gpu]', or 'rlflow[cpu]' on a machine without GPUs"
    assert cli("recipes", "torch") == (2, "", f"rlflow: error: {message}\n")
    with pytest.raises(ModuleNotFoundError, match="No module named 'mine'"):
        cli("recipes", "mine")


def test_a_folder_that_has_been_removed_costs_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    command = f"rmdir ../gone && exec {sys.executable} -m rlflow train recipe=smoke"
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    ended = subprocess.run(command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert "the current folder has been removed; change to one that is there" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
