"""What a repair is worth."""

from __future__ import annotations

TURN_COST = 0.1
MAX_TURNS = 10


def worth(share: float, turn: int) -> float:
    """The worth of a program that passes `share` of its tests, in reply number `turn` (1 is the first).

    Example: worth(1.0, 1) == 1.0; worth(1.0, 2) == 0.9; worth(0.5, 3) == 0.4
    """
    return share * (1.0 - TURN_COST * (turn - 1))
