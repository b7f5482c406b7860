"""When a run is unwell: each condition looks at the newest records and says what it finds. Pure; `health` tells it."""

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median, stdev
from typing import Any

from rlflow.types import EpisodeEnd

RECENT = 5
"""Steps that are averaged; fewer follow the noise of single batches."""
BACK = 20
"""Steps over which something grows or stays."""
KEPT = 50
"""Steps that are looked back on."""
QUIET = 5
"""Steps without the condition that end an alarm. They double each time, so that what comes and goes is told rarely."""
DEAD_STEPS, DEAD_GROUPS = 3, 24
"""Steps and groups in a row without a signal. If one group in eight has one, 24 without are 4 % likely."""
LEARNED_STEPS = 6
"""The same of a run that has learned and is as good as ever: what is left to learn is rare then."""
COLLAPSED = 0.1
"""Share of the first step's entropy below which a policy hardly tries anything else any more."""
SAME_REPLIES = 0.6
"""Share of groups of equal reward above which little is left to learn from."""
UNSOLVED = 0.75
"""The rewards' spread, as a share of its widest, above which tasks still fail: being sure because of being right is no
alarm."""
CUT, ALL_CUT, CUT_MORE = 0.5, 0.9, 0.3
"""Share of cut replies that must have fallen after BACK steps; that is never right; that is too much of a rise."""
LONGER, LONGER_TOKENS = 2.0, 16
"""Growth of the replies within BACK steps; short ones double by chance, which the tokens leave out."""
KL_HIGH = 0.5
"""Nats a token: the policy gives its own tokens 1.6 times the probability that the reference gives them."""
FAILING = 0.25
"""Share of episodes without a verdict above which the failures choose what is trained on."""
SURE = 3.5
"""Standard errors. Each step asks again, so that 2 would be reached by chance."""
DROP = 0.4
"""Share of what the reward had gained that is lost again."""
CLIPPED = 0.3
"""Share of clipped tokens; PPO's usual is below 0.2."""
DRIFT = 0.1
"""What each version between sampling and training may add to it, because updates change the policy on purpose."""

Record = Mapping[str, Any]
"""A line of metrics.jsonl or evaluations.jsonl."""
Finding = tuple[int, int, str]
"""Level (1 or 2), how many of the newest steps show it, figures."""


class Seen:
    """The newest records, and what the earlier ones leave behind."""

    def __init__(self, *, within_groups: bool, mismatch: float) -> None:
        self._within_groups, self.mismatch = within_groups, mismatch
        self.records: deque[Record] = deque(maxlen=KEPT)
        self.first: Record = {}
        self.has_signal = False
        self.first_reward = self.best_reward = self.widest_std = 0.0
        """Means over RECENT steps: the first, the highest, the widest."""
        self.best_step = 0
        self.evaluations: deque[Record] = deque(maxlen=2)
        self.best_evaluation: Record = {}
        self.reward_then = 0.0
        """Training's at the time of the best evaluation."""

    def add(self, record: Record) -> None:
        self.first = self.first or record
        self.records.append(record)
        self.has_signal |= not self._is_dead(record)
        if (reward := self.mean("reward")) is not None:
            if not self.best_step:
                self.first_reward = reward
            if not self.best_step or reward > self.best_reward:
                self.best_reward, self.best_step = reward, record["step"]
            self.widest_std = max(self.widest_std, self.mean("reward_std") or 0.0)

    def evaluated(self, record: Record) -> None:
        self.evaluations.append(record)
        if not self.best_evaluation or record["eval/reward"] > self.best_evaluation["eval/reward"]:
            self.best_evaluation, self.reward_then = record, self.mean("reward") or 0.0

    def _is_dead(self, record: Record) -> bool:
        """Whether no episode of a step was better than one that it is compared with, and no teacher looked at them."""
        if _has_teacher(record):
            return False
        if (record.get("frac_reward_zero_std") or 0.0) < 1.0:
            return False
        return self._within_groups or not record.get("reward_std") or record.get("grad_norm") == 0

    def dead(self) -> list[Record]:
        """The newest steps without a signal; none unless there are enough of them."""
        alive = (age for age, record in enumerate(reversed(self.records)) if not self._is_dead(record))
        steps = next(alive, len(self.records))
        found = list(self.records)[-steps:] if steps else []
        reward = fmean(record.get("reward") or 0.0 for record in found) if found else 0.0
        has_learned = self.has_signal and reward >= self.best_reward - self.reward_error()
        is_enough = steps >= (LEARNED_STEPS if has_learned else DEAD_STEPS)
        return found if is_enough and steps * self.groups_per_step >= DEAD_GROUPS else []

    @property
    def groups_per_step(self) -> float:
        newest = self.records[-1]
        return (newest.get("groups/trained") or newest["step"]) / max(newest["step"], 1)

    def values(self, name: str) -> list[float]:
        """All that are known, oldest first."""
        found = (record.get(name) for record in self.records)
        return [value for value in found if value is not None and math.isfinite(value)]

    def mean(self, name: str) -> float | None:
        """Over the newest RECENT steps; None when fewer are known."""
        values = self.values(name)[-RECENT:]
        return fmean(values) if len(values) == RECENT else None

    def reward_error(self) -> float:
        """The standard error of a difference of two `mean("reward")`; what varies is which tasks a step has."""
        return self.widest_std * math.sqrt(2 / (RECENT * self.groups_per_step))


