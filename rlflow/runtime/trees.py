"""Removing a folder, whatever is in it."""

import contextlib
import shutil
import subprocess
from pathlib import Path

REMOVE_S = 60.0


def remove_tree(path: Path | str) -> None:
    """Remove a folder and follow no link in it, also if it is deeper than a path may be long or lacks permissions."""
    for words in (["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run([*words, "--", path], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=REMOVE_S)
    shutil.rmtree(path, ignore_errors=True)
