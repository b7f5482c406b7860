"""Model folders that bring code of their own, opened by everything that opens a model."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from composed import compose_recipe

import rlflow
from rlflow.models.resolve import resolve_model

TRUST = "model.trust_remote_code"
OPENING = ("from_pretrained", "from_config")
CODE = """
from pathlib import Path
Path({note!r}).write_text("its code ran")
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast
class OwnConfig(LlamaConfig): model_type = "own"
class OwnModel(LlamaForCausalLM): config_class = OwnConfig
class OwnClassifier(LlamaForSequenceClassification): config_class = OwnConfig
class OwnTokenizer(PreTrainedTokenizerFast): pass
"""
AUTO_MAP = {
    "AutoConfig": "own.OwnConfig",
    "AutoModelForCausalLM": "own.OwnModel",
    "AutoModelForTokenClassification": "own.OwnModel",
    "AutoModelForSequenceClassification": "own.OwnClassifier",
}


@pytest.fixture
def note(tmp_path: Path) -> Path:
    return tmp_path / "note"


@pytest.fixture
def folder(tmp_path: Path, note: Path) -> Path:
    """A model of a type that transformers does not know, and whose code, when imported, writes `note`."""
    folder = shutil.copytree(resolve_model("tiny"), tmp_path / "model")
    (folder / "own.py").write_text(CODE.format(note=str(note)))
    for name, changes in (
        ("config.json", {"model_type": "own", "architectures": ["OwnModel"], "auto_map": AUTO_MAP}),
        (
            "tokenizer_config.json",
            {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]}},
        ),
    ):
        path = folder / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


def answered_yes(source: str, tmp_path: Path) -> str:
    """What a program prints whose standard input says `y` all the time."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(tmp_path / "modules")}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", source], input="y\n" * 1000, capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


OPENERS = """
from composed import compose_recipe
from rlflow.errors import ConfigError
folder, trust = {folder!r}, {trust!r}
given = [f"model.trust_remote_code={{trust}}"] if trust else []
config = compose_recipe("recipe=smoke", f"model.path={{folder}}", *given)
from transformers import AutoModelForSequenceClassification
from rlflow.models.resolve import REWARD
from rlflow.tools.doctor.software import load_model
from rlflow.tools.dry_run.model import read_model, read_reward_model
from rlflow.workers.engine import setup
from rlflow.workers.runner import EpisodeRunner
from rlflow.workers.trainer.policy import empty_policy, load_policy
from rlflow.workers.trainer.pretrained import load_whole
from rlflow.workers.trainer.reward_model import RewardModel
from rlflow.workers.trainer.value import empty_value_model
for name, opener in {{
    "dry run": lambda: read_model(config, folder),
    "dry run, reward model": lambda: read_reward_model(config, folder),
    "doctor": lambda: load_model(config),
    "engine's cache": lambda: setup.cache_shape(config, folder),
    "engine's adapters": lambda: setup.adapted_layers(config, folder),
    "runner": lambda: EpisodeRunner(config, folder, None, None, (), calls=object()),
    "policy": lambda: empty_policy(config, folder),
    "policy with memory": lambda: load_policy(config, folder),
    "critic": lambda: empty_value_model(config, folder),
    "reward model": lambda: RewardModel(config, folder),
    "classifier": lambda: load_whole(AutoModelForSequenceClassification, config, folder, REWARD),
}}.items():
    try:
        opener()
        print(name, "->", "opened")
    except ConfigError as error:
        print(name, "->", error)
    except Exception as error:
        print(name, "->", repr(error))
"""


def test_no_opener_runs_the_code_of_a_model_folder(folder: Path, note: Path, tmp_path: Path) -> None:
    printed = answered_yes(OPENERS.format(folder=str(folder), trust=""), tmp_path)
    assert not note.exists(), printed
    lines = printed.splitlines()
    assert len(lines) == 11
    assert [line for line in lines if f"set {TRUST}=true" not in line] == []
    assert lines[0] == (
        f"dry run -> model.path: {folder} needs Python code of its own (auto_map), and none of it is run; take a model "
        f"that transformers knows, or read that code and set {TRUST}=true"
    )


VERBS = """
import contextlib, sys
from rlflow.cli import main
for words in (["train", "--dry-run"], ["env", "check"], ["doctor"], ["train", {run!r}]):
    print(words, main([*words, "recipe=smoke", {model!r}]), flush=True)
"""


@pytest.mark.slow
def test_no_verb_runs_the_code_of_a_model_folder(folder: Path, note: Path, tmp_path: Path) -> None:
    source = VERBS.format(run=f"run.dir={tmp_path / 'run'}", model=f"model.path={folder}")
    printed = answered_yes(source, tmp_path)
    assert not note.exists(), printed


@pytest.mark.slow
def test_the_setting_allows_it_everywhere(folder: Path, note: Path, tmp_path: Path) -> None:
    printed = answered_yes(OPENERS.format(folder=str(folder), trust="true"), tmp_path)
    assert note.read_text() == "its code ran"
    assert TRUST not in printed, printed
    assert "runner -> opened" in printed
    assert "engine's cache -> opened" in printed


def test_the_engine_is_told() -> None:
    from rlflow.models.resolve import resolve_config
    from rlflow.workers.engine.setup import engine_arguments

    for trust in (False, True):
        config = compose_recipe(f"{TRUST}={trust}")
        assert engine_arguments(config, resolve_config("tiny"), 0, on_gpu=False)["trust_remote_code"] is trust


def test_models_are_opened_in_one_place_only() -> None:
    """Nowhere else can the question be forgotten whether code may run."""
    root = Path(rlflow.__file__).parent
    found: list[str] = []
    for top in (root, *(root / name for name in ("workers", "envs", "recipes"))):
        for path in sorted(top.resolve().rglob("*.py")):
            nodes = list(ast.walk(ast.parse(path.read_text())))
            calls = [node for node in nodes if isinstance(node, ast.Call)]
            safe = [call.func for call in calls if "trust_remote_code=False" in map(ast.unparse, call.keywords)]
            found += [
                f"{path.parent.name}/{path.name}"
                for node in nodes
                if isinstance(node, ast.Attribute) and node.attr in OPENING and node not in safe
            ]
    assert set(found) == {"models/opening.py"}
