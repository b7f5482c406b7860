"""One question of reasoning-gym, one reply with an <answer>.

The reward is reasoning-gym's own score of the text between the last <answer> tags. The rest of the reply does not
count, because several data sets give partial credit to a text that merely contains the answer, or to any text at all.
Without a system prompt nothing asks for tags; then the whole reply is the answer.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

from rlflow.envs.answers import tagged_answer
from rlflow.envs.base import EnvironmentSpec, SingleTurn
from rlflow.envs.reasoning_gym.data import SYSTEM_PROMPTS, Part, dataset_of, make_tasks
from rlflow.envs.seeds import seeded_tasks
from rlflow.errors import ConfigError
from rlflow.types import Message, Task

_REFUSALS = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError)
"""What `score_answer` of some data sets raises for an answer that it cannot read."""


def load(
    dataset: str | None = None,
    options: Mapping[str, Any] | None = None,
    mix: Mapping[str, Mapping[str, Any] | None] | None = None,
    levels: Sequence[int] = (),
    prompt_style: str = "default",
    size: int = 2000,
    seed: int = 0,
    evaluation_size: int = 64,
) -> EnvironmentSpec:
    """Questions of one data set of reasoning-gym, or of several.

    dataset: a name of reasoning-gym, with its own options; or
    mix: names, each with a `weight` and `options`, such as {chain_sum: {weight: 2}, gcd: {options: {max_numbers: 3}}}.
    levels: of the data sets' curricula; equally many tasks of each, and a kind of their own for each.
    prompt_style: a system prompt of reasoning-gym, which asks for <answer> tags; "": none, and the whole reply counts.
    size, seed: how many tasks, and which; evaluation_size: number of tasks for `eval.every`, from another seed.
    """
    if (dataset is None) == (not mix):
        raise ConfigError("env.args of reasoning_gym need one of `dataset` and `mix`")
    if mix and options:
        raise ConfigError("env.args.options belong to `dataset`; with `mix`, give each data set its own")
    if prompt_style and prompt_style not in SYSTEM_PROMPTS:
        raise ConfigError(
            f"env.args.prompt_style={prompt_style} is not a system prompt of reasoning-gym; there are "
            f"{', '.join(SYSTEM_PROMPTS)}, and '' for none"
        )
    entries = {dataset: {"options": options}} if dataset is not None else dict(mix or {})
    parts = []
    for name, entry in entries.items():
        entry = entry or {}
        weight, chosen = entry.get("weight", 1.0), entry.get("options") or {}
        if not entry.keys() <= {"weight", "options"} or not isinstance(weight, int | float) or weight <= 0:
            raise ConfigError(f"env.args.mix takes a positive `weight` and `options` for each data set; got {entry}")
        for level in levels or (None,):
            part = Part(dataset=name, seed=seed, size=size, options=dict(chosen), level=level, weight=float(weight))
            parts.append(part)
    tasks, evaluation_tasks = seeded_tasks(partial(make_tasks, parts, prompt_style), size, seed, evaluation_size)
    for part in parts:
        dataset_of(part)  # a wrong name or option shows now, not when the run is up
    return EnvironmentSpec(
        tasks=tasks, build=SingleTurn, reward=score, expert=tagged, evaluation_tasks=evaluation_tasks
    )


def tagged(task: Task, messages: Sequence[Message]) -> str:
    """The answer, between the tags that the reward looks for if it does."""
    has_tags = cast(dict[str, Any], task.data)["has_tags"]
    return f"<answer>{task.answer}</answer>" if has_tags else str(task.answer)


def score(task: Task, completion: str) -> float:
    """reasoning-gym's score from 0 to 1; 0 without the <answer> tags that were asked for, or if it cannot be read.

    An answer cannot be read if scoring it fails although scoring the data set's own answer does not. Any other failure
    is an error, not a score. Raises ValueError when the task's item has another question than when the run began.
    """
    data: dict[str, Any] = task.data
    answer = tagged_answer(completion) if data["has_tags"] else completion.strip()
    if answer is None:
        return 0.0
    dataset = dataset_of(Part(**data["part"]))
    item = dataset[data["index"]]
    if item["question"] != data["question"]:
        raise ValueError(
            f"reasoning-gym made another question for {task.id} than when the run began: {data['part']['dataset']} "
            "depends on the order of sets; start the run with PYTHONHASHSEED=0 in the environment"
        )
    try:
        return float(dataset.score_answer(answer, item))
    except _REFUSALS:
        dataset.score_answer(item["answer"], item)
        return 0.0