def change(values: Sequence[float], back: int = BACK) -> tuple[float, float, int] | None:
    """(mean then, mean now, steps between) `back` steps apart, or as many as there are; None for under 2 * RECENT."""
    back = min(back, len(values) - RECENT)
    if back < RECENT:
        return None
    return fmean(values[-RECENT - back : len(values) - back]), fmean(values[-RECENT:]), back


def no_signal(seen: Seen) -> Finding | None:
    if not (dead := seen.dead()) or not any(record.get("reward_std") for record in dead):
        return None
    return (
        _level_of(dead),
        len(dead),
        f"no episode of the last {len(dead)} steps was better than its group{_cut_of(dead)}",
    )


def constant_reward(seen: Seen) -> Finding | None:
    if not (dead := seen.dead()) or any(record.get("reward_std") for record in dead):
        return None
    reward = dead[-1].get("reward") or 0.0
    if seen.has_signal and reward >= seen.best_reward:
        return None  # solved
    what = f"every episode of the last {len(dead)} steps got the same reward, {reward:.3g}{_cut_of(dead)}"
    return _level_of(dead), len(dead), what


def _has_teacher(record: Record) -> bool:
    return record.get("distil/kl") is not None


def _level_of(dead: Sequence[Record]) -> int:
    return 2 if len(dead) >= 4 * DEAD_STEPS else 1


def _cut_of(records: Sequence[Record]) -> str:
    return f"; {fmean(_cut(record) for record in records):.0%} of the replies were cut off"


def _cut(record: Record) -> float:
    """Share of the trained episodes that a limit of tokens ended; a limit of turns may belong to the task."""
    by_tokens, by_turns = (_ended(record, end) for end in (EpisodeEnd.TRUNCATED_LENGTH, EpisodeEnd.MAX_TURNS))
    share = record.get("completions/clipped_ratio") or 0.0
    return share * by_tokens / (by_tokens + by_turns) if by_turns else share


def _ended(record: Record, end: EpisodeEnd) -> int:
    return record.get(f"episodes/{end.value}") or 0


def failed_episodes(seen: Seen) -> Finding | None:
    newest = list(seen.records)[-RECENT:]
    played = [end for end in EpisodeEnd if end is not EpisodeEnd.CANCELLED]
    ends = Counter({end: sum(_ended(record, end) for record in newest) for end in played})
    failed = Counter({end: count for end, count in ends.items() if end.is_error and count})
    if len(newest) < DEAD_STEPS or (share := failed.total() / max(ends.total(), 1)) < FAILING:
        return None
    shown = ", ".join(f"{end.value} {count}" for end, count in failed.most_common())
    return 2 if share >= 3 * FAILING else 1, len(newest), f"{share:.0%} of the episodes have no verdict ({shown})"


