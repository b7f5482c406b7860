"""Whole runs of the tiny model: real vLLM, Ray and FSDP2, started as a person starts them."""

from __future__ import annotations

import asyncio
import gzip
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from back_ends import needs_deepspeed
from children import TIMEOUT_S, ended_after, wait_for
from ledgers import trained_tasks
from listening import answers_as_a_store, is_loopback, listeners, ports_of, socket_files
from rounding import allowed_difference
from safetensors.torch import load_file
from training import largest_relative_difference, plain_score, save_reward_model

from rlflow.config import Config
from rlflow.groups.ledger import counts_by_state
from rlflow.recipes.minimal_grpo import Group, MinimalGrpo, Update
from rlflow.runtime import scratch
from rlflow.telemetry import about, metrics
from rlflow.telemetry.metrics import REQUIRED
from rlflow.telemetry.samples import read_samples
from rlflow.workers.trainer.shards import ShardReader, read_full

pytestmark = pytest.mark.slow


def command(run: Path, *overrides: str) -> list[str]:
    return [sys.executable, "-m", "rlflow", "train", "recipe=smoke", f"run.dir={run}", *overrides]


def train(run: Path, *overrides: str) -> str:
    """Run to the end; what it printed."""
    done = subprocess.run(command(run, *overrides), capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@contextmanager
def running(run: Path, *overrides: str) -> Iterator[subprocess.Popen[str]]:
    """A run in a session of its own, so that a signal to it reaches nothing else."""
    process = subprocess.Popen(command(run, *overrides), stdout=subprocess.PIPE, text=True, start_new_session=True)
    with ended_after(process):
        yield process


def scratch_of(run: Path) -> Path:
    """The folder of the temporary files of the run that is under way in a directory."""
    (found,) = [path.parent for path in scratch.ROOT.glob("rlflow-run-*/run_dir") if path.read_text() == str(run)]
    return found


def shared_memory(folder: Path) -> list[str]:
    return [path.name for path in scratch.SHARED.iterdir() if path.name.startswith(folder.name)]


def test_the_reward_rises(tmp_path: Path) -> None:
    """The tiny model starts from random bytes and learns to type digits; also: the files of a run and its export."""
    run = tmp_path / "run"
    settings = ["run.steps=40", "algorithm.groups_per_step=4", "algorithm.group_size=8", "trainer.learning_rate=3e-3"]
    out = train(run, *settings, "eval.every=20", "env.args.evaluation_size=16")
    records = metrics.read(run / "metrics.jsonl")
    assert [name for name in records[-1] if metrics.text_of(name) is None] == []
    rewards = [record["reward"] for record in records]
    print("rewards", [round(reward, 3) for reward in rewards])
    assert len(rewards) == 40
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.25
    assert all(name in record for record in records for name in REQUIRED)
    assert max(record["sampling/logp_difference_mean"] for record in records) < 1e-4
    assert f"report: {run / 'report.html'}" in out
    held_out = {record["step"]: record["eval/reward"] for record in metrics.read(run / "evaluations.jsonl")}
    assert list(held_out) == [0, 20, 40] and held_out[40] > held_out[0] + 0.1
    best = max((20, 40), key=held_out.__getitem__)
    assert os.readlink(run / "checkpoints" / "best") == f"step_{best}"
    assert f"held-out {held_out[0]:.3f} -> {held_out[40]:.3f} (best {held_out[best]:.3f} at step {best})" in out
    assert "\nalarms: " in out
    drawn = (run / "report.html").read_text().split('id="data">')[1].split("</script>")[0]
    assert {"reward", "loss", "staleness/mean", "utilisation/train"} <= json.loads(drawn)["columns"].keys()
    [start] = about.read(run)
    assert start["command"][:4] == ["-m", "rlflow", "train", "recipe=smoke"]
    assert start["steps"] == 40 and start["machines"] and start["ended"] >= start["started"]
    facts = [event["args"] for event in json.loads((run / "trace.json").read_text()) if event["ph"] == "X"]
    assert {"step", "group", "version", "oldest_version", "tokens", "outcome"} <= {
        name for one in facts for name in one
    }
    assert (run / "samples" / "step_1.json").is_file()
    assert counts_by_state(run / "ledger.db")["trained"] == 160
    exported = tmp_path / "exported"
    subprocess.run(
        [sys.executable, "-m", "rlflow", "export", str(run), str(exported), "--dtype", "float32"],
        check=True,
        timeout=TIMEOUT_S,
    )
    weights = load_file(exported / "model.safetensors")
    parameters = dict(read_full(run / "checkpoints" / "step_40" / "trainer"))
    assert parameters.keys() == weights.keys()
    assert all(torch.equal(parameters[name], weights[name]) for name in parameters)


def operations(trace: Path) -> set[str]:
    with gzip.open(trace, "rt") as file:
        return {event["name"] for event in json.load(file)["traceEvents"]}


def test_adapters_are_trained_beside_a_reference_and_a_critic_without_one_more_process(tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = ["lora.rank=4", "trainer.learning_rate=1e-2", "algorithm.advantage=gae", "critic.learning_rate=1e-2"]
    settings += ["algorithm.kl_coefficient=0.05", "algorithm.kl_in_reward=true"]
    train(run, "run.steps=4", "run.profile_steps=[2,3]", *settings)
    assert operations(run / "profile" / "trainer_rank_0.trace.json.gz") & {"aten::mm", "aten::addmm"}
    assert operations(run / "profile" / "critic_rank_0.trace.json.gz") & {"aten::mm", "aten::addmm"}
    (of_engine,) = (run / "profile" / "engine_0").glob("*.pt.trace.json.gz")
    assert operations(of_engine) & {"aten::mm", "aten::addmm", "aten::linear"}
    records = metrics.read(run / "metrics.jsonl")
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert [name for name in records[-1] if metrics.text_of(name) is None] == []
    assert all(record["throughput/train_tflops_rank"] > 0 for record in records)
    assert records[0]["kl"] < 1e-6  # adapters add nothing at first
    assert records[3]["kl"] > 1e-6
    assert max(record["sampling/logp_difference_mean"] for record in records) < 1e-4
    assert all(record["critic/update_skipped"] == 0 for record in records)
    shapes = ShardReader(run / "checkpoints" / "step_4" / "trainer").shapes
    assert all(".lora_" in name for name in shapes)


@pytest.mark.proof
def test_a_resumed_critic_goes_on_from_what_it_knew(tmp_path: Path) -> None:
    """Its head says 0 until the first step has taught it something. The newest checkpoint is damaged meanwhile."""
    run = tmp_path / "run"
    settings = ["run.steps=2", "run.checkpoint_every=1", "algorithm.advantage=gae", "critic.learning_rate=1e-2"]
    train(run, *settings)
    shard = run / "checkpoints" / "step_2" / "trainer" / "critic" / "rank_0.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 0x40
    shard.write_bytes(content)
    out = train(run, *settings)
    wrong = "trainer/critic/rank_0.safetensors is not what was written"
    assert f"ALARM: checkpoint step_2 is damaged ({wrong}) and is now step_2.damaged; step_1 is whole" in out
    assert "resumed at step 1 of 2, version 1" in out
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step_1", "step_2", "step_2.damaged"]
    assert len(trained_tasks(run)) == 4
    before, after = metrics.read(run / "metrics.jsonl")
    assert (before["critic/update_skipped"], after["critic/update_skipped"]) == (0, 0)
    assert before["critic/value"] == 0
    assert after["critic/value"] != 0


@pytest.mark.proof
def test_ppo_trains_policy_and_critic_and_goes_on_with_both(tmp_path: Path) -> None:
    """Also: what two ranks with half of the batch each began, two with half of each layer take up."""
    run = tmp_path / "run"
    settings = ["algorithm.advantage=gae", "critic.learning_rate=1e-2", "trainer.ranks=2", "cluster.cpu_threads=1"]
    train(run, "run.steps=6", *settings)
    train(run, "run.steps=10", *settings, "trainer.tensor_parallel=2")
    records = metrics.read(run / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(1, 11))
    assert all(record["critic/update_skipped"] == 0 for record in records)
    losses = [record["critic/loss"] for record in records]
    # The head says 0 at first; within a few steps it is nearer to the mean reward than that, the resumed one too.
    assert sum(losses[-3:]) < sum(losses[:3])
    assert abs(records[6]["critic/value"]) > 0


@pytest.mark.proof
@pytest.mark.parametrize("backend", ["fsdp", pytest.param("deepspeed", marks=needs_deepspeed)])
def test_ranks_that_share_rows_agree_with_the_engine_and_one_rank_goes_on(backend: str, tmp_path: Path) -> None:
    """Policy and critic; what is computed before the update is asked of the ranks too."""
    run, critic = tmp_path / "run", ["algorithm.advantage=gae", "critic.learning_rate=1e-2"]
    shared = ["trainer.ranks=2", "trainer.sequence_parallel=2", "cluster.cpu_threads=1"]
    shared += ["trainer.backend=deepspeed", "trainer.zero_stage=2"] if backend == "deepspeed" else []
    train(run, *critic, *shared)
    assert "resumed at step 3 of 5" in train(run, "run.steps=5", *critic)
    records = metrics.read(run / "metrics.jsonl")
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5]
    assert all(record["critic/update_skipped"] == 0 for record in records)
    assert max(record["sampling/logp_difference_mean"] for record in records) < 1e-4


def test_a_reward_model_gives_the_rewards(tmp_path: Path) -> None:
    """With two episodes a step, the worst and the best are all that there are."""
    run, folder = tmp_path / "run", save_reward_model(tmp_path / "classifier")
    settings = ["reward.function=null", f"reward.model={folder}", "algorithm.groups_per_step=1"]
    train(run, *settings, "algorithm.group_size=2")
    records = metrics.read(run / "metrics.jsonl")
    assert [record["step"] for record in records] == [1, 2, 3]
    for record in records:
        samples = read_samples(run, record["step"])
        expected = [plain_score(folder, episode.messages) for episode in (samples.worst, samples.best)]
        assert expected[0] != expected[1]
        assert [samples.worst.reward, samples.best.reward] == pytest.approx(expected, abs=1e-5)
        assert record["reward"] == pytest.approx(sum(expected) / 2, abs=1e-5)


class RecordingTwin(MinimalGrpo):
    """The twin, which keeps what it was trained on."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.played: list[list[Group]] = []

    def update(self, step: int, groups: Sequence[Group]) -> Update:
        self.played.append(list(groups))
        return super().update(step, groups)


Trained = tuple[dict[str, torch.Tensor], list[float]]
"""The parameters after the last update, and the norm of each update's gradient."""


def replayed(
    config: Config, played: Sequence[Sequence[Group]], seed: int, dtype: torch.dtype = torch.float32
) -> Trained:
    """The same updates, with the sums of the twin taken in another order."""
    twin, random = MinimalGrpo(config), np.random.default_rng(seed)
    twin.arena.close()
    torch.nn.Module.to(twin.model, dtype)
    norms = []
    for step, groups in enumerate(played):
        orders = [random.permutation(len(group.rewards)) for group in groups]
        shuffled = [
            Group(
                group_id=group.group_id,
                prompt_ids=group.prompt_ids,
                completions=[group.completions[i] for i in order],
                rewards=[group.rewards[i] for i in order],
            )
            for group, order in zip(groups, orders, strict=True)
        ]
        norms.append(twin.update(step, [shuffled[i] for i in random.permutation(len(groups))]).grad_norm)
    return {name: parameter.detach() for name, parameter in twin.model.named_parameters()}, norms


def distance(found: Mapping[str, torch.Tensor], exact: Mapping[str, torch.Tensor]) -> float:
    """The Euclidean distance of all parameters, over their norm."""
    error = sum(float((found[name].double() - each).square().sum()) for name, each in exact.items())
    return math.sqrt(error / sum(float(each.square().sum()) for each in exact.values()))


@pytest.mark.parametrize(("groups_per_step", "epochs", "minibatches"), [(2, 1, 1), (4, 4, 4)])
def test_the_driver_makes_the_updates_of_the_twin(
    groups_per_step: int, epochs: int, minibatches: int, tmp_path: Path
) -> None:
    """Synchronous training with one engine is the single-file loop, update for update; several a step too."""
    run = tmp_path / "run"
    settings = [f"algorithm.{groups_per_step=}", f"algorithm.{epochs=}", f"algorithm.{minibatches=}"]
    train(run, "run.steps=3", "run.seed=7", *settings)
    config = Config()
    config.run.steps, config.run.seed = 3, 7
    config.model.path, config.model.max_length = "tiny", 256
    config.reward.function = "rlflow.envs.arithmetic.reward:share_of_digits"
    config.algorithm.groups_per_step, config.algorithm.group_size = groups_per_step, 4
    config.algorithm.epochs, config.algorithm.minibatches = epochs, minibatches
    config.rollout.max_new_tokens, config.rollout.kv_cache_gb = 8, 0.1
    config.trainer.learning_rate = 1e-3
    twin = RecordingTwin(config)
    before = {name: parameter.detach().clone() for name, parameter in twin.model.named_parameters()}
    updates = asyncio.run(twin.run())
    records = metrics.read(run / "metrics.jsonl")
    assert [update.reward for update in updates] == pytest.approx([record["reward"] for record in records], abs=1e-7)
    exact, norms = replayed(config, twin.played, 0, torch.float64)
    itself = {name: parameter.detach() for name, parameter in twin.model.named_parameters()}
    others = [(itself, [update.grad_norm for update in updates])]
    others += [replayed(config, twin.played, seed) for seed in range(3)]
    allowed = allowed_difference(
        abs(other / norm - 1) for _, other_norms in others for other, norm in zip(other_norms, norms, strict=True)
    )
    assert [record["grad_norm"] for record in records] == pytest.approx(norms, rel=allowed)
    trained = dict(read_full(run / "checkpoints" / "step_3" / "trainer"))
    found = largest_relative_difference({name: trained[name] for name in exact}, exact)
    allowed = allowed_difference(largest_relative_difference(other, exact) for other, _ in others)
    moved = largest_relative_difference(before, exact)
    # Adam makes the rounding of a small gradient as large as a step, in single elements; together they are few.
    together = distance(trained, exact)
    allowed_together = allowed_difference(distance(other, exact) for other, _ in others)
    print(f"all parameters together: difference {together:.2e}, allowed {allowed_together:.2e}")
    print(f"parameters after 3 steps: difference {found:.2e}, allowed {allowed:.2e}, moved {moved:.2e}")
    assert moved > 10 * allowed
    assert found <= allowed
    assert together <= min(allowed_together, 1e-5)


def test_a_killed_run_resumes_and_outlives_its_trainer_and_trains_every_task_once(tmp_path: Path) -> None:
    """Also: one version of staleness, the truncated correction, two ranks, KL to a reference of two ranks.

    The trainer is lost as when the system ends a process for its memory.
    """
    run = tmp_path / "run"
    settings = [
        "run.steps=8", "run.checkpoint_every=3", "env.args.size=16", "staleness.max_versions=1", "algorithm=tis",
        "algorithm.kl_coefficient=0.01", "trainer.ranks=2", "cluster.reference_ranks=2",
    ]  # fmt: skip
    with running(run, *settings) as process:
        wait_for(process, "step 5/8")
        killed = scratch_of(run)
        process.kill()
        assert process.wait(timeout=TIMEOUT_S) == -signal.SIGKILL
    assert killed.is_dir()
    with running(run, *settings) as process:
        wait_for(process, "resumed at step 3 of 8, version 3")
        wait_for(process, "step 4/8")
        children = psutil.Process(process.pid).children(recursive=True)
        assert not killed.exists()
        assert (run / "logs/raylet.out").is_file()
        own = scratch_of(run)
        next(child for child in children if child.name().startswith("ray::TrainerWor")).kill()
        wait_for(process, "ALARM: the trainer rank ")
        wait_for(process, "resumed at step 3 of 8, version 3")
        wait_for(process, " is done again, ")
        # One trainer of two has an arena; that of the killed one is gone.
        assert len(shared_memory(own)) == 1
        wait_for(process, "report: ")
        assert process.wait(timeout=TIMEOUT_S) == 0
    assert not own.exists()
    assert shared_memory(killed) == shared_memory(own) == []
    counts = counts_by_state(run / "ledger.db")
    total = counts.pop("admitted_total")
    assert sum(counts.values()) == total
    assert (counts["trained"], counts["ready"], counts["running"]) == (16, 0, 0)
    # Sixteen tasks, eight steps of two groups: one pass.
    assert sorted(trained_tasks(run)) == sorted(f"chain_sum/0/{index}" for index in range(16))
    records = metrics.read(run / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(1, 9))
    assert all(record["staleness/max"] <= 1 for record in records)
    assert all(record["kl"] is not None for record in records)
    assert "already has 8 of 8 steps" in train(run, *settings)


KILLING_LOSS = """
import os
import signal
from pathlib import Path

from rlflow.algorithms.loss.ppo_clip import ppo_clip

calls = 0


def killing(tokens, *, driver: str):
    global calls
    calls += len(tokens.logprobs) > 0
    if calls == 11 and Path(driver).exists():
        pid = int(Path(driver).read_text())
        Path(driver).unlink()
        os.kill(pid, signal.SIGKILL)
    return ppo_clip(tokens)
"""
"""Kills the process whose number is in a file at its eleventh micro-batch; once, because the file goes."""


def test_a_run_that_is_killed_between_two_updates_resumes_and_trains_every_task_once(tmp_path: Path) -> None:
    """In the second epoch of its third step. Each step of four groups makes four updates of one micro-batch."""
    run, driver, loss = tmp_path / "run", tmp_path / "driver", tmp_path / "killing.py"
    loss.write_text(KILLING_LOSS)
    settings = [
        "run.steps=4", "run.checkpoint_every=1", "env.args.size=16", "algorithm.groups_per_step=4",
        "algorithm.epochs=2", "algorithm.minibatches=2", "algorithm.proximal=recomputed",
        "algorithm.entropy_bonus=1e-6",  # so that groups of equal rewards have a gradient too
        f"algorithm.loss={loss}:killing", f"algorithm.loss_args.driver={driver}", "trainer.micro_batch_tokens=4096",
    ]  # fmt: skip
    with running(run, *settings) as process:
        driver.write_text(str(process.pid))
        assert process.wait(timeout=TIMEOUT_S) == -signal.SIGKILL
    assert not driver.exists()
    assert [record["step"] for record in metrics.read(run / "metrics.jsonl")] == [1, 2]
    with running(run, *settings) as process:
        wait_for(process, "resumed at step ")
        wait_for(process, "report: ")
        assert process.wait(timeout=TIMEOUT_S) == 0
    counts = counts_by_state(run / "ledger.db")
    print("ledger after the killed run has gone on:", {state: count for state, count in counts.items() if count})
    assert (counts["trained"], counts["training"], counts["ready"], counts["running"]) == (16, 0, 0, 0)
    assert sorted(trained_tasks(run)) == sorted(f"chain_sum/0/{index}" for index in range(16))
    records = metrics.read(run / "metrics.jsonl")
    assert [(record["step"], record["version"]) for record in records] == [(step, step) for step in range(1, 5)]
    assert ShardReader(run / "checkpoints" / "step_4" / "trainer").updates == 16
    assert max(record["sampling/logp_difference_mean"] for record in records) < 1e-4


@pytest.mark.proof
def test_a_rank_that_hangs_is_lost_after_one_deadline_and_the_run_goes_on(tmp_path: Path) -> None:
    """Its deadline is shorter than what it takes to notice by itself that a process is stopped."""
    run = tmp_path / "run"
    settings = ["run.steps=5", "run.checkpoint_every=2", "trainer.ranks=2", "deadlines.train_s=10"]
    with running(run, *settings) as process:
        wait_for(process, "step 3/5")
        children = psutil.Process(process.pid).children(recursive=True)
        rank = next(child for child in children if child.name().startswith("ray::TrainerWor"))
        rank.suspend()
        wait_for(process, "did not finish within its deadline of 10 s; raise deadlines.train_s if it takes this long")
        wait_for(process, "resumed at step 2 of 5, version 2")
        wait_for(process, "report: ")
        assert process.wait(timeout=TIMEOUT_S) == 0
        assert not rank.is_running(), "a rank that hangs is killed"
    assert [record["step"] for record in metrics.read(run / "metrics.jsonl")] == [1, 2, 3, 4, 5]
    counts = counts_by_state(run / "ledger.db")
    assert (counts["trained"], counts["dropped_failed"]) == (10, 0)


def test_a_signal_finishes_the_step_and_saves(tmp_path: Path) -> None:
    """Also: weights go from two ranks to two engines, all of which is compared; all that listens is on loopback, and no
    socket is left behind."""
    run = tmp_path / "run"
    settings = ["run.steps=100000", "run.checkpoint_every=0", "trainer.ranks=2", "rollout.engines=2"]
    settings += ["weights.transport=p2p", "weights.verify=full"]
    with running(run, *settings) as process:
        wait_for(process, "step 3/")
        found = listeners(process.pid)
        assert {"gcs_server", "raylet", "ray::TrainerWor", "VLLM::EngineCor"} <= found.keys()
        assert all(is_loopback(address) for addresses in found.values() for address in addresses), found
        # A store lets everybody who reaches it write.
        assert not [name for port, name in ports_of(process.pid).items() if answers_as_a_store(port)]
        sockets = socket_files(process.pid)
        assert any(path.is_socket() for path in sockets)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=TIMEOUT_S) == 128 + signal.SIGINT
    assert not [path for path in sockets if path.exists()]
    records = metrics.read(run / "metrics.jsonl")
    assert all(record["sampling/logp_difference_mean"] < 1e-4 for record in records)
    step = records[-1]["step"]
    assert (run / "checkpoints" / f"step_{step}" / "state.json").is_file()
    assert counts_by_state(run / "ledger.db")["trained"] == 2 * step
    assert (run / "report.html").is_file()
