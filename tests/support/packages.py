"""Packages as an installer leaves them behind: a module, and metadata with entry points."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def install(folder: Path, package: str, source: str, groups: Mapping[str, Mapping[str, str]]) -> None:
    """Write a package of one module into a folder of sys.path.

    `groups`: group of entry points -> name -> `module:Name`, or `Name` alone for what the package defines.
    """
    (folder / f"{package}.py").write_text(source)
    metadata = folder / f"{package}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = []
    for group, points in groups.items():
        lines.append(f"[{group}]")
        lines += [f"{name} = {path if ':' in path else f'{package}:{path}'}" for name, path in points.items()]
    (metadata / "entry_points.txt").write_text("\n".join(lines))
