"""What an installed rlflow has in it, and that it works without its checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
pytest.importorskip("setuptools", minversion="78")

ROOT = Path(__file__).resolve().parent.parent
_TIMEOUT_S = 300


def run(command: list[str], cwd: Path) -> str:
    """Its output; nothing of this checkout is on the path."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build_wheel(source: Path, folder: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    run([*pip, "--wheel-dir", str(folder), str(source)], source.parent)
    [wheel] = folder.iterdir()
    return wheel


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with wheel and source distribution: the one that CI has just built, or one of our own."""
    if "RLFLOW_DIST" in os.environ:
        return Path(os.environ["RLFLOW_DIST"])
    folder = tmp_path_factory.mktemp("packages")
    run([sys.executable, str(ROOT / "scripts" / "package.py"), str(folder)], ROOT)
    return folder


@pytest.fixture
def wheel(packages: Path) -> Path:
    [wheel] = packages.glob("*.whl")
    return wheel


def test_it_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    package = {name for name in names if not name.partition("/")[0].endswith(".dist-info")}
    sources = {
        f"rlflow/{path.relative_to(ROOT if top != 'rlflow' else ROOT / top)}"
        for top in ("rlflow", "workers", "envs", "recipes")
        for path in (ROOT / top).rglob("*")
        if path.suffix in (".py", ".yaml", ".html", ".css", ".js") and path.is_file()
    }
    assert sources <= package
    licence = "rlflow/telemetry/report/uplot/LICENSE"
    assert licence in package
    assert {Path(name).suffix for name in package - sources - {licence}} <= {".md", ".typed"}
    assert "rlflow/recipes/cluster/kuberay.yaml" in sources


def test_a_source_distribution_makes_the_same_wheel(packages: Path, wheel: Path, tmp_path: Path) -> None:
    [archive] = packages.glob("*.tar.gz")
    again = build_wheel(archive, tmp_path / "wheel")
    assert sorted(zipfile.ZipFile(again).namelist()) == sorted(zipfile.ZipFile(wheel).namelist())


def test_it_finds_its_recipes_from_anywhere(wheel: Path, tmp_path: Path) -> None:
    """In an environment that has the dependencies, by a path, and rlflow from the wheel alone."""
    folder, elsewhere = tmp_path / "environment", tmp_path / "elsewhere"
    elsewhere.mkdir()
    run([sys.executable, "-m", "venv", "--without-pip", str(folder)], tmp_path)
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python")]
    run([*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel)], tmp_path)
    [packages] = folder.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    rlflow = str(folder / "bin" / "rlflow")
    assert {"smoke", "grpo_7b"} <= {line.split()[0] for line in run([rlflow, "recipes"], elsewhere).splitlines()}
    job = run([rlflow, "train", "recipe=smoke", "cluster=ray", "--cfg", "job"], elsewhere)
    assert "  path: tiny\n" in job
    assert "  address: auto\n" in job
    where = run(
        [str(folder / "bin" / "python"), "-c", "import rlflow.workers; print(*rlflow.workers.__path__)"], elsewhere
    )
    assert Path(where.strip()) == packages / "rlflow" / "workers"
    assert list(elsewhere.iterdir()) == []
