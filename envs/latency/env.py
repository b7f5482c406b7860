"""The arithmetic tasks, in an environment that takes its time to open.

Most worlds open at once and a few take long; a log-normal wait has both. Waiting costs no processor time.
"""

import asyncio
import math
import random
from dataclasses import replace
from functools import partial

from rlflow.envs.arithmetic import env as arithmetic
from rlflow.envs.base import EnvironmentSpec, Prompt, SingleTurn
from rlflow.errors import ConfigError
from rlflow.types import Task

MANUAL = "Press the keys of the first number, then plus, then those of the second one, then equals. "


def load(
    median_s: float = 0.2, sigma: float = 1.1, longest_s: float = 30.0, context: int = 0, size: int = 2000
) -> EnvironmentSpec:
    """Arithmetic tasks that are asked after a log-normal wait.

    median_s: seconds that half of the episodes wait at most; sigma: spread of the wait's logarithm (at 1.1, one in a
    hundred waits 13 times the median); longest_s: no episode waits longer.
    context: characters of a manual before the question, as agents have it.
    """
    if median_s <= 0 or sigma < 0 or longest_s < median_s:
        raise ConfigError(
            "env.args of latency need median_s > 0, sigma >= 0 and longest_s >= median_s; "
            f"got {median_s:g}, {sigma:g} and {longest_s:g}"
        )
    manual = (MANUAL * (context // len(MANUAL) + 1))[:context]
    tasks = arithmetic.load(size=size, system_prompt=f"{arithmetic.SYSTEM_PROMPT} {manual}".strip())
    return replace(tasks, build=partial(Latency, median_s, sigma, longest_s))


class Latency(SingleTurn):
    """Asks after a wait that is drawn once for each episode."""

    def __init__(self, median_s: float, sigma: float, longest_s: float) -> None:
        self._wait_s = min(random.lognormvariate(math.log(median_s), sigma), longest_s)

    async def reset(self, task: Task) -> Prompt:
        await asyncio.sleep(self._wait_s)
        return await super().reset(task)
