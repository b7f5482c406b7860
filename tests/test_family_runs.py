"""Whole runs of tiny models of the current families, and of engines that compute something else than the trainer.

Two families stand for the rest in the suite; `make proof` has them all, by each way in which weights travel.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from shutil import copy

import pytest
import torch
from children import TIMEOUT_S
from families import FAMILIES, tiny_model
from torch import nn

from rlflow.groups.ledger import counts_by_state
from rlflow.models.resolve import resolve_model
from rlflow.telemetry import metrics

pytestmark = pytest.mark.slow

LINEAR = ("Qwen3.5", "Qwen3-Next")
REFUSED = ("DeepSeek-V3", "gpt-oss")
"""On a CPU; `test_engine_setup` says why."""
TRANSPORTS = ("shm", "p2p", "disk")
SUITE = (("Qwen3.5", "shm"), ("Gemma 3", "p2p"))


def saved(family: str, folder: Path) -> str:
    """A random model of the family with the tokenizer of the model `tiny`."""
    model = tiny_model(family, seed=1)
    model.config.eos_token_id = 2
    nn.Module.to(model, torch.bfloat16 if family in LINEAR else torch.float32)
    model.save_pretrained(folder)
    for file in Path(resolve_model("tiny")).glob("*token*"):
        copy(file, folder)
    return str(folder)


def train(run: Path, folder: str, *settings: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rlflow", "train", "recipe=smoke", f"run.dir={run}", f"model.path={folder}"]
    return subprocess.run([*command, *settings], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


@pytest.mark.parametrize(
    ("family", "transport"),
    [
        pytest.param(family, way, marks=() if (family, way) in SUITE else pytest.mark.proof)
        for family in FAMILIES
        if family not in REFUSED
        for way in TRANSPORTS
    ],
)
def test_three_steps_of_each_family(family: str, transport: str, tmp_path: Path) -> None:
    """The learning rate is so high that engines on older weights would be far off."""
    dtype, bound = ("bfloat16", 0.04) if family in LINEAR else ("float32", 1e-4)
    settings = ["run.steps=3", "trainer.learning_rate=1e-3", f"weights.transport={transport}", f"model.dtype={dtype}"]
    done = train(tmp_path / "run", saved(family, tmp_path / "model"), *settings)
    assert done.returncode == 0, done.stdout + done.stderr
    differences = [each["sampling/logp_difference_mean"] for each in metrics.read(tmp_path / "run" / "metrics.jsonl")]
    print(family, transport, [f"{difference:.1g}" for difference in differences])
    assert len(differences) == 3 and max(differences) <= bound


@pytest.mark.parametrize(
    "overrides",
    ["rope_parameters:{rope_type:default,rope_theta:100.0}", "tie_word_embeddings:true", "sliding_window:4"],
)
def test_an_engine_of_another_model_is_found_before_the_first_episode(overrides: str, tmp_path: Path) -> None:
    folder = saved("Mistral with a window", tmp_path / "model")
    faulty = f"rollout.engine_args={{hf_overrides:{{{overrides}}}}}"
    done = train(tmp_path / "run", folder, "run.steps=3", "model.dtype=float32", faulty)
    assert done.returncode == 1, done.stdout + done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "engines and trainer compute different models" in line]
    print(line)
    assert sum(counts_by_state(tmp_path / "run" / "ledger.db").values()) == 0
