"""Build the wheel and the source distribution from a clean copy of this checkout, and say how large they are.

    .venv/bin/python scripts/package.py FOLDER

setuptools leaves its own files beside the source, so it works on the copy. It needs no network.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CLUTTER = (".*", "__pycache__", "*.egg-info")
"""Names that git ignores, and git's own."""
CLUTTER_AT_TOP = ("build", "dist", "runs", "outputs", "multirun")
"""Ignored beside the README; deeper, a folder may have such a name."""


def build(folder: Path) -> None:
    """Put a wheel and a source distribution into `folder`; stop with setuptools' output if it cannot."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / "rlflow"
        shutil.copytree(ROOT, copy, symlinks=True, ignore=_ignored)
        for step in ("build_wheel", "build_sdist"):
            program = f"import sys; from setuptools.build_meta import {step}; {step}(sys.argv[1])"
            command = [sys.executable, "-c", program, str(folder.absolute())]
            done = subprocess.run(command, cwd=copy, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise SystemExit(f"{done.stdout}{done.stderr}package: error: {step} failed; the reason is above")


def _ignored(folder: str, names: list[str]) -> set[str]:
    at_top = CLUTTER_AT_TOP if Path(folder) == ROOT else ()
    return shutil.ignore_patterns(*CLUTTER, *at_top)(folder, names)


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the wheel and the source distribution of this project.")
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    build(folder)
    for path in sorted(folder.iterdir()):
        print(f"package: built {path.name}, {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
