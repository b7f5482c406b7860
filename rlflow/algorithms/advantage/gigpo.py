"""Group-in-group advantage for agents (GiGPO, arXiv:2505.10978): episodes compared, and turns from the same state."""

from collections import defaultdict
from collections.abc import Sequence

from rlflow.algorithms.advantage.base import Advantages, Group, centre, require_turns, rewards_of, standardise
from rlflow.algorithms.base import Traits, require


@Traits(is_per_turn=True)
def gigpo(
    groups: Sequence[Group], *, step_weight: float = 1.0, discount: float = 0.95, normalise: bool = True
) -> Advantages:
    """Advantage of the episode + step_weight * advantage of the turn; one value a turn.

    The episode's compares the rewards of the group, the turn's the discounted returns of all turns of the group that
    start from the same state (`anchor`); a state met once gives 0. `normalise` divides both by their deviation + 1e-6.

    Raises ConfigError for an episode without turns.
    """
    require(step_weight >= 0, "step_weight", "at least 0", step_weight)
    require(0 <= discount <= 1, "discount", "from 0 to 1", discount)
    require_turns("gigpo", groups)
    return [_two_levels(group, step_weight, discount, normalise) for group in groups]


def _two_levels(group: Group, step_weight: float, discount: float, normalise: bool) -> list[list[float]]:
    compare = standardise if normalise else centre
    advantages = [
        [value] * len(episode.turns) for episode, value in zip(group, compare(rewards_of(group)), strict=True)
    ]
    returns: dict[str, list[tuple[int, int, float]]] = defaultdict(list)
    """Anchor -> episode, turn t, sum over k of discount^k * reward of turn t + k."""
    for index, episode in enumerate(group):
        following = 0.0
        for turn, scored in reversed(list(enumerate(episode.turns))):
            following = scored.reward + discount * following
            returns[scored.anchor].append((index, turn, following))
    for found in returns.values():
        values = compare([following for _, _, following in found])
        for (index, turn, _), value in zip(found, values, strict=True):
            advantages[index][turn] += step_weight * value
    return advantages
