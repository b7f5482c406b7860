"""Real processes: what two teachers say of replies that vLLM sampled, and a run that learns from them alone."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import ray
import yaml
from children import TIMEOUT_S
from training import plain_logprobs, save_model, tiny_llama
from transformers import AutoTokenizer

from rlflow.cluster.start import ray_cluster, start_fleet
from rlflow.config import Config, TeacherConfig
from rlflow.environments.find import load_environment
from rlflow.models.resolve import resolve_model
from rlflow.runtime.derived import by_device
from rlflow.telemetry import metrics
from rlflow.types import EpisodePayload, FloatArray, GroupOrder, TrainSample

pytestmark = pytest.mark.slow

ROWS = "".join(f'{{"prompt": "{n} + {n} =", "kind": "{("sums", "others")[n % 2]}"}}\n' for n in range(8))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Two models that differ in their size, with the tokens of `tiny`."""
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("tiny"))
    made = []
    for layers in (1, 3):
        folder = tmp_path_factory.mktemp(f"teacher_{layers}")
        config = tiny_llama(vocab_size=len(tokenizer), num_hidden_layers=layers, max_position_embeddings=256)
        made.append(save_model(config, folder))
        tokenizer.save_pretrained(folder)
    return made[0], made[1]


def plain(folder: str, payloads: Sequence[EpisodePayload]) -> list[FloatArray]:
    """What transformers alone says of the episodes' tokens."""
    samples = [TrainSample(sample=sample, advantage=0.0) for payload in payloads for sample in payload.samples]
    _, rows = plain_logprobs(folder, [samples], temperature=1.0)
    return [np.where(one.sample.loss_mask, row.detach().numpy(), 0) for one, row in zip(samples, rows, strict=True)]


async def test_what_teachers_say_is_what_transformers_computes(folders: tuple[str, str], tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(ROWS)
    config = by_device(Config(), on_gpus=False)
    config.run.dir = str(tmp_path)
    config.model.path, config.model.max_length, config.rollout.max_new_tokens = "tiny", 128, 12
    config.rollout.kv_cache_gb, config.trainer.ranks = 0.1, 0
    config.env.name, config.env.args = "dataset", {"path": str(rows)}
    config.teacher = TeacherConfig(models={"sums": folders[0], "others": folders[1]}, reward_weight=0.0)
    spec = load_environment(config.env, config.reward, needs_reward=False)
    task = next(iter(spec.tasks()))
    with ray_cluster(config):
        fleet = await start_fleet(config, resolve_model("tiny"), spec, print, tell=print)
        try:
            assert set(fleet.vital) == {"teacher sums rank 0", "teacher others rank 0"}
            order = GroupOrder(group_id=1, task=task, num_episodes=3, seed=7)
            played = await fleet.workers.runners.play(order)
            assert [episode.reward for episode in played.episodes] == [None] * 3
            assert not any(episode.end.is_error for episode in played.episodes)
            payloads = [ray.get(each) for each in played.payloads]  # pyright: ignore
            for name, folder in zip(("teacher sums", "teacher others"), folders, strict=True):
                handles = await fleet.workers.frozen[name].logprobs(played.payloads)
                found = [row for handle in handles for row in ray.get(handle)]  # pyright: ignore
                for row, expected in zip(found, plain(folder, payloads), strict=True):
                    assert np.abs(row - expected).max() < 1e-4
                    assert np.abs(expected).max() > 1
        finally:
            await fleet.stop()


def test_a_run_learns_from_two_teachers_without_a_reward(folders: tuple[str, str], tmp_path: Path) -> None:
    """Asynchronous, with groups of one episode, interrupted by nothing; and it goes on from its checkpoint."""
    rows, run = tmp_path / "rows.jsonl", tmp_path / "run"
    rows.write_text(ROWS)
    settings = {
        "run": {"dir": str(run), "steps": 3},
        "env": {"name": "dataset", "args": {"path": str(rows)}},
        "reward": {"function": None},
        "teacher": {"models": {"sums": folders[0], "default": folders[1]}, "reward_weight": 0.0},
        "algorithm": {"groups_per_step": 4, "group_size": 1},
        "staleness": {"max_versions": 1},
    }
    folder = tmp_path / "configs" / "recipe"
    folder.mkdir(parents=True)
    shutil.copy(Path("recipes/recipe/smoke.yaml").resolve(), folder / "base.yaml")
    text = "# @package _global_\n# Two teachers.\n" + yaml.safe_dump({"defaults": ["base", "_self_"], **settings})
    (folder / "taught.yaml").write_text(text)
    command = [sys.executable, "-m", "rlflow", "train", "--config-dir", str(folder.parent), "recipe=taught"]
    for steps in (2, 3):
        done = subprocess.run(
            [*command, f"run.steps={steps}"], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert "teacher sums ready after" in done.stdout and "teacher default ready after" in done.stdout
    assert "reward: none was asked for" in done.stdout and "ALARM" not in done.stdout
    records = metrics.read(run / "metrics.jsonl")
    assert len(records) == 3
    for record in records:
        assert record["reward"] is None and record["frac_reward_zero_std"] is None
        assert record["distil/kl"] > 0.1 and record["grad_norm"] > 0 and record["distil/clamped"] < 0.5
