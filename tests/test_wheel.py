"""What an installed rlflow has in it, and that it works without its checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
pytest.importorskip("setuptools", minversion="78")

ROOT = Path(__file__).resolve().parent.parent
_TIMEOUT_S = 120
_SDIST = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"


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
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean copy, links as links."""
    copy = tmp_path_factory.mktemp("clean") / "rlflow"
    clutter = shutil.ignore_patterns(
        ".*", "__pycache__", "*.egg-info", "build", "dist", "runs", "outputs", "multirun", "tests"
    )
    shutil.copytree(ROOT, copy, symlinks=True, ignore=clutter)
    (copy / "tests").mkdir()
    (copy / "tests" / "test_nothing.py").touch()
    return copy


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(checkout, tmp_path_factory.mktemp("wheel"))


def test_it_holds_the_package_and_nothing_else(checkout: Path, wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    package = {name for name in names if not name.partition("/")[0].endswith(".dist-info")}
    sources = {
        f"rlflow/{path.relative_to(checkout if top != 'rlflow' else checkout / top)}"
        for top in ("rlflow", "workers", "envs", "recipes")
        for path in (checkout / top).rglob("*")
        if path.suffix in (".py", ".yaml") and path.is_file()
    }
    assert sources <= package
    assert {Path(name).suffix for name in package - sources} <= {".md", ".typed"}
    assert "rlflow/recipes/cluster/kuberay.yaml" in sources


def test_a_source_distribution_makes_the_same_wheel(checkout: Path, wheel: Path, tmp_path: Path) -> None:
    run([sys.executable, "-c", _SDIST, str(tmp_path)], checkout)
    [archive] = tmp_path.iterdir()
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
