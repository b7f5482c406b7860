"""A model plays an environment's evaluation tasks: engines, runners and rewards, without training.

Target -> tasks -> Ray -> fleet -> evaluate -> EvaluationTable -> Evaluated; every answer -> answers.jsonl
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlflow.cluster.devices import has_gpus
from rlflow.cluster.start import ray_cluster, start_fleet
from rlflow.config import Config
from rlflow.environments.find import has_no_reward, load_environment
from rlflow.envs.base import EnvironmentSpec
from rlflow.errors import ConfigError, RunError, first_error_stands
from rlflow.groups.evaluation import Evaluation, evaluate
from rlflow.groups.scores import Score
from rlflow.models.resolve import resolve_model, resolve_reward_models
from rlflow.rewards.models import model_paths
from rlflow.runtime.derived import by_device, without_training
from rlflow.runtime.disk import disk_errors, write_whole
from rlflow.runtime.signals import Stopper, run_until_done
from rlflow.tools.figures import table
from rlflow.tools.target import Target
from rlflow.types import EpisodeSummary, Message, PlayedGroup, Task
from rlflow.workers.engine.tokens import check_shown, check_tokens

FEW = 64
"""Tasks of the training set that are played if the environment holds none out."""


@dataclass(kw_only=True, slots=True, frozen=True)
class EvaluationTable:
    """What one model has reached."""

    model: str
    scores: list[Score]
    """Sampled and greedy: of all tasks, and of each kind of them."""
    answers: Path
    """A JSON object a line: task, kind, is_greedy, prompt, reply, expected, reward, parts, end, detail."""

    def record(self) -> dict[str, Any]:
        """The figures under the names that evaluations.jsonl has."""
        figures = (score.record() for score in self.scores)
        return {"model": self.model, "answers": str(self.answers)} | {k: v for each in figures for k, v in each.items()}


@dataclass(kw_only=True, slots=True, frozen=True, repr=False)
class Evaluated:
    """What an evaluation has found. Shown, it is a table."""

    tables: list[EvaluationTable]
    """The table of the model that was asked for, then that of the one its run began with, if that was asked for too."""

    @property
    def records(self) -> list[dict[str, Any]]:
        """One a model: its name, where its answers are, and the figures under the names of evaluations.jsonl."""
        return [each.record() for each in self.tables]

    def __repr__(self) -> str:
        """The same row of each model beneath each other, and where the answers are."""
        most = sorted({k for each in self.tables for score in each.scores for k in score.passes})
        head = ["model", "tokens", "kind", "tasks", "reward", "95 %", *(f"pass@{k}" for k in most), "failed", "cut off"]
        rows = []
        for scores in zip(*(each.scores for each in self.tables), strict=True):
            for each, score in zip(self.tables, scores, strict=True):
                half = "-" if score.error is None else f"+-{score.error:.3f}"
                passes = [_share(score.passes.get(k)) for k in most]
                counts = [str(score.num_failed), "-" if score.truncated is None else f"{score.truncated:.0%}"]
                how, kind = "greedy" if score.is_greedy else "sampled", "all" if score.kind is None else score.kind
                row = [each.model, how, kind, str(score.num_tasks), _share(score.reward), half]
                rows.append([*row, *passes, *counts])
        return "\n".join([table(head, rows), *(f"answers: {each.answers}" for each in self.tables)])


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def evaluate_target(
    target: Target, *, folder: Path | None = None, base: bool = False, num_tasks: int | None = None
) -> Evaluated:
    """What `rlflow eval` and `Run.evaluate` do: play each evaluation task `eval.episodes` times, and once more taking
    the likeliest tokens; with `base` also with the model that the run began with.

    `folder` gets the answers and evaluation.json; None is a new one, in the run's `evaluations` or in runs/.
    `num_tasks`: only the first so many.

    Raises ConfigError before anything is started, RunError when nothing was scored, KeyboardInterrupt or SystemExit
    when a signal comes first.
    """
    config = target.config
    if num_tasks is not None and num_tasks < 1:
        raise ConfigError(f"the number of tasks must be at least 1; got {num_tasks}")
    spec = load_environment(config.env, config.reward)
    if has_no_reward(spec, config.reward):
        raise ConfigError(
            f"env.name={config.env.name} has no reward of its own to evaluate with; give a reward.function"
        )
    # What the run did without, because its replies were given.
    config = replace(config, rollout=replace(config.rollout, engines=max(1, config.rollout.engines)))
    tasks = _tasks(spec, config.env.name, num_tasks)
    if (limit := config.rollout.max_new_tokens) < (needed := spec.reply_tokens):
        _tell(
            f"warning: rollout.max_new_tokens={limit} may cut off replies that would be right; env.name="
            f"{config.env.name} needs rollout.max_new_tokens={needed} and a model.max_length with room for the prompt"
        )
    base_path = resolve_model(config.model.path) if base else None
    reward_models = resolve_reward_models(model_paths(config.reward))
    if folder is None:
        where = Path("runs") if target.run is None else target.run / "evaluations"
        folder = where / f"eval-{_file_word(target.name)}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = folder.absolute()
    with disk_errors("the answers", folder):
        folder.mkdir(parents=True, exist_ok=True)
    config = replace(config, run=replace(config.run, dir=str(folder)))
    with target.model(folder) as model:
        found = [_evaluate_model(config, spec, tasks, model, reward_models, target.name)]
    if base_path is not None:
        name = f"base {config.model.path}"
        found.append(_evaluate_model(config, spec, tasks, base_path, reward_models, name))
    evaluated = Evaluated(tables=found)
    write_whole(folder / "evaluation.json", json.dumps(evaluated.records, indent=1) + "\n", "the scores")
    return evaluated


def _file_word(name: str) -> str:
    """A model's name as a part of a file's name."""
    return "".join(each if each.isalnum() else "-" for each in name)


def _evaluate_model(
    config: Config,
    spec: EnvironmentSpec,
    tasks: Sequence[Task],
    model_path: str,
    reward_models: Mapping[str, str],
    name: str,
) -> EvaluationTable:
    """Start a fleet without training, and have it play; the answers go to run.dir."""
    check_tokens(config, model_path)
    check_shown(config, model_path, tasks)
    folder = Path(config.run.dir or "")
    config = replace(config, model=replace(config.model, path=model_path))
    answers = folder / f"answers-{_file_word(name)}.jsonl"
    _tell(f"{name} plays {len(tasks)} tasks of {config.env.name}, {config.eval.episodes} times and once more greedily")
    with ray_cluster(config, folder):
        config = without_training(by_device(config, on_gpus=has_gpus()))
        playing = _play(config, spec, tasks, model_path, reward_models, answers)
        evaluation = run_until_done(_unless_stopped(playing, answers))
    if evaluation.reward is None:
        raise RunError(f"nothing was scored: {evaluation.detail}")
    return EvaluationTable(model=name, scores=evaluation.scores, answers=answers)


def _tasks(spec: EnvironmentSpec, environment: str, num_tasks: int | None) -> Sequence[Task]:
    if spec.evaluation_tasks is not None:
        return spec.evaluation_tasks()[:num_tasks]
    found = [replace(task, demonstrations=()) for task in spec.tasks()[: num_tasks or FEW]]
    _tell(f"warning: env.name={environment} holds no tasks out; the first {len(found)} to train on are played instead")
    return found


async def _unless_stopped(playing: Coroutine[Any, Any, Evaluation], answers: Path) -> Evaluation:
    stopper = Stopper(lambda: f"the answers so far are in {answers}")
    try:
        evaluation = await stopper.run_unless_stopped(playing, _tell)
    finally:
        stopper.restore()
    if evaluation is None:
        assert stopper.signal is not None
        raise KeyboardInterrupt if stopper.signal is signal.SIGINT else SystemExit(128 + stopper.signal)
    return evaluation


async def _play(
    config: Config,
    spec: EnvironmentSpec,
    tasks: Sequence[Task],
    model_path: str,
    reward_models: Mapping[str, str],
    answers: Path,
) -> Evaluation:
    start_s = time.monotonic()
    fleet = await start_fleet(config, model_path, spec, _tell, reward_models, tell=_tell)
    _tell(f"started in {time.monotonic() - start_s:.0f} s; playing")
    runners = fleet.workers.runners

    async def keep(task: Task, played: PlayedGroup) -> None:
        conversations = await asyncio.gather(*(runners.transcript(payload) for payload in played.payloads))
        with disk_errors("the answers", answers.parent):
            for index, (episode, messages) in enumerate(zip(played.episodes, conversations, strict=True)):
                answer = _answer(task, episode, messages, is_greedy=index == config.eval.episodes)
                file.write(json.dumps(answer) + "\n")

    try:
        with answers.open("w", encoding="ascii", buffering=1) as file:
            playing = asyncio.create_task(
                evaluate(config, fleet.workers, tasks, step=0, version=0, plays_greedy=True, keep=keep)
            )
            failing = asyncio.create_task(fleet.engine_fleet.wait_until_failed())
            try:
                await asyncio.wait((playing, failing), return_when=asyncio.FIRST_COMPLETED)
                return playing.result() if playing.done() else failing.result()
            finally:
                playing.cancel()
                failing.cancel()
                await asyncio.gather(playing, failing, return_exceptions=True)
    finally:
        with first_error_stands():
            await fleet.stop()


def _answer(task: Task, episode: EpisodeSummary, messages: Sequence[Message], *, is_greedy: bool) -> Mapping[str, Any]:
    first = next((index for index, each in enumerate(messages) if each["role"] == "assistant"), len(messages))
    return {
        "task": task.id,
        "kind": task.kind,
        "is_greedy": is_greedy,
        "prompt": messages[:first],
        "reply": messages[first:],
        "expected": task.answer,
        "reward": episode.reward,
        "parts": {name: value for name, value in episode.metrics.items() if name.startswith("rewards/")},
        "end": episode.end.value,
        "detail": episode.detail,
    }


def _tell(text: str) -> None:
    print(f"rlflow: {text}", file=sys.stderr, flush=True)
