"""The routes of tokens through a mixture of experts, as arrays."""

import numpy as np

from rlflow.types import ExpertArray


def no_route(experts: ExpertArray) -> int:
    """What stands for every expert of a token whose route is not known. Example: 255 for uint8."""
    return int(np.iinfo(experts.dtype).max)
