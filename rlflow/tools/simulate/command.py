"""The verb `simulate`: its options, and what it prints."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from enum import EnumType
from typing import TYPE_CHECKING

from rlflow.config import Late, Order, Update
from rlflow.errors import ConfigError
from rlflow.tools.simulate.plan import Plan, check

if TYPE_CHECKING:
    from rlflow.tools.simulate.simulate import Figures

_OPTIONS: dict[str, tuple[Callable[[str], object], str]] = {
    "engines": (int, "rollout engines"),
    "in_flight": (int, "groups that one engine plays at the same time"),
    "group_size": (int, "episodes of a group"),
    "groups_per_step": (int, "groups of an optimiser step; by default, as many as the fleet plays at the same time"),
    "order": (Order, "which ready group is trained first"),
    "late": (Late, "what becomes of a group that is too old"),
    "update": (Update, "how engines take new weights"),
    "steps": (int, "optimiser steps that are measured, after the warm-up"),
    "median_tokens": (float, "median length of an episode, of a log-normal distribution"),
    "sigma": (float, "standard deviation of the logarithm of the length"),
    "max_tokens": (int, "at which an episode is cut"),
    "token_s": (float, "seconds that an engine takes for one more token of each sequence"),
    "weights_s": (float, "seconds that an engine pauses for new weights"),
    "trainer_speed": (float, "tokens a second of the trainer, over those of a fleet that is never idle"),
    "failures": (float, "probability that a group is lost half-way"),
    "seed": (int, "of the lengths, the failures and the order of the tasks"),
}
"""Field of Plan -> how its option is read, and what it is."""


_COLUMNS: list[tuple[str, int, Callable[[Figures], str]]] = [
    ("staleness", 9, lambda figures: str(figures.max_versions)),
    ("groups/s", 9, lambda figures: f"{figures.groups_per_s:.2f}"),
    ("samples/s", 10, lambda figures: f"{figures.samples_per_s:.1f}"),
    ("tokens/s", 11, lambda figures: f"{figures.tokens_per_s:.0f}"),
    ("step s", 8, lambda figures: f"{figures.step_s:.1f}"),
    ("engines", 8, lambda figures: f"{figures.utilisation_engines:.1%}"),
    ("trainer", 8, lambda figures: f"{figures.utilisation_trainer:.1%}"),
    ("dropped", 8, lambda figures: str(sum(figures.dropped.values()))),
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name, (kind, text) in _OPTIONS.items():
        default = getattr(Plan(), name)
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=kind,
            default=default,
            choices=list(kind) if isinstance(kind, EnumType) else None,
            metavar=None if isinstance(kind, EnumType) else "N",
            help=text if default is None else f"{text} (%(default)s)",
        )
    parser.add_argument(
        "--staleness", default="0,4", metavar="N[,N...]", help="bounds in versions, one simulation each (%(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="all figures as one JSON object on the last line")


def run(options: argparse.Namespace) -> None:
    """Simulate and print; ConfigError for a wrong value, RunError when a simulated run stops."""
    from rlflow.tools.simulate.simulate import simulate

    settings = {name: getattr(options, name) for name in _OPTIONS}
    try:
        bounds = [int(word) for word in options.staleness.split(",")]
    except ValueError:
        raise ConfigError(f"--staleness must be whole numbers such as 0,1,4; got {options.staleness}") from None
    plans = [Plan(max_versions=bound, **settings) for bound in bounds]
    for plan in plans:
        check(plan)
    columns = [*((title, width) for title, width, _ in _COLUMNS), ("speed-up", 9), ("driver ms/group", 16)]
    print(" ".join(f"{title:>{width}}" for title, width in columns), flush=True)
    found: list[Figures] = []
    for plan in plans:
        figures = simulate(plan)
        found.append(figures)
        faster = speed_up(figures, found)
        cells = [show(figures) for _, _, show in _COLUMNS]
        cells += ["-" if faster is None else f"{faster:.2f}", f"{figures.driver_ms_per_group:.3f}"]
        print(" ".join(f"{cell:>{width}}" for cell, (_, width) in zip(cells, columns, strict=True)), flush=True)
    for each in found:
        groups = sum(each.staleness.values())
        ages = ", ".join(f"{versions}: {count / groups:.1%}" for versions, count in each.staleness.items())
        drops = ", ".join(f"{reason} {count}" for reason, count in each.dropped.items()) or "none"
        print(
            f"staleness {each.max_versions}: groups by age {{{ages}}}; dropped: {drops}; "
            f"{each.wall_s:.1f} s on this machine, memory {each.rss_first_mb:.1f} -> {each.rss_last_mb:.1f} MB"
        )
    if options.json:
        runs = [{**each.as_json(), "speed_up": speed_up(each, found)} for each in found]
        print(json.dumps({"runs": runs}))


def speed_up(figures: Figures, found: Sequence[Figures]) -> float | None:
    """Groups a second over those of the synchronous run; None when none was simulated."""
    synchronous = [each.groups_per_s for each in found if each.max_versions == 0]
    return figures.groups_per_s / synchronous[0] if synchronous else None
