"""On-policy distillation: what a teacher thinks of each token that the policy sampled, as an advantage. NumPy.

    log pi_T - log mu of each token -> clamped -> times weight -> plus reward_weight times the advantage from rewards

mu is the policy that sampled, pi_T the teacher. Each token is its own reward and later ones do not count for it, so the
gradient is that of KL(pi || pi_T) at each place, with the places that are reached taken as they are (Agarwal et al.,
arXiv:2306.13649, with reverse KL on the student's own samples). As an advantage it goes through every loss and
correction.

Example: log pi_T = -2.0 and log mu = -0.5 -> -1.5: the policy was too sure of this token.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlflow.algorithms.base import require_positive
from rlflow.config import TeacherConfig
from rlflow.plugins.options import bind
from rlflow.types import BoolArray, FloatArray


class Distilled(NamedTuple):
    advantages: FloatArray
    """[N]"""
    is_clamped: BoolArray
    """[N]"""


Distillation: TypeAlias = Callable[[FloatArray, FloatArray, FloatArray], Distilled]
"""`distilled` with its options bound: advantages, log mu and log pi_T, all [N] -> the advantages to train with."""


def distilled(
    advantages: NDArray[np.floating],
    behaviour_logprobs: NDArray[np.floating],
    teacher_logprobs: NDArray[np.floating],
    weight: float,
    reward_weight: float,
    *,
    clamp: float = 10.0,
) -> Distilled:
    """weight * clamp(log pi_T - log mu, -clamp, clamp) + reward_weight * advantage, for each token; all arrays are [N].

    Raises ConfigError for a clamp that is not positive.
    """
    require_positive("clamp", clamp)
    difference = np.asarray(teacher_logprobs, np.float64) - np.asarray(behaviour_logprobs, np.float64)
    mixed = weight * difference.clip(-clamp, clamp) + reward_weight * np.asarray(advantages, np.float64)
    return Distilled(advantages=mixed.astype(np.float32), is_clamped=np.abs(difference) > clamp)


def distillation_of(teacher: TeacherConfig) -> Distillation:
    """As the settings have it. Raises ConfigError for options in `teacher.args` that are unknown or out of range."""
    function, nothing = bind(distilled, teacher.args, "teacher.args", "a teacher"), np.zeros(0, np.float32)

    def chosen(advantages: FloatArray, behaviour_logprobs: FloatArray, teacher_logprobs: FloatArray) -> Distilled:
        return function(advantages, behaviour_logprobs, teacher_logprobs, teacher.weight, teacher.reward_weight)

    chosen(nothing, nothing, nothing)  # so that an option out of range is found at start
    return chosen
