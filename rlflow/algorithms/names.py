"""Algorithms by name: what `algorithm.loss: gspo` with `algorithm.loss_args: {clip_low: 3e-4}` means.

name, or a user's import path -> resolve -> function -> bind -> function with its options -> try_options -> checked

Nothing is imported before it is asked for: advantages need no torch, and importing it takes seconds.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np

from rlflow.algorithms.advantage.base import Scope
from rlflow.errors import ConfigError
from rlflow.plugins.loading import load_object
from rlflow.plugins.names import fits, hints_of, nearest, shown

Result = TypeVar("Result")


class Kind(StrEnum):
    advantage = "advantage"
    token_advantage = "token_advantage"
    """Of single tokens, from the values of a critic; named by the same setting as `advantage`."""
    loss = "loss"
    correction = "correction"
    kl = "kl"


NAMES: dict[Kind, tuple[str, ...]] = {
    Kind.advantage: (
        "grpo",
        "dr_grpo",
        "rloo",
        "opo",
        "passk",
        "maxrl",
        "remax",
        "gdpo",
        "reinforce_pp",
        "reinforce_pp_baseline",
        "grpo_batch_std",
        "grpo_task_std",
        "gigpo",
        "eapo",
    ),
    Kind.token_advantage: ("gae",),
    Kind.loss: ("reinforce", "ppo_clip", "gspo", "gmpo", "cispo", "aipo", "sapo", "dppo_tv", "dppo_kl"),
    Kind.correction: (
        "tis",
        "tis_sequence",
        "tis_geometric",
        "mis",
        "mis_sequence",
        "icepop",
        "geometric",
        "veto",
        "opsm",
        "uncertain_negatives",
    ),
    Kind.kl: ("k1", "k2", "k3", "k3_straight_through"),
}
_BATCH_SCOPE = ("gdpo", "reinforce_pp", "reinforce_pp_baseline", "grpo_batch_std", "grpo_task_std")
_PER_TURN = ("gigpo", "eapo")
_WITH_GREEDY = ("remax",)
_MASKS = ("geometric", "veto", "opsm", "uncertain_negatives")
_CORRECTED = ("aipo", "dppo_tv", "dppo_kl")


class Algorithm(NamedTuple):
    """A function, and what its caller has to know about it.

    A user's own function says so through attributes of the same names; without them it has the defaults.
    """

    function: Callable[..., Any]
    scope: Scope = Scope.group
    """Of an advantage: whether it must see every group of the step."""
    is_per_turn: bool = False
    """Of an advantage: whether each turn of an episode has its own, so that the episodes must carry their turns."""
    needs_greedy: bool = False
    """Of an advantage: whether each group plays one more episode, greedily, as its baseline."""
    is_mask: bool = False
    """Of a correction: whether its weights are 0 and 1 only, so that it may be combined with others."""
    is_corrected: bool = False
    """Of a loss: whether it weighs by policy / behaviour itself; a correction that is no mask would do so twice."""


def resolve(kind: Kind, name: str) -> Algorithm:
    """The algorithm with this name, or the user's function at `package.module:name` or `file.py:name`.

    Raises:
        ConfigError: there is no such algorithm, or what the path leads to cannot be called.
    """
    if ":" in name:
        return _of_user(kind, name)
    if name not in NAMES[kind]:
        raise ConfigError(
            f"there is no {kind} {name!r}; {nearest(name, NAMES[kind])}; known are {', '.join(NAMES[kind])}, and your "
            "own function as package.module:name"
        )
    module = {
        Kind.kl: "rlflow.algorithms.kl",
        Kind.token_advantage: f"rlflow.algorithms.advantage.{name}",
    }.get(kind, f"rlflow.algorithms.{kind}.{name}")
    function = load_object(f"{module}:{name}")
    assert callable(function), f"{module}:{name} is not a function"
    return Algorithm(
        function=function,
        scope=Scope.batch if name in _BATCH_SCOPE else Scope.group,
        is_per_turn=name in _PER_TURN,
        needs_greedy=name in _WITH_GREEDY,
        is_mask=name in _MASKS,
        is_corrected=name in _CORRECTED,
    )


def bind(function: Callable[..., Result], args: Mapping[str, object], where: str) -> Callable[..., Result]:
    """The function with its options set. Options are its keyword-only parameters; `where` is the setting's name.

    Raises:
        ConfigError: an option is unknown, of the wrong type, or missing.
    """
    options = {
        name: parameter
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    hints = hints_of(function)
    for name, value in args.items():
        if name not in options:
            listed = f"its options are {', '.join(options)}" if options else "it has no options"
            raise ConfigError(f"{where} has no option {name!r}; {nearest(name, tuple(options))}; {listed}")
        if name in hints and not fits(value, hints[name]):
            raise ConfigError(f"{where}.{name} must be {shown(hints[name])}; got {value!r}")
    for name, parameter in options.items():
        if parameter.default is inspect.Parameter.empty and name not in args:
            raise ConfigError(f"{where} needs a value for {name!r}; it has no default")
    return partial(function, **args)


def try_options(kind: Kind, function: Callable[..., Any]) -> None:
    """Call a bound function on nothing, so that an option out of range is found at start, not in the first step."""
    if kind is Kind.advantage:
        function([])
        return
    if kind is Kind.token_advantage:
        function(np.zeros(0), np.zeros(0), np.zeros(0, np.bool_))
        return
    # Not at the top: advantages are resolved without torch.
    from rlflow.algorithms.tokens import no_tokens

    tokens = no_tokens()
    if kind is Kind.loss:
        function(tokens)
    elif kind is Kind.correction:
        function(tokens, tokens.logprobs)
    else:
        function(tokens.logprobs, tokens.logprobs)


def _of_user(kind: Kind, path: str) -> Algorithm:
    function = load_object(path)
    if not callable(function):
        raise ConfigError(f"the {kind} {path!r} must be a function; got {type(function).__name__}")
    try:
        scope = Scope(getattr(function, "scope", Scope.group))
    except ValueError as error:
        raise ConfigError(f"the scope of {path!r} must be one of {', '.join(Scope)}; {error}") from error
    return Algorithm(
        function=function,
        scope=scope,
        is_per_turn=bool(getattr(function, "is_per_turn", False)),
        needs_greedy=bool(getattr(function, "needs_greedy", False)),
        is_mask=bool(getattr(function, "is_mask", False)),
        is_corrected=bool(getattr(function, "is_corrected", False)),
    )
