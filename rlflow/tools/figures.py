"""Figures on the terminal."""

import json
from collections.abc import Iterable, Mapping, Sequence


def print_figures(figures: Mapping[str, float | list[float]], *, as_json: bool) -> None:
    """One line each, or one JSON object."""
    if as_json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        shown = " ".join(f"{each:.3g}" for each in value) if isinstance(value, list) else f"{value:.4g}"
        print(f"{name:24} {shown}")


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns as wide as what is in them, two spaces apart."""
    lines = [titles, *rows]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
