"""Writes docs/settings.md, metrics.md and coming_from.md from the code: python scripts/reference.py"""

from pathlib import Path

from rlflow.settings.describe import sections, settings
from rlflow.settings.explain import other_names
from rlflow.telemetry.metrics import texts

DOCS = Path(__file__).parent.parent / "docs"
_WRITTEN = "<!-- written by scripts/reference.py -->"


def settings_page() -> str:
    parts = [
        "# Settings",
        _WRITTEN,
        "Each is `key=value` on the command line, or a line of a recipe. `rlflow train --help SECTION` shows the same.",
    ]
    for section, about in sections().items():
        rows = [each for each in settings() if each.key.startswith(f"{section}.")]
        table = ["| Setting | Default | Takes | Meaning |", "| --- | --- | --- | --- |"]
        table += [f"| `{each.key}` | `{each.default}` | {_cell(each.takes)} | {_cell(each.meaning)} |" for each in rows]
        parts += [f"## {section}", about, "\n".join(table)]
    return "\n\n".join(parts) + "\n"


def metrics_page() -> str:
    table = ["| Metric | Unit | What it is | What is normal |", "| --- | --- | --- | --- |"]
    table += [f"| `{name}` | " + " | ".join(map(_cell, text)) + " |" for name, text in texts().items()]
    return "\n\n".join(
        [
            "# Metrics",
            _WRITTEN,
            "One JSON object a step in `metrics.jsonl`, and the same names in the report and in trackers. A word in "
            "capitals stands for any name. A share is from 0 to 1.",
            "\n".join(table) + "\n",
        ]
    )


def coming_from_page() -> str:
    parts = [
        "# Coming from TRL, verl or OpenRLHF",
        _WRITTEN,
        "Each name with what it is called here; an unknown key on the command line gets the same answer. Reward "
        "functions written for TRL and verl are recognised ([rewards.md](rewards.md)), and so are TRL's environments, "
        "and data sets in the columns of TRL and verl ([environments.md](environments.md)).",
        "A step here plays `algorithm.groups_per_step` groups of `algorithm.group_size` episodes and makes one update, "
        "or `algorithm.epochs` times `algorithm.minibatches`. How much goes through the model at once "
        "(`trainer.micro_batch_tokens`) changes memory and speed, never the gradient.",
    ]
    for library, names in other_names().items():
        table = [f"| {library} | Here | Note |", "| --- | --- | --- |"]
        for theirs, (here, *note) in names.items():
            table.append(f"| `{theirs}` | {f'`{here}`' if here else 'none'} | {_cell(str((note or [''])[0]))} |")
        parts += [f"## {library}", "\n".join(table)]
    return "\n\n".join(parts) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


PAGES = {"settings": settings_page, "metrics": metrics_page, "coming_from": coming_from_page}


if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / f"{name}.md").write_text(page(), encoding="utf-8")
