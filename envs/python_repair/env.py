"""The model sends a function, the sandbox runs its tests, the model sees what went wrong."""

from functools import partial
from typing import cast

from rlflow.envs.base import Environment, EnvironmentSpec, Prompt, Step
from rlflow.envs.python_repair.data import make_tasks
from rlflow.envs.rewards.code import Tested, last_program, run_statements
from rlflow.errors import ConfigError
from rlflow.processes.sandbox.run import SandboxLimits
from rlflow.types import Message, Task

TURN_COST = 0.1
MAX_TURNS = 10
LIMITS = SandboxLimits(seconds=4.0, cpu_seconds=4, memory_mb=256)
NO_PROGRAM = "there is no ```python block in your reply"


def load(size: int | None = None, seed: int = 0, max_turns: int = 3) -> EnvironmentSpec:
    """Small functions with one mistake each.

    size: number of tasks; None is all. seed: their order, and which ones where `size` is less than all.
    max_turns: replies that the model has; each after the first costs a tenth of the reward.
    """
    if not 1 <= max_turns <= MAX_TURNS:
        raise ConfigError(f"env.args.max_turns must be from 1 to {MAX_TURNS}; got {max_turns}")
    make_tasks(size, seed, is_evaluation=False)  # a wrong size shows now
    return EnvironmentSpec(
        tasks=partial(make_tasks, size, seed, is_evaluation=False),
        build=partial(PythonRepair, max_turns),
        evaluation_tasks=partial(make_tasks, None, seed, is_evaluation=True),
    )


class PythonRepair(Environment):
    """Ends when all tests pass, or after `max_turns` replies. Its reward is the worth of the last reply."""

    def __init__(self, max_turns: int) -> None:
        self._max_turns = max_turns
        self._turn = 0
        self._worth = 0.0
        self._statements: list[str] = []

    async def reset(self, task: Task) -> Prompt:
        self._statements = [f"assert {test}" for test in cast(list[str], task.data["tests"])]
        return Prompt(messages=list(task.prompt))

    async def step(self, reply: Message) -> Step:
        """The reward is the change of worth, so that the sum is right wherever the episode stops."""
        self._turn += 1
        program = last_program(reply["content"])
        if program is None:
            tested = Tested(passed=(False,) * len(self._statements), error=NO_PROGRAM)
        else:
            tested = await run_statements(program, self._statements, LIMITS)
        is_solved = all(tested.passed)
        before, self._worth = self._worth, worth(tested.share, self._turn)
        is_done = is_solved or self._turn == self._max_turns
        count = f"{sum(tested.passed)} of {len(tested.passed)} tests pass"
        complaint = f"{count}. The first problem: {tested.error}\nReply with the whole function in a ```python block."
        return Step(
            messages=[] if is_done else [Message(role="user", content=complaint)],
            done=is_done,
            reward=self._worth - before,
            metrics={"solved": float(is_solved), "timed_out_programs": float(tested.is_timed_out)},
        )


def worth(share: float, turn: int) -> float:
    """The worth of a program that passes `share` of its tests, in reply number `turn` (1 is the first).

    Example: worth(1.0, 1) == 1.0; worth(1.0, 2) == 0.9; worth(0.5, 3) == 0.4
    """
    return share * (1.0 - TURN_COST * (turn - 1))
