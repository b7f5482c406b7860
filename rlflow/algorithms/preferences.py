"""Learning from pairs: of a group, its best episode against its worst.

rewards, log-ratios of a group -> pair, margin -> slope of a loss of the margin -> advantages

The loss of a pair falls with the margin between its log-ratios, log(policy / reference). Its gradient is that of the
log-likelihoods, weighed by the slope. The slope is computed once, before the update, so how episodes are cut into rows
does not matter; divided by the number of groups, a sum over tokens is a mean over pairs.
"""

from collections.abc import Callable, Sequence

from rlflow.algorithms.advantage.base import Advantages, Group, all_equal, rewards_of, whole_episodes
from rlflow.roles import Mean


def pair_of(group: Group) -> tuple[int, int] | None:
    """The places of the best and the worst episode, the first of equals; None if all rewards are equal."""
    rewards = rewards_of(group)
    if all_equal(rewards):
        return None
    return rewards.index(max(rewards)), rewards.index(min(rewards))


def log_ratio(group: Group, place: int) -> float:
    found = group[place].log_ratio
    assert found is not None, "log-ratios are computed before advantages that need them"
    return found


def pairwise(groups: Sequence[Group], slope: Callable[[float], float]) -> Advantages:
    """Advantages whose policy gradient is that of the mean over groups of a loss of each pair's margin, in nats.

    `slope` is the derivative of the loss. A group of equal rewards counts, and has no gradient.
    """
    advantages: Advantages = []
    for group in groups:
        values = [0.0] * len(group)
        if (pair := pair_of(group)) is not None:
            better, worse = pair
            values[better] = -slope(log_ratio(group, better) - log_ratio(group, worse)) / len(groups)
            values[worse] = -values[better]
        advantages.append(whole_episodes(values))
    return advantages


def preference_metrics(groups: Sequence[Group]) -> dict[str, Mean]:
    """Over the pairs: the share in which the better one's log-ratio is larger, and the mean log-ratios of both, in
    nats."""
    pairs = [(group, pair) for group in groups if (pair := pair_of(group)) is not None]
    better = [log_ratio(group, place) for group, (place, _) in pairs]
    worse = [log_ratio(group, place) for group, (_, place) in pairs]
    is_right = [float(high > low) for high, low in zip(better, worse, strict=True)]
    named = {"accuracy": is_right, "better_log_ratio": better, "worse_log_ratio": worse}
    return {f"preference/{name}": Mean(total=sum(values), count=len(values)) for name, values in named.items()}
