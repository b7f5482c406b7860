"""The house: which floor each room is on, that imports go down only, and how large each room may become.

A budget is raised in a commit of its own, which says what it buys.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from graphlib import CycleError, TopologicalSorter

import pytest
from house import House, read_house

FLOORS = (
    "__main__",
    "cli",
    "tools recipes",
    "run",
    "cluster",
    "workers",
    "telemetry",
    "driver",
    "publisher saver",
    "rundir settings",
    "rollout groups",
    "curriculum",
    "environments",
    "batching rewards weights",
    "envs",
    "processes algorithms",
    "models",
    "runtime plugins",
    "types roles config errors",
)
"""From the roof to the ground. A module imports from its own room and from lower floors, also inside functions and for
types alone; the rooms of a floor do not know each other. Modules of the ground floor may import each other."""

FRONT_DOOR = ("types", "roles", "config", "errors", "batching", "driver", "publisher", "saver", "run", "cli")
RUN = ("run", "workers", "processes", "algorithms", "curriculum")
"""Where a run begins: what they load, at once or by name, is what a run can reach."""

BUDGETS = {
    "front door, driver and groups": 4_300,
    "what a run can reach": 25_500,
    "tools": 5_200,
    "envs": 5_500,
    "all product Python": 35_500,
}
MAX_FILE, MAX_FUNCTION, MAX_LOOSE_FILES = 450, 80, 12


@pytest.fixture(scope="module")
def house() -> House:
    return read_house()


def room_of(module: str) -> str:
    """rlflow.weights.p2p.sender -> weights; the package itself -> ''."""
    return module.partition(".")[2].partition(".")[0]


def uphill(house: House, floors: Iterable[str] = FLOORS) -> list[str]:
    """The imports that go to a higher floor, or to another room of the same floor."""
    height = {room: -number for number, rooms in enumerate(floors) for room in rooms.split()}
    ground = min(height.values())
    found = []
    for module, imported in sorted(house.imports.items()):
        for other in sorted(imported):
            here, there = room_of(module), room_of(other)
            if here == there or not there or not here:
                continue
            if height[there] > height[here] or (height[there] == height[here] != ground):
                found.append(f"{module} -> {other}")
    return found


def cycle_of(imports: Mapping[str, Iterable[str]]) -> list[str]:
    """The modules of one cycle, or []."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def package_imports(house: House) -> dict[str, set[str]]:
    """Folder -> folders, for those that hold neither each other."""
    found: dict[str, set[str]] = {}
    for module, imported in house.imports.items():
        for other in imported:
            ours, theirs = module.split(".")[:-1], other.split(".")[:-1]
            depth = next((n for n, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
            if depth is not None:
                found.setdefault(".".join(ours[: depth + 1]), set()).add(".".join(theirs[: depth + 1]))
    return found


def sizes(house: House) -> dict[str, int]:
    def total(modules: Iterable[str]) -> int:
        return sum(house.lines[module] for module in modules)

    def rooms(*names: str) -> list[str]:
        return [module for module in house.files if room_of(module) in names]

    return {
        "front door, driver and groups": total(rooms(*FRONT_DOOR, "groups")),
        "what a run can reach": total(house.reachable(rooms(*RUN))),
        "tools": total(rooms("tools")),
        "envs": total(rooms("envs")),
        "all product Python": total(house.files),
    }


def test_every_room_has_a_floor(house: House) -> None:
    assert {room_of(module) for module in house.files} - {""} == {room for rooms in FLOORS for room in rooms.split()}


def test_imports_go_down_only(house: House) -> None:
    assert uphill(house) == []


def test_no_modules_import_each_other(house: House) -> None:
    assert cycle_of(house.imports) == []


def test_no_packages_import_each_other(house: House) -> None:
    assert cycle_of(package_imports(house)) == []


@pytest.mark.parametrize("part", BUDGETS)
def test_a_part_stays_within_its_budget(house: House, part: str) -> None:
    assert sizes(house)[part] <= BUDGETS[part]


def test_files_and_functions_fit_a_page(house: House) -> None:
    assert [module for module, lines in house.lines.items() if lines > MAX_FILE] == []
    assert [name for name, lines in house.functions() if lines > MAX_FUNCTION] == []


def test_few_files_lie_loose(house: House) -> None:
    loose = [path.name for path in house.files.values() if path.parent.name == "rlflow"]
    assert len(loose) <= MAX_LOOSE_FILES
