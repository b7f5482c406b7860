"""What a run's records say is wrong with it, the likely cause, and the setting that helps. Pure.

    metrics.jsonl, evaluations.jsonl -> Health -> Alarm -> alarms.jsonl -> the report;  console, trackers

alarms.jsonl has one JSON object a line (the fields of `Alarm`), in the order of `step`:

    {"step": 27, "name": "entropy_collapse", "state": "began", "since": 23, "level": 1, "what": "entropy fell ...",
     "cause": "...", "remedy": "..."}

An alarm is told when it `began`, when it got `worse` (once, level 2), and when it `ended`. It lasts from `since` of its
`began` to `step` of the next `ended` of the same name, or to the end of the run.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from heapq import merge

from rlflow.runtime.derived import MISMATCH
from rlflow.telemetry.conditions import CONDITIONS, QUIET, Finding, Record, Seen, held_out_falls

ADVICE = {
    "no_signal": (
        "the policy answers a task the same way every time, or the tasks are too hard or too easy for it",
        "algorithm.dynamic_sampling=true, curriculum.kind=difficulty, a larger algorithm.group_size",
    ),
    "constant_reward": (
        "the reward does not read replies as the model writes them (or all are cut off), or the model never succeeds",
        "the replies in samples/, `rlflow env check`, easier tasks, a reward with partial credit",
    ),
    "failed_episodes": (
        "the environment or the reward raises, or takes longer than its limit",
        "`rlflow env check`; the dropped groups' alarms say what was raised",
    ),
    "truncation": (
        "the limit is too small, or the model does not know when to stop (a base model, a wrong chat template)",
        "a larger rollout.max_new_tokens and model.max_length, rollout.stop, the replies in samples/",
    ),
    "entropy_collapse": (
        "updates that are too large, or too many on the same few tasks",
        "a lower trainer.learning_rate, algorithm.dynamic_sampling=true, algorithm.entropy_low and entropy_high, "
        "algorithm.kl_coefficient=0.01",
    ),
    "learning_rate": (
        "trainer.learning_rate is too high",
        "a lower one, trainer.warmup_steps, algorithm.kl_coefficient; going on from an earlier checkpoint",
    ),
    "kl": (
        "updates that are too large, or a penalty that is too small beside the reward",
        "a lower trainer.learning_rate, a larger algorithm.kl_coefficient, algorithm.kl_target",
    ),
    "longer_replies": (
        "length costs nothing, or pays",
        "algorithm.overlong_tokens, algorithm.mask_truncated=true, algorithm.aggregation",
    ),
    "one_component": (
        "that part can be had without solving the task",
        "a smaller entry of reward.weights for it, or paying it only with a right answer; the replies in samples/",
    ),
    "held_out_falls": (
        "the policy learns its training tasks, or a flaw of their reward, by heart",
        "the best checkpoint, more tasks, a lower trainer.learning_rate, algorithm.kl_coefficient",
    ),
    "mismatch": (
        "the engines compute with other weights, precision or kernels than the trainer",
        "weights.verify=full, model.dtype=float32, no rollout.quantization; algorithm=tis if it has to stay",
    ),
}
"""Name -> likely cause, what to try."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Alarm:
    """One line of alarms.jsonl."""

    step: int
    """When it is told."""
    name: str
    state: str
    """`began`, `worse` or `ended`."""
    since: int
    """The first step that shows it."""
    level: int
    what: str
    """With figures; "" when it ended."""
    cause: str
    remedy: str

    def __str__(self) -> str:
        if self.state == "ended":
            return f"{self.name} is over at step {self.step}"
        return f"{self.name} since step {self.since}: {self.what}. Likely cause: {self.cause}. Try: {self.remedy}"


@dataclass(slots=True)
class _Course:
    """One alarm through the run."""

    level: int = 0
    """0 while it does not last."""
    since: int = 0
    num_quiet: int = 0
    num_times: int = 0


class Health:
    """The alarms of one run, each told when it begins, gets worse and ends."""

    def __init__(self, *, within_groups: bool = True, dtype: str = "float32", has_dropout: bool = False) -> None:
        """`within_groups`: whether a group of equal rewards carries no signal. `dtype`: what is computed in.

        `has_dropout`: the trainer computes another model than the engines, so that a difference is no alarm.
        """
        self._seen = Seen(within_groups=within_groups, mismatch=math.inf if has_dropout else MISMATCH[dtype])
        self._courses = {condition.__name__: _Course() for condition in CONDITIONS}

    @property
    def has_signal(self) -> bool:
        """Whether any step so far could teach anything."""
        return self._seen.has_signal

    @property
    def told(self) -> dict[str, int]:
        """Name -> first step, for the alarms that have begun."""
        return {name: course.since for name, course in self._courses.items() if course.num_times}

    def step(self, record: Record) -> list[Alarm]:
        """What is new with the record of a step."""
        self._seen.add(record)
        return [alarm for condition in CONDITIONS for alarm in self._news(condition)]

    def evaluated(self, record: Record) -> list[Alarm]:
        """What is new with the record of an evaluation."""
        if record.get("eval/reward") is None:
            return []
        self._seen.evaluated(record)
        return self._news(held_out_falls) if self._seen.records else []

    def replay(self, records: Iterable[Record], evaluations: Iterable[Record] = ()) -> list[Alarm]:
        """The alarms of a run that was recorded; an evaluation after a step comes after its record."""
        sources = ((records, self.step), (evaluations, self.evaluated))
        lines = [[(each["step"], rank, each, take) for each in found] for rank, (found, take) in enumerate(sources)]
        return [alarm for *_, each, take in merge(*lines, key=lambda line: line[:2]) for alarm in take(each)]

    def _news(self, condition: Callable[[Seen], Finding | None]) -> list[Alarm]:
        name, step = condition.__name__, self._seen.records[-1]["step"]
        course, found = self._courses[name], condition(self._seen)
        level, num_steps, what = found or (0, 0, "")
        course.num_quiet = 0 if found else course.num_quiet + 1
        if found and level > course.level:
            state = "worse" if course.level else "began"
            if not course.level:
                course.since, course.num_times = max(step - num_steps + 1, 1), course.num_times + 1
        elif course.level and course.num_quiet >= QUIET * 2 ** (course.num_times - 1):
            state, level = "ended", 0
        else:
            return []
        course.level = level
        cause, remedy = ADVICE[name]
        told = Alarm(
            step=step, name=name, state=state, since=course.since, level=level, what=what, cause=cause, remedy=remedy
        )
        return [told]
