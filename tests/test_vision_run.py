"""Whole runs of a tiny model that takes images: real vLLM, Ray and FSDP2."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from children import TIMEOUT_S
from transformers import AutoModelForImageTextToText
from vision_models import NEEDS_NUM2WORDS, QWENS, save_vision_model

from rlflow.telemetry import metrics
from rlflow.telemetry.samples import read_samples

pytestmark = pytest.mark.slow

WORLD = Path(__file__).parent / "support" / "red_or_blue.py"


def rlflow(*arguments: str) -> None:
    command = [sys.executable, "-m", "rlflow", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def train(run: Path, folder: str, *settings: str) -> list[float]:
    """The reward of each step."""
    rlflow("train", "recipe=smoke", f"run.dir={run}", f"model.path={folder}", *settings)
    records = metrics.read(run / "metrics.jsonl")
    assert max(record["sampling/logp_difference_mean"] for record in records) < 1e-4
    return [record["reward"] for record in records]


@pytest.mark.parametrize("family", ["idefics3", *(pytest.param(each, marks=pytest.mark.proof) for each in QWENS)])
@pytest.mark.parametrize(("blank", "least", "most"), [("false", 0.9, 1.0), ("true", 0.0, 0.7)])
def test_a_model_learns_what_only_the_picture_tells(
    tmp_path: Path, family: str, blank: str, least: float, most: float
) -> None:
    folder = save_vision_model(tmp_path / "model", family=family, spread=0.05)
    own = [f"env.name={WORLD}:load", "rollout.max_new_tokens=1", "model.max_length=64", f"env.args.blank={blank}"]
    own.append("reward.function=null")
    settings = ["run.steps=35", "algorithm.groups_per_step=4", "algorithm.group_size=8", "trainer.learning_rate=1e-2"]
    rewards = train(tmp_path / "run", folder, *own, *settings)
    print("blank" if blank == "true" else "painted", [round(reward, 2) for reward in rewards])
    assert least <= sum(rewards[-5:]) / 5 <= most
    assert sum(rewards[:3]) / 3 < 0.8
    shown = read_samples(tmp_path / "run", 1).best.messages[0]
    assert shown["content"] == "[image]?"


@pytest.mark.parametrize("family", [*QWENS, pytest.param("smolvlm", marks=[pytest.mark.proof, NEEDS_NUM2WORDS])])
def test_three_steps_of_each_family(tmp_path: Path, family: str) -> None:
    """The learning rate is so high that engines on older weights would be far off."""
    folder = save_vision_model(tmp_path / "model", family=family)
    train(tmp_path / "run", folder, "env.name=squares", "env.args.side=48", "run.steps=3")


PROOF = pytest.mark.proof


@pytest.mark.parametrize(
    ("family", "transport"),
    [
        ("idefics3", "p2p"),
        *(pytest.param("idefics3", each, marks=PROOF) for each in ("shm", "disk")),
        *(pytest.param(family, each, marks=PROOF) for family in QWENS for each in ("p2p", "shm", "disk")),
    ],
)
def test_two_ranks_and_what_they_export(tmp_path: Path, family: str, transport: str) -> None:
    """The learning rate is so high that engines on older weights, or on another tower, would be far off."""
    folder, run = save_vision_model(tmp_path / "model", family=family, tiles=family == "idefics3"), tmp_path / "run"
    settings = ["env.name=squares", "env.args.side=40", "trainer.ranks=2", f"weights.transport={transport}"]
    train(run, folder, *settings, "run.steps=2", "run.checkpoint_every=1")
    rlflow("export", str(run), str(tmp_path / "exported"), "--dtype", "float32")
    before, after = (weights_in(each) for each in (folder, tmp_path / "exported"))
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if "text_model" in name or "language_model" in name or "head" in name}
    train(run, folder, *settings, "run.steps=3", "run.checkpoint_every=1")
    assert len(metrics.read(run / "metrics.jsonl")) == 3


def weights_in(folder: str | Path) -> dict[str, torch.Tensor]:
    """By the names that transformers gives them: files of Qwen2.5-VL have older ones."""
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).state_dict()
