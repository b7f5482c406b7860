"""Tasks that are sometimes solved and sometimes not are drawn more often.

For each task there is a posterior Beta(a, b) of its pass rate p; evidence loses weight as time goes by, since the
policy changes (VADE). A task is drawn with a probability proportional to

    E[p (1 - p)] = a b / ((a + b) (a + b + 1))

which for rewards of 0 and 1 is the variance that is expected within its group, and for other rewards bounds it. A group
without variance teaches nothing.
"""

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlflow.curriculum.base import Curriculum
from rlflow.curriculum.uniform import Uniform
from rlflow.errors import ConfigError
from rlflow.types import Json, Task

PRIOR = 0.5
"""a and b of a task without results (Jeffreys)."""
MOST_SIGNAL = 0.25
"""p (1 - p) at p = 1/2."""
MOST_TRIES = 1000
"""Tasks that are offered for one draw; more are hardly ever needed."""
SOLVED, UNSOLVED = 0.9, 0.1
"""Pass rates above and below which a task is counted as solved or unsolved."""


@dataclass(slots=True)
class Results:
    """What was seen of one task."""

    total: float
    """The sum of the rewards, each with the weight that it had at `draws`."""
    count: float
    """The sum of these weights."""
    draws: int
    """How many tasks had been drawn when the last result came."""


class Difficulty(Curriculum):
    """Draws by the posterior, and a share of all draws from shuffled passes, so that every task has its turn.

    Rewards are scaled to pass rates by the range [0, 1], widened to what has been seen: of rewards -1 and 1, -1 counts
    as a failure and 0 as half.
    """

    def __init__(self, tasks: Sequence[Task], seed: int, *, explore: float = 0.2, half_life: float = 2.0) -> None:
        """`explore`: the share of draws from passes. `half_life`: after so many draws for each task of the data set, a
        result counts half."""
        if not 0 < explore < 1:
            raise ConfigError(f"curriculum.args.explore must be a number above 0 and below 1; got {explore!r}")
        if not 0 < half_life < math.inf:
            raise ConfigError(f"curriculum.args.half_life must be a number above 0; got {half_life!r}")
        self._tasks = tasks
        self._seed = seed
        self._explore = explore
        self._half_life_draws = half_life * len(tasks)
        self._passes = Uniform(tasks, f"{seed}/explore")
        self._results: dict[str, Results] = {}
        self._low, self._high = 0.0, 1.0
        self._draws = 0
        self._levels: Counter[str] = Counter()
        """Tasks that have results, by `_level`."""

    def next(self) -> Task:
        self._draws += 1
        if int(self._draws * self._explore) > int((self._draws - 1) * self._explore):
            return self._passes.next()
        rng = random.Random(f"{self._seed}/draw/{self._draws}")  # one for each draw: there is no state of it to keep
        for _ in range(MOST_TRIES):
            task = rng.choice(self._tasks)
            if rng.random() * MOST_SIGNAL < self.signal(task.id):
                return task
        return self._passes.next()

    def on_result(self, task_id: str, rewards: Sequence[float]) -> None:
        if not rewards:
            return
        before = self._results.get(task_id)
        weight = 0.0 if before is None else self._weight(before)
        if before is not None:
            self._levels[self._level(before)] -= 1
        after = Results(
            total=sum(rewards) + (before.total * weight if before else 0.0),
            count=len(rewards) + (before.count * weight if before else 0.0),
            draws=self._draws,
        )
        self._results[task_id] = after
        low, high = min(self._low, *rewards), max(self._high, *rewards)
        if (low, high) == (self._low, self._high):
            self._levels[self._level(after)] += 1
            return
        self._low, self._high = low, high
        self._levels = Counter(map(self._level, self._results.values()))

    def signal(self, task_id: str) -> float:
        """E[p (1 - p)] of this task as of now."""
        a = b = PRIOR
        results = self._results.get(task_id)
        if results is not None:
            rate, count = self._rate(results), results.count * self._weight(results)
            a, b = PRIOR + rate * count, PRIOR + (1 - rate) * count
        return a * b / ((a + b) * (a + b + 1))

    def metrics(self) -> dict[str, float]:
        """Shares: `seen` of all tasks, the others of those."""
        seen = len(self._results)
        if not seen:
            return {"seen": 0.0}
        shares = {level: self._levels[level] / seen for level in ("solved", "unsolved", "learnable")}
        return {"seen": seen / len(self._tasks), **shares}

    def state(self) -> dict[str, Json]:
        return {
            "draws": self._draws,
            "passes": self._passes.state(),
            "range": [self._low, self._high],
            "results": {task_id: [one.total, one.count, one.draws] for task_id, one in self._results.items()},
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._draws = state["draws"]
        self._passes.restore(state["passes"])
        self._low, self._high = state["range"]
        self._results = {task_id: Results(*values) for task_id, values in state["results"].items()}
        self._levels = Counter(map(self._level, self._results.values()))

    def _weight(self, results: Results) -> float:
        return 0.5 ** ((self._draws - results.draws) / self._half_life_draws)

    def _rate(self, results: Results) -> float:
        """The mean reward, scaled; it does not change with the weight."""
        rate = (results.total / results.count - self._low) / (self._high - self._low)
        return min(max(rate, 0.0), 1.0)

    def _level(self, results: Results) -> str:
        rate = self._rate(results)
        if rate > SOLVED:
            return "solved"
        return "unsolved" if rate < UNSOLVED else "learnable"
