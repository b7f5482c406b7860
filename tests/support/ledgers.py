"""What a run's ledger says."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from rlflow.groups.ledger import Ledger


def trained_tasks(run: Path) -> list[str]:
    """One for each group that was trained."""
    database = sqlite3.connect(run / "ledger.db")
    rows = database.execute("SELECT task FROM groups WHERE state = 'trained'").fetchall()
    database.close()
    return [task for (task,) in rows]


async def copied(ledger: Ledger) -> bytes:
    """What a checkpoint keeps of it."""
    return await ledger.copy()
