"""rlflow's own requirements, as its metadata or its source tree has them, and what is installed of them."""

from __future__ import annotations

import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

import rlflow
from rlflow.tools.doctor.facts import Package


def probe_packages() -> tuple[Package, ...] | None:
    """One for each requirement of rlflow and of its extras; None where nothing says what these are."""
    wanted = _requirements()
    if wanted is None:
        return None
    return tuple(
        Package(name=each.name, wanted=str(each.specifier), extra=extra, installed=installed(each.name))
        for extra, each in wanted
    )


def installed(name: str) -> str | None:
    """The version of an installed distribution."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _requirements() -> list[tuple[str, Requirement]] | None:
    """Extra ("" for none) and requirement. The source tree comes first: it is what would run."""
    source = Path(rlflow.__file__).parent.parent / "pyproject.toml"
    if source.is_file():
        project = tomllib.loads(source.read_text()).get("project", {})
        if project.get("name") == "rlflow":
            return _of_project(project)
    try:
        found = metadata.metadata("rlflow")
    except metadata.PackageNotFoundError:
        return None
    extras = ["", *(found.get_all("Provides-Extra") or ())]
    requirements = [Requirement(each) for each in found.get_all("Requires-Dist") or ()]
    return [(_extra_of(each, extras), each) for each in requirements]


def _of_project(project: dict[str, object]) -> list[tuple[str, Requirement]]:
    always, optional = project["dependencies"], project["optional-dependencies"]
    assert isinstance(always, list) and isinstance(optional, dict)
    found = [("", Requirement(each)) for each in always]
    return found + [(extra, Requirement(each)) for extra, names in optional.items() for each in names]


def _extra_of(requirement: Requirement, extras: list[str]) -> str:
    """The first one under which its marker holds; that is "" for what is always needed."""
    if requirement.marker is None:
        return ""
    marker = requirement.marker
    return next((extra for extra in extras if marker.evaluate({"extra": extra})), "")
