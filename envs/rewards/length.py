"""Are the replies as long as they should be?"""

from rlflow.errors import ConfigError


def length(num_sampled: int, *, target: int | None = None, limit: int | None = None) -> float:
    """From 0 down to -1, linearly: how far the tokens of all replies are from a target, or beyond a limit.

    target: -min(|tokens - target| / target, 1), after LCPO (arXiv:2503.04697).
    limit: 0 up to it, -1 from twice as many on.
    """
    goal = limit if target is None else target
    if goal is None or (target is not None and limit is not None) or goal < 1:
        raise ConfigError(
            "reward.args.length needs either target or limit, a positive number of tokens; got "
            f"target={target} and limit={limit}"
        )
    away = num_sampled - goal
    return -min((max(away, 0) if target is None else abs(away)) / goal, 1.0)