def truncation(seen: Seen) -> Finding | None:
    shares = [_cut(record) for record in seen.records]
    if len(shares) < RECENT:
        return None
    now = fmean(shares[-RECENT:])
    if now >= ALL_CUT:
        return 2, RECENT, f"{now:.0%} of the replies are cut off"
    then, _, back = change(shares) or (now, now, 0)
    stays = back == BACK and now >= max(CUT, 0.75 * then)
    what = f"{now:.0%} of the replies are cut off; {back} steps before it was {then:.0%}"
    return (1, RECENT, what) if stays or now >= then + CUT_MORE else None


def entropy_collapse(seen: Seen) -> Finding | None:
    first, now = seen.first.get("entropy"), seen.mean("entropy")
    same, spread = seen.mean("frac_reward_zero_std"), seen.mean("reward_std")
    if not first or now is None or now >= COLLAPSED * first or same is None or spread is None:
        return None
    if _has_teacher(seen.records[-1]):
        return None  # the teacher's is where it goes
    if same < SAME_REPLIES or spread < UNSOLVED * seen.widest_std or _gets_better(seen):
        return None
    what = (
        f"entropy fell from {first:.2g} to {now:.2g} and {same:.0%} of the groups carry no signal, but tasks still fail"
    )
    return 2 if now < COLLAPSED**2 * first else 1, RECENT, what


def _gets_better(seen: Seen) -> bool:
    """Whether training's reward rises, or the held-out one did at the newest evaluation; also while nobody can tell."""
    rewards = change(seen.values("reward"), back=2 * RECENT)
    if rewards is None or rewards[1] > rewards[0] + seen.reward_error():
        return True
    held_out = [each["eval/reward"] for each in seen.evaluations if seen.records[-1]["step"] - each["step"] < 2 * BACK]
    return len(held_out) == 2 and held_out[1] > held_out[0]


def learning_rate(seen: Seen) -> Finding | None:
    signs: list[str] = []
    if seen.records[-1].get("update_skipped"):
        signs.append("the gradient was not finite; the update was skipped")
    first, entropies, reward = seen.first.get("entropy"), seen.values("entropy")[-DEAD_STEPS:], seen.mean("reward")
    if first is not None and len(entropies) == DEAD_STEPS and min(entropies) > max(2 * first, first + 1):
        signs.append(f"entropy rose from {first:.2g} to {entropies[-1]:.2g}")
    dead = seen.dead()
    if first and entropies and dead and not any(record.get("reward_std") for record in dead):
        got, start = dead[-1].get("reward") or 0.0, dead[0]["step"]
        was_better = any(record["step"] < start and (record.get("reward") or 0.0) > got for record in seen.records)
        if was_better and not first / 2 < entropies[-1] < 2 * first:
            signs.append(
                f"since step {start} every reply gets {got:.3g}, and entropy is {entropies[-1]:.2g}, not {first:.2g}"
            )
    lost = 0.0 if reward is None else seen.best_reward - reward
    if lost > max(DROP * (seen.best_reward - seen.first_reward), SURE * seen.reward_error()):
        signs.append(f"the reward fell from {seen.best_reward:.3g} at step {seen.best_step} to {reward:.3g}")
    norms = seen.values("grad_norm")
    if len(norms) >= 2 * RECENT and median(norms[-RECENT:]) > 10 * (usual := median(norms[:-RECENT])) > 0:
        signs.append(f"the gradient's norm rose from {usual:.2g} to {median(norms[-RECENT:]):.2g}")
    if (clipped := seen.mean("clip_fraction") or 0.0) > CLIPPED:
        signs.append(f"{clipped:.0%} of the tokens are clipped")
    return (min(len(signs), 2), 1, "; ".join(signs)) if signs else None


