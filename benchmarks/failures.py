"""What environments can do wrong, what becomes of the episode and its group, and how soon the next one plays: a table.

    .venv/bin/python benchmarks/failures.py

Every attack is on one episode of a group of four, in two environment processes. Seconds to recover: from the end of the
attacked group until another one has been played well in both processes.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

from attacks import ATTACKS, Aftermath, play_all  # pyright: ignore[reportMissingImports]  of the tests


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="rlflow-failures-") as folder:
        aftermaths = asyncio.run(play_all(ATTACKS, Path(folder)))
    print("| attack | outcome of the episode | seconds to recover | rest of the group |")
    print("|---|---|---|---|")
    for aftermath in aftermaths:
        print(row(aftermath))


def row(aftermath: Aftermath) -> str:
    attacked, *others = aftermath.episodes
    well = sum(episode.is_trainable for episode in others)
    ends = sorted({episode.end.value for episode in others if not episode.is_trainable})
    rest = f"{well} of {len(others)} trained" + (f", {len(others) - well} {', '.join(ends)}" if ends else "")
    detail = f": {attacked.detail[:90]}" if attacked.detail else f", reward {attacked.reward}"
    return f"| {aftermath.attack.name} | `{attacked.end.value}`{detail} | {aftermath.recovery_s:.1f} | {rest} |"


if __name__ == "__main__":
    main()
