"""The arithmetic tasks, in an environment that takes its time to answer.

Most tools answer at once and a few take long; a log-normal wait has both. Waiting costs no processor time.
"""

from __future__ import annotations

import asyncio
import math
import random
from dataclasses import replace
from functools import partial

from rlflow.envs import arithmetic
from rlflow.envs.base import Environment, EnvironmentSpec, EnvironmentStep, SingleTurn
from rlflow.errors import ConfigError
from rlflow.types import Message


def load(median_s: float = 0.2, sigma: float = 1.2, longest_s: float = 30.0, size: int = 2000) -> EnvironmentSpec:
    """Arithmetic tasks whose only reply is answered after a log-normal wait.

    median_s: seconds that half of the episodes wait at most; sigma: spread of the wait's logarithm (at 1.2, one in a
    hundred waits 16 times the median); longest_s: no episode waits longer.
    """
    if median_s <= 0 or sigma < 0 or longest_s < median_s:
        raise ConfigError(
            "env.args of latency need median_s > 0, sigma >= 0 and longest_s >= median_s; "
            f"got {median_s:g}, {sigma:g} and {longest_s:g}"
        )
    return replace(arithmetic.load(size=size), build=partial(build, median_s, sigma, longest_s))


def build(median_s: float, sigma: float, longest_s: float) -> Environment:
    return Latency(min(random.lognormvariate(math.log(median_s), sigma), longest_s))


class Latency(SingleTurn):
    """Answers after `wait_s` seconds."""

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s

    async def step(self, reply: Message) -> EnvironmentStep:
        await asyncio.sleep(self._wait_s)
        return await super().step(reply)
