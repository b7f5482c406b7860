"""An environment of the verifiers library, played by verifiers itself against the endpoint of the episode.

Its rubric is the reward. verifiers scores a reward function that raises with 0.0; here such an episode ends in an
error.
"""

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

from rlflow.envs.base import Endpoint, EnvironmentSpec, Program, Result
from rlflow.envs.verifiers.host import Source, host_of, rows_of
from rlflow.errors import ConfigError
from rlflow.types import Message, Task

ALL_ROWS = -1


def load(
    id: str,
    python: str,
    args: Mapping[str, Any] | None = None,
    size: int | None = None,
    evaluation_size: int = 64,
) -> EnvironmentSpec:
    """An installed verifiers environment, with its own data, rubric and tools.

    id: as vf.load_environment takes it; args: its arguments.
    python: path of the interpreter that has verifiers and the environment, the same on every machine.
    size: the first so many rows; None for all. evaluation_size: the same of its evaluation data set, if it has one.
    """
    if (size is not None and size < 1) or evaluation_size < 1:
        raise ConfigError(f"env.args.size and evaluation_size must be positive; got {size} and {evaluation_size}")
    source = Source(id=id, args=json.dumps(dict(args or {}), sort_keys=True), python=python)
    limits = (size or ALL_ROWS, evaluation_size)
    has_evaluation = rows_of(source, *limits)["eval"] is not None
    return EnvironmentSpec(
        tasks=partial(_tasks, source, limits, "train"),
        build=partial(Verifiers, source),
        evaluation_tasks=partial(_tasks, source, limits, "eval") if has_evaluation else None,
    )


class Verifiers(Program):
    """One rollout."""

    def __init__(self, source: Source) -> None:
        self._source = source

    async def run(self, task: Task, endpoint: Endpoint) -> Result:
        """Raises VerifiersError for a failure of the environment or of its rubric."""
        host = await host_of(self._source)
        outcome = await host.ask({"row": task.data["row"], "base_url": endpoint.base_url, "model": endpoint.model})
        metrics = {f"verifiers/{name}": value for name, value in outcome["metrics"].items()}
        return Result(reward=outcome["reward"], metrics=metrics)


def _tasks(source: Source, limits: tuple[int, int], split: str) -> list[Task]:
    tasks = []
    for index, row in enumerate(rows_of(source, *limits)[split]):
        prompt, answer = row.get("prompt") or row.get("question") or "", row.get("answer")
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if not all(isinstance(message.get("content"), str) for message in messages):
            what = f"row {index} has a message that is not text, which is not supported"
            raise ConfigError(f"env.args.id={source.id}: {what}")
        tasks.append(
            Task(
                id=f"{source.id}/{split}/{index}",
                prompt=tuple(Message(role=message["role"], content=message["content"]) for message in messages),
                answer=None if answer is None else str(answer),
                data={"row": row},
            )
        )
    return tasks
