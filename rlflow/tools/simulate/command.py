"""The verb `simulate`: its options, and what it prints."""

import argparse
import json
from collections.abc import Callable, Sequence
from enum import EnumType
from typing import Any, get_args, get_type_hints

from rlflow.errors import ConfigError
from rlflow.tools.simulate.plan import Figures, Plan, check

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


def _hints() -> dict[str, Any]:
    """Field of Plan that is an option of its own -> its type and what it is. `--staleness` takes several bounds."""
    hints = get_type_hints(Plan, include_extras=True)
    del hints["max_versions"]
    return hints


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name, hint in _hints().items():
        default, text = getattr(Plan(), name), hint.__metadata__[0]
        kind = (get_args(hint.__origin__) or [hint.__origin__])[0]  # int of `int | None`
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


def run(options: argparse.Namespace) -> int:
    """Simulate and print. ConfigError for a wrong value, RunError when a simulated run stops."""
    from rlflow.tools.simulate.simulate import simulate

    settings = {name: getattr(options, name) for name in _hints()}
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
    return 0


def speed_up(figures: Figures, found: Sequence[Figures]) -> float | None:
    """Groups a second over those of the synchronous run; None when none was simulated."""
    synchronous = [each.groups_per_s for each in found if each.max_versions == 0]
    return figures.groups_per_s / synchronous[0] if synchronous else None
