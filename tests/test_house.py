"""The house: which floor each room is on, that imports go down only, and how large each room may become.

A budget is raised in a commit of its own, which says what it buys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from house import House, read_house

FLOORS = (
    "__main__",
    "cli library",
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

FRONT_DOOR = ("types", "roles", "config", "errors", "batching", "driver", "publisher", "saver", "run", "cli", "library")
RUN = ("run", "workers", "processes", "algorithms", "curriculum")
"""Where a run begins: what they load, at once or by name, is what a run can reach."""

BUDGETS = {
    "front door, driver and groups": 5_665,
    "what a run can reach": 41_800,
    "tools": 9_280,
    "envs": 5_575,
    "all product Python": 55_200,
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


def too_long(house: House) -> list[str]:
    """Files and functions that do not fit a page."""
    files = [module for module, lines in house.lines.items() if lines > MAX_FILE]
    return files + [name for name, lines in house.functions() if lines > MAX_FUNCTION]


def loose_files(house: House) -> list[str]:
    return [path.name for path in house.files.values() if path.parent.name == "rlflow"]


def over_budget(house: House) -> list[str]:
    return [part for part, lines in sizes(house).items() if lines > BUDGETS[part]]


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
    assert too_long(house) == []


def test_few_files_lie_loose(house: House) -> None:
    assert len(loose_files(house)) <= MAX_LOOSE_FILES


Build = Callable[[dict[str, str]], House]


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """Builds a house from files, and reads it. Each folder is a package."""

    def house_of(files: dict[str, str]) -> House:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            for folder in path.parents:
                if folder == tmp_path:
                    break
                (folder / "__init__.py").touch()
            path.write_text(text)
        return read_house(tmp_path)

    return house_of


def test_a_sound_house_passes_every_check(build: Build) -> None:
    house = build(
        {
            "rlflow/driver.py": "from rlflow.groups.intake import admit\n",
            "rlflow/groups/intake.py": "from rlflow.groups.ready import Queue\nfrom rlflow.types import Task\n",
            "rlflow/groups/ready.py": "import json\n",
            "rlflow/types.py": "from rlflow.errors import RunError\n",
            "rlflow/errors.py": "",
            "envs/sums/env.py": "from rlflow.types import Task\n",
        }
    )
    assert house.imports["rlflow.groups.intake"] == {"rlflow.groups.ready", "rlflow.types"}
    assert "rlflow.envs.sums.env" in house.files
    assert (uphill(house), cycle_of(house.imports), cycle_of(package_imports(house))) == ([], [], [])
    assert (too_long(house), over_budget(house)) == ([], [])


@pytest.mark.parametrize(
    "imported",
    [
        pytest.param("import rlflow.run\n", id="at the top"),
        pytest.param("def late():\n    from rlflow.run import train\n", id="inside a function"),
        pytest.param(
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from rlflow import run\n", id="for types alone"
        ),
    ],
)
def test_an_import_of_a_higher_floor_is_found(build: Build, imported: str) -> None:
    house = build({"rlflow/run.py": "", "rlflow/groups/intake.py": imported})
    assert uphill(house) == ["rlflow.groups.intake -> rlflow.run"]


def test_an_import_of_another_room_on_the_same_floor_is_found(build: Build) -> None:
    house = build({"rlflow/groups/intake.py": "from rlflow.rollout import fleet\n", "rlflow/rollout/fleet.py": ""})
    assert uphill(house) == ["rlflow.groups.intake -> rlflow.rollout.fleet"]


def test_rooms_of_the_ground_floor_may_import_each_other(build: Build) -> None:
    assert uphill(build({"rlflow/types.py": "import rlflow.config\n", "rlflow/config.py": ""})) == []


def test_a_room_without_a_floor_is_found(build: Build) -> None:
    house = build({"rlflow/attic/box.py": "import rlflow.types\n", "rlflow/types.py": ""})
    with pytest.raises(KeyError, match="attic"):
        uphill(house)


def test_modules_that_import_each_other_are_found(build: Build) -> None:
    house = build(
        {
            "rlflow/groups/intake.py": "from rlflow.groups.ready import Queue\n",
            "rlflow/groups/ready.py": "def late():\n    from rlflow.groups import intake\n",
        }
    )
    assert set(cycle_of(house.imports)) == {"rlflow.groups.intake", "rlflow.groups.ready"}


def test_packages_that_import_each_other_are_found(build: Build) -> None:
    """Though no two of their modules do."""
    house = build(
        {
            "rlflow/weights/shm/sender.py": "import rlflow.weights.shape.boxes\n",
            "rlflow/weights/shm/arena.py": "",
            "rlflow/weights/shape/boxes.py": "",
            "rlflow/weights/shape/plan.py": "from rlflow.weights.shm.arena import Arena\n",
        }
    )
    assert cycle_of(house.imports) == []
    assert set(cycle_of(package_imports(house))) == {"rlflow.weights.shm", "rlflow.weights.shape"}


@pytest.mark.parametrize(
    ("file", "parts"),
    [
        ("rlflow/driver.py", ["front door, driver and groups"]),
        ("rlflow/groups/intake.py", ["front door, driver and groups"]),
        ("rlflow/tools/doctor/disk.py", ["tools"]),
        ("envs/sums/env.py", ["envs"]),
    ],
)
def test_a_part_that_outgrows_its_budget_is_found(build: Build, file: str, parts: list[str]) -> None:
    (part,) = parts
    assert over_budget(build({file: "\n" * BUDGETS[part]})) == []
    assert over_budget(build({file: "\n" * (BUDGETS[part] + 1)})) == parts


def test_what_a_run_can_reach_is_counted_with_what_it_imports_late_or_by_name(build: Build) -> None:
    files = {
        "rlflow/run.py": "def late():\n    import rlflow.telemetry.report\n",
        "rlflow/telemetry/report.py": "CHILD = 'rlflow.telemetry.child'\n",
        "rlflow/telemetry/child.py": "\n" * 1000,
        "rlflow/telemetry/other.py": "\n" * 100,
    }
    assert sizes(build(files))["what a run can reach"] == 1003
    files["rlflow/telemetry/child.py"] = "\n" * BUDGETS["what a run can reach"]
    assert over_budget(build(files)) == ["what a run can reach"]


def test_all_product_python_is_counted(build: Build) -> None:
    share = BUDGETS["all product Python"] // 4
    files = {f"{folder}/much.py": "\n" * share for folder in ("rlflow/attic", "rlflow/cellar", "workers", "recipes")}
    assert over_budget(build(files)) == []
    files["recipes/more.py"] = "\n" * 4
    assert over_budget(build(files)) == ["all product Python"]


def test_long_files_and_functions_are_found(build: Build) -> None:
    body = "    pass\n"
    house = build(
        {
            "rlflow/types.py": "\n" * (MAX_FILE + 1),
            "rlflow/errors.py": "\n" * MAX_FILE,
            "rlflow/run.py": "class Run:\n  def train(self):\n" + body * MAX_FUNCTION,
            "rlflow/cli.py": "async def main():\n" + body * (MAX_FUNCTION - 1),
        }
    )
    assert too_long(house) == ["rlflow.types", "rlflow.run:train"]


def test_loose_files_are_counted(build: Build) -> None:
    house = build({"rlflow/one.py": "", "rlflow/groups/two.py": "", "workers/three.py": ""})
    assert loose_files(house) == ["__init__.py", "one.py"]
