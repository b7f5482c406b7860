"""How far two computations of the same sums may lie apart: measured beside them, not chosen.

Float32 sums depend on the order of their terms, which the kernels choose by CPU and number of threads, and an optimiser
amplifies the difference. So a test computes the expected values once more with the same terms in other orders, or in
float64; what that costs is what rounding costs on this machine.

    allowed = allowed_difference(largest_relative_difference(other, expected) for other in other_orders)
    assert largest_relative_difference(found, expected) <= allowed
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

MARGIN = 8
"""Another kernel may be this much less lucky than the worst of the orders that were measured."""
FLOOR = 8 * float(np.finfo(np.float32).eps)
"""A few units in the last place, because the orders that were measured may agree to the bit."""
CEILING = 1e-3
"""A test that had to allow more would not see the faults that it is there for."""


def allowed_difference(costs: Iterable[float]) -> float:
    """The largest relative difference to accept, from those that other orders of the same sums have made."""
    worst = max(costs)
    assert worst * MARGIN <= CEILING, f"rounding alone costs {worst:.1e} here, so that this comparison says nothing"
    return max(worst * MARGIN, FLOOR)
