"""Build the site of the documents: a virtual environment for mkdocs, links to the Markdown, HTML in build/site/html.

A link that leads nowhere is an error.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "build" / "site"
SHOWN = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "docs", "envs", "k8s", "recipes", "benchmarks")
"""What the pages link to."""
PACKAGE = "mkdocs-material>=9.6,<10"


def link_sources(source: Path) -> None:
    """Lay out the documents as in the repository, so that links between them hold."""
    source.mkdir(parents=True, exist_ok=True)
    for name in SHOWN:
        link = source / name
        link.unlink(missing_ok=True)
        link.symlink_to(ROOT / name)


def main() -> int:
    python = SITE / "venv" / "bin" / "python"
    if not python.exists():
        venv.create(python.parents[1], with_pip=True, symlinks=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", PACKAGE], check=True)
    link_sources(SITE / "source")
    return subprocess.run([python, "-m", "mkdocs", "build", "--strict", "--quiet"], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
