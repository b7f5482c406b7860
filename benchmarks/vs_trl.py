"""rlflow's GRPO beside TRL's GRPOTrainer on this machine's CPU: same model, prompts, batch, float32; samples a second.

    .venv/bin/python benchmarks/vs_trl.py
    .venv/bin/python benchmarks/vs_trl.py --prompt-tokens 256 --groups 4 --group-size 16 --max-new-tokens 64 --rounds 1

The two run in turn (ours, TRL, ours, TRL, ...), each in a process of its own, so that neither gets the quieter half of
the time. The first steps of a run are left out: they pay for caches and first allocations. The last line printed is one
JSON object. TRL lives in a virtual environment of its own, made on first use; `trl_worker.py` says how TRL is set up.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from other_systems import other_python

from rlflow.envs.arithmetic.env import load
from rlflow.models.resolve import resolve_model

ROOT = Path(__file__).resolve().parent.parent
WARM_UP_STEPS = 2
RUN_TIMEOUT_S = 7200.0


@dataclass(kw_only=True, slots=True, frozen=True)
class Setting:
    """What both sides share."""

    model: Path
    steps: int
    groups: int
    group_size: int
    prompt_tokens: int
    max_new_tokens: int
    max_length: int
    learning_rate: float
    threads: int

    @property
    def samples(self) -> int:
        """Samples of one optimiser step."""
        return self.groups * self.group_size


def samples_per_s(step_s: Sequence[float], samples: int) -> list[float]:
    """Samples a second of each steady step."""
    assert len(step_s) > WARM_UP_STEPS, f"{len(step_s)} steps leave nothing after {WARM_UP_STEPS} of warm-up"
    return [samples / seconds for seconds in step_s[WARM_UP_STEPS:]]


def run_ours(setting: Setting, prompts: Path, folder: Path) -> list[float]:
    """Seconds of each step of an rlflow run."""
    run_dir = folder / "rlflow"
    settings = {
        "recipe": "grpo_arithmetic",
        "model.path": setting.model,
        "model.dtype": "float32",
        "model.max_length": setting.max_length,
        "env.name": "dataset",
        "env.args.path": prompts,
        "reward.function": "rlflow.envs.arithmetic.reward:is_right",
        "algorithm.groups_per_step": setting.groups,
        "algorithm.group_size": setting.group_size,
        "rollout.max_new_tokens": setting.max_new_tokens,
        "trainer.learning_rate": setting.learning_rate,
        "trainer.warmup_steps": 0,
        "run.steps": setting.steps,
        "run.dir": run_dir,
        "run.on_exists": "fresh",
        "run.checkpoint_every": 0,
        "eval.every": 0,
    }
    words = [f"{key}={value}" for key, value in settings.items()]
    run_process("rlflow", [str(Path(sys.executable).with_name("rlflow")), "train", *words], folder)
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step_time"] for line in lines]


def run_trl(setting: Setting, mode: str, python: Path, prompts: Path, folder: Path) -> list[float]:
    """Seconds of each step of a TRL run; `mode` says what generates, "transformers" or "vllm" (colocated)."""
    settings = {
        "--mode": mode,
        "--model": setting.model,
        "--prompts": prompts,
        "--steps": setting.steps,
        "--groups": setting.groups,
        "--group-size": setting.group_size,
        "--max-new-tokens": setting.max_new_tokens,
        "--max-length": setting.max_length,
        "--learning-rate": setting.learning_rate,
        "--threads": setting.threads,
    }
    words = [str(word) for pair in settings.items() for word in pair]
    output = run_process(f"trl {mode}", [str(python), str(ROOT / "benchmarks" / "trl_worker.py"), *words], folder)
    return json.loads(output.splitlines()[-1])["step_s"]


def run_process(name: str, command: list[str], folder: Path) -> str:
    """Standard output of a command; stops with the end of what it printed when it fails."""
    log = folder / f"{name.replace(' ', '_')}.log"
    with log.open("w") as errors:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, timeout=RUN_TIMEOUT_S, check=False
        )
    if done.returncode != 0:
        ending = "\n".join((done.stdout + log.read_text()).splitlines()[-30:])
        raise SystemExit(f"{ending}\nvs_trl: error: {name} ended with exit status {done.returncode}; see above")
    return done.stdout


def write_prompts(path: Path, count: int, prompt_tokens: int, model: Path) -> None:
    """The first tasks of the arithmetic environment as rows of a data set: conversational prompt, answer.

    Each prompt is made at least `prompt_tokens` long by solved sums before its question, other ones for each task, so
    that no two tasks share more than their system prompt.
    """
    from transformers import AutoTokenizer

    tasks = load().tasks()
    if count > len(tasks):
        raise SystemExit(f"vs_trl: error: {count} prompts are needed, the environment has {len(tasks)}; lower --steps")
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = []
    for index, task in enumerate(tasks[:count]):
        system, user = task.prompt
        draw, examples = random.Random(index), ""
        while True:
            prompt = [system, {"role": "user", "content": examples + str(user["content"])}]
            length = len(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False))
            if length >= prompt_tokens:
                break
            first, second = draw.randrange(10), draw.randrange(10)
            examples += f"{first} + {second} = {first + second}\n"
        rows.append({"prompt": prompt, "answer": task.answer})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def measure(setting: Setting, modes: Sequence[str], rounds: int, python: Path) -> dict[str, list[list[float]]]:
    """System -> for each of its runs, samples a second of every steady step."""
    found: dict[str, list[list[float]]] = {}
    with tempfile.TemporaryDirectory(prefix="rlflow-vs-trl-") as name:
        folder = Path(name)
        prompts = folder / "prompts.jsonl"
        write_prompts(prompts, setting.steps * setting.groups, setting.prompt_tokens, setting.model)
        for round_number in range(rounds):
            for mode in modes:
                for system in ("rlflow", f"trl_{mode}"):
                    print(f"round {round_number + 1} of {rounds}: {system} ...", file=sys.stderr, flush=True)
                    is_ours = system == "rlflow"
                    if is_ours:
                        step_s = run_ours(setting, prompts, folder)
                    else:
                        step_s = run_trl(setting, mode, python, prompts, folder)
                    found.setdefault(system, []).append(samples_per_s(step_s, setting.samples))
    return found


def summarize(found: dict[str, list[list[float]]], setting: Setting) -> dict[str, Any]:
    """Medians over all steady steps of all runs, and how many times the best of TRL rlflow reaches."""
    systems = {
        system: {
            "samples_per_s": statistics.median([value for run in runs for value in run]),
            "per_run": [statistics.median(run) for run in runs],
            "steps": sum(map(len, runs)),
        }
        for system, runs in found.items()
    }
    best = max(figures["samples_per_s"] for system, figures in systems.items() if system != "rlflow")
    return {
        "benchmark": "vs_trl",
        "speedup_over_best_trl": systems["rlflow"]["samples_per_s"] / best,
        "systems": systems,
        "samples_per_step": setting.samples,
        "group_size": setting.group_size,
        "prompt_tokens": setting.prompt_tokens,
        "max_new_tokens": setting.max_new_tokens,
        "dtype": "float32",
        "model": setting.model.name,
        "cpus": setting.threads,
    }


def table(summary: dict[str, Any]) -> str:
    rows = [f"{'system':18} {'samples/s':>10} {'steps':>6}  median of each run"]
    for system, figures in summary["systems"].items():
        runs = ", ".join(f"{value:.2f}" for value in figures["per_run"])
        rows.append(f"{system:18} {figures['samples_per_s']:10.2f} {figures['steps']:6}  {runs}")
    return "\n".join([*rows, f"rlflow / best TRL: {summary['speedup_over_best_trl']:.2f}"])


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare rlflow's GRPO with TRL's on this machine's CPU.")
    parser.add_argument("--model", default="smollm2-135m", help="as model.path")
    parser.add_argument("--steps", type=int, default=6, help=f"of one run; the first {WARM_UP_STEPS} do not count")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each system")
    parser.add_argument("--modes", nargs="+", choices=["transformers", "vllm"], default=["transformers", "vllm"])
    parser.add_argument("--groups", type=int, default=8, help="tasks of one step")
    parser.add_argument("--group-size", type=int, default=8, help="episodes of a task")
    parser.add_argument("--prompt-tokens", type=int, default=0, help="at least; 0: questions alone, about 45")
    parser.add_argument("--max-new-tokens", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--trl-python", type=Path, help="the Python of an environment that has TRL; made if not given")
    arguments = parser.parse_args()
    if arguments.steps <= WARM_UP_STEPS or arguments.rounds < 1:
        parser.error(f"--steps must be above {WARM_UP_STEPS} and --rounds at least 1")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    setting = Setting(
        model=Path(resolve_model(arguments.model)),
        steps=arguments.steps,
        groups=arguments.groups,
        group_size=arguments.group_size,
        prompt_tokens=arguments.prompt_tokens,
        max_new_tokens=arguments.max_new_tokens,
        max_length=max(256, arguments.prompt_tokens + arguments.max_new_tokens + 64),
        learning_rate=arguments.learning_rate,
        threads=len(os.sched_getaffinity(0)),
    )
    python = arguments.trl_python or other_python("trl-venv", "trl.lock")
    summary = summarize(measure(setting, arguments.modes, arguments.rounds, python), setting)
    print(table(summary))
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
