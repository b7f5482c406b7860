"""Writes docs/settings.md and docs/metrics.md from the code: python scripts/reference.py"""

from pathlib import Path

from rlflow.settings.describe import sections, settings
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


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    (DOCS / "settings.md").write_text(settings_page(), encoding="utf-8")
    (DOCS / "metrics.md").write_text(metrics_page(), encoding="utf-8")
