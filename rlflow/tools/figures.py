"""Named figures on the terminal."""

import json
from collections.abc import Mapping


def print_figures(figures: Mapping[str, float | list[float]], *, as_json: bool) -> None:
    """One line each, or one JSON object."""
    if as_json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        shown = " ".join(f"{each:.3g}" for each in value) if isinstance(value, list) else f"{value:.4g}"
        print(f"{name:24} {shown}")
