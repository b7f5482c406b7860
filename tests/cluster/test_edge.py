"""Ray is at the edge: which modules know its exceptions."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_rays_exceptions_end_in_the_cluster_and_where_a_runner_calls_an_engine() -> None:
    files = [path for folder in ("rlflow", "workers", "envs", "recipes") for path in (ROOT / folder).rglob("*.py")]
    knowing = {path.relative_to(ROOT).as_posix() for path in files if "ray.exceptions" in path.read_text()}
    of_a_run = {name for name in knowing if not name.startswith(("rlflow/cluster/", "rlflow/tools/"))}
    assert of_a_run <= {"workers/runner.py", "rlflow/workers/runner.py"}
