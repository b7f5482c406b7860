"""On-policy distillation: what a teacher thinks of each token that the policy sampled, as an advantage. NumPy.

    log pi_T - log mu of each token -> clamped -> times weight -> plus reward_weight times the advantage from rewards

mu is the policy that sampled, pi_T the teacher. Each token is its own reward and later ones do not count for it, so the
gradient is that of KL(pi || pi_T) at each place, with the places that are reached taken as they are (Agarwal et al.,
arXiv:2306.13649, with reverse KL on the student's own samples). As an advantage it goes through every loss and
correction.

Example: log pi_T = -2.0 and log mu = -0.5 -> -1.5: the policy was too sure of this token.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlflow.algorithms.base import require, require_positive
from rlflow.config import TeacherConfig
from rlflow.errors import ConfigError
from rlflow.plugins.options import bind
from rlflow.types import BoolArray, FloatArray

SAMPLED, REVERSE, FORWARD = _KINDS = ("sampled", "reverse", "forward")
MAX_TOP_K = 1024
"""Each takes eight bytes for each token that a group learns from."""


@dataclass(kw_only=True, slots=True, frozen=True)
class TeacherOptions:
    """`teacher.args`."""

    kl: str = "sampled"
    """`sampled`: an advantage, from the token that was sampled. `reverse`, `forward`: a loss, `divergence`."""
    top_k: int = 20
    """Tokens of each place that `divergence` tells apart. vLLM's server gives 20 if nothing else is said."""
    prompt: str | None = None
    """What the teacher is asked instead of the policy; see `rlflow.rollout.hint`."""
    clamp: float = 10.0
    """The most that log(teacher / policy) of a token counts, in nats, up or down."""
    model: str | None = None
    """The name of the teacher at its URL; None if the server has one model."""
    key_variable: str | None = None
    """The environment variable that holds the key for the URL."""
    concurrency: int = 32
    """Requests that the server of a URL has at once."""


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
    """weight * clamp(log pi_T - log mu, -clamp, clamp) + reward_weight * advantage, by token; all are [N]."""
    difference = np.asarray(teacher_logprobs, np.float64) - np.asarray(behaviour_logprobs, np.float64)
    mixed = weight * difference.clip(-clamp, clamp) + reward_weight * np.asarray(advantages, np.float64)
    return Distilled(advantages=mixed.astype(np.float32), is_clamped=np.abs(difference) > clamp)


def teacher_options(teacher: TeacherConfig) -> TeacherOptions:
    """`teacher.args` with its defaults. Raises ConfigError for options that are unknown or out of range."""
    options = bind(TeacherOptions, teacher.args, "teacher.args", "a teacher")()
    require_positive("clamp", options.clamp)
    require_positive("concurrency", options.concurrency)
    require(options.kl in _KINDS, "kl", ", ".join(_KINDS[:-1]) + f" or {_KINDS[-1]}", options.kl)
    require(1 <= options.top_k <= MAX_TOP_K, "top_k", f"from 1 to {MAX_TOP_K}", options.top_k)
    unused = "top_k" if options.kl == SAMPLED else "clamp"
    if unused in teacher.args:
        raise ConfigError(f"teacher.args.{unused} has no effect with teacher.args.kl={options.kl}; leave it out")
    return options


def num_likely(teacher: TeacherConfig) -> int:
    """How many tokens the teacher names in the place of each token; 0 if it only judges the one that was sampled."""
    if not teacher.models:
        return 0
    options = teacher_options(teacher)
    return 0 if options.kl == SAMPLED else options.top_k


def distillation_of(teacher: TeacherConfig) -> Distillation:
    """As the settings have it. Raises ConfigError as `teacher_options`."""
    clamp = teacher_options(teacher).clamp
    return partial(distilled, weight=teacher.weight, reward_weight=teacher.reward_weight, clamp=clamp)