def kl(seen: Seen) -> Finding | None:
    now = seen.mean("kl") or 0.0
    what = f"the policy is {now:.2g} nats a token away from the reference"
    return (2 if now >= 4 * KL_HIGH else 1, RECENT, what) if now >= KL_HIGH else None


def longer_replies(seen: Seen) -> Finding | None:
    lengths, rewards = change(seen.values("completions/mean_length")), change(seen.values("reward"))
    if lengths is None or rewards is None or rewards[1] > rewards[0] + seen.reward_error():
        return None
    then, now, back = lengths
    what = (
        f"replies grew from {then:.0f} to {now:.0f} tokens in {back} steps; reward {rewards[0]:.3g} -> {rewards[1]:.3g}"
    )
    is_longer = now >= max(LONGER * then, then + LONGER_TOKENS)
    return (2 if now >= LONGER**2 * then else 1, back, what) if is_longer else None


def one_component(seen: Seen) -> Finding | None:
    """The reward rises, and with it only one of its parts, while another falls or stays at 0."""
    parts = {
        name: seen.values(name) for name in seen.records[-1] if name.startswith("rewards/") and name.endswith("/mean")
    }
    rising = [name for name, values in parts.items() if _direction(values) > 0]
    lagging = [name for name, values in parts.items() if _direction(values) < 0 or not any(values)]
    if _direction(seen.values("reward")) <= 0 or len(rising) != 1 or not lagging:
        return None
    shown = (f"{name} {fmean(parts[name][:10]):.3g} -> {fmean(parts[name][-10:]):.3g}" for name in rising + lagging)
    return 1, len(parts[rising[0]]), f"the reward rises on one part only: {', '.join(shown)}"


def _direction(values: Sequence[float]) -> int:
    """1 or -1 if the newest ten are above or below the oldest ten by more than noise; 0 also for fewer than 20."""
    if len(values) < 20:
        return 0
    old, new = values[:10], values[-10:]
    difference = fmean(new) - fmean(old)
    noise = max(SURE * math.sqrt((stdev(old) ** 2 + stdev(new) ** 2) / 10), 0.1 * abs(fmean(old)))
    return 0 if abs(difference) <= noise else 1 if difference > 0 else -1


def held_out_falls(seen: Seen) -> Finding | None:
    reward, best = seen.mean("reward"), seen.best_evaluation
    if len(seen.evaluations) < 2 or reward is None or reward < seen.reward_then:
        return None
    for record in seen.evaluations:
        noise = SURE * seen.widest_std * math.sqrt(2 / (record.get("eval/episodes") or 1))
        if record["eval/reward"] > best["eval/reward"] - noise:
            return None
    what = (
        f"held-out reward fell from {best['eval/reward']:.3g} at step {best['step']} to "
        f"{seen.evaluations[-1]['eval/reward']:.3g}, while training's went from {seen.reward_then:.3g} to {reward:.3g}"
    )
    return 1, seen.records[-1]["step"] - best["step"], what


def mismatch(seen: Seen) -> Finding | None:
    record, limit, where = seen.records[-1], seen.mismatch, "at the same version"
    difference = record.get("sampling/current_logp_difference_mean")
    if difference is None:
        difference, age = record.get("sampling/logp_difference_mean"), record.get("staleness/max") or 0
        if age:
            limit, where = limit + DRIFT * age, f"over {age:.0f} versions"
    if difference is None or difference <= limit:
        return None
    what = f"engine and trainer disagree {where}: mean |log-probability difference| {difference:.2g}"
    return 2 if difference > 10 * limit else 1, 1, f"{what}, expected below {limit:g}"


CONDITIONS: tuple[Callable[[Seen], Finding | None], ...] = (
    no_signal,
    constant_reward,
    failed_episodes,
    truncation,
    entropy_collapse,
    learning_rate,
    kl,
    longer_replies,
    one_component,
    held_out_falls,
    mismatch,
)
"""An alarm goes by the name of its function."""
