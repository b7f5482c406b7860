"""The page of curves that scripts/gallery.py writes from the folders of runs."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml
from house import ROOT
from test_setup import load_script

from rlflow.config import Config
from rlflow.errors import ConfigError
from rlflow.rundir.directory import plain
from rlflow.settings.recipe_files import recipe_names

gallery = load_script("scripts/gallery.py")


def write_run(folder: Path, recipe: str, rewards: list[float], held_out: dict[int, float], steps: int = 4) -> Path:
    config = plain(Config())
    config["run"] |= {"name": recipe, "steps": steps}
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    records = [{"step": step, "reward": reward, "step_time": 7.5} for step, reward in enumerate(rewards, start=1)]
    evaluations = [{"step": step, "eval/reward": reward} for step, reward in held_out.items()]
    for name, lines in (("metrics", records), ("evaluations", evaluations)):
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    start = {
        "started": "2026-11-23T04:05:06+0000",
        "host": "secret-host",
        "directory": "/secret/place",
        "command": ["/secret/bin/rlflow", "train", f"recipe={recipe}", "run.dir=/secret/run", "eval.every=2"],
        "commit": "0123456789abcdef",
        "machines": ["secret-host: 2 CPU, 0 GPU"],
    }
    (folder / "about.json").write_text(json.dumps([start]))
    return folder


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    (tmp_path / "docs").mkdir()
    return tmp_path / "docs"


def test_a_finished_run_has_a_curve_and_three_figures_and_no_trace_of_its_machine(docs: Path, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", "calculator", [0.0, 0.25, 0.5, 1.0], {0: 0.125, 4: 0.75})
    gallery.write(docs, [run])
    lines = (docs / "gallery.md").read_text().splitlines()
    assert (
        "| `calculator` | ![reward of calculator](gallery/calculator.svg) | 0.438 to 0.438 | 0.125 to 0.75 | "
        "30.0 s for 4 steps |"
    ) in lines
    assert ("- `rlflow train recipe=calculator eval.every=2` (2026-11-23, 2 CPU, 0 GPU, commit 0123456789ab)") in lines
    (missing,) = [line for line in lines if line.startswith("| `grpo_32b`")]
    assert missing.startswith(
        "| `grpo_32b` | 64 GPUs | `Qwen/Qwen2.5-32B-Instruct` | A 32B model on 64 GPUs of 80 GB: eight "
    )
    assert not [path for path in docs.rglob("*.*") if "secret" in path.read_text()]


def test_the_curve_is_scaled_to_its_frame(docs: Path, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", "smoke", [0.0, 0.5, 1.0], {3: 0.25}, steps=3)
    gallery.write(docs, [run])
    drawn = ElementTree.parse(docs / "gallery" / "smoke.svg").getroot()
    (line,) = drawn.iter("{http://www.w3.org/2000/svg}polyline")
    assert line.get("points") == "34.0,68.0 143.0,38.0 252.0,8.0"
    (dot,) = drawn.iter("{http://www.w3.org/2000/svg}circle")
    assert (dot.get("cx"), dot.get("cy")) == ("252.0", "53.0")
    assert [text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")] == ["1", "0"]
    assert "prefers-color-scheme:dark" in (docs / "gallery" / "smoke.svg").read_text()


def test_runs_that_the_page_has_stay_until_their_recipe_runs_again(docs: Path, tmp_path: Path) -> None:
    gallery.write(docs, [write_run(tmp_path / "one", "smoke", [0.5] * 4, {})])
    gallery.write(docs, [write_run(tmp_path / "two", "calculator", [0.5] * 4, {})])
    gallery.write(docs, [write_run(tmp_path / "three", "smoke", [0.75] * 4, {})])
    rows = [line.split(" | ")[::2] for line in (docs / "gallery.md").read_text().splitlines() if ".svg" in line]
    assert rows == [
        ["| `calculator`", "0.5 to 0.5", "30.0 s for 4 steps |"],
        ["| `smoke`", "0.75 to 0.75", "30.0 s for 4 steps |"],
    ]


@pytest.mark.parametrize(
    ("recipe", "steps", "message"),
    [("smoke", 5, "is interrupted after step 4"), ("mine", 4, "is of mine, which is no recipe")],
)
def test_what_is_no_finished_run_of_a_recipe_changes_nothing(
    docs: Path, tmp_path: Path, recipe: str, steps: int, message: str
) -> None:
    good = write_run(tmp_path / "good", "smoke", [0.5] * 4, {})
    bad = write_run(tmp_path / "bad", recipe, [0.5] * 4, {}, steps=steps)
    with pytest.raises(ConfigError, match=message):
        gallery.write(docs, [good, bad])
    assert list(docs.iterdir()) == []


def test_the_page_of_the_repository_is_what_the_script_writes() -> None:
    entries = json.loads((ROOT / "docs" / "gallery" / "runs.json").read_text())
    assert (ROOT / "docs" / "gallery.md").read_text() == gallery.page(entries)
    assert all((ROOT / "docs" / "gallery" / f"{name}.svg").is_file() for name in entries)
    assert entries.keys() <= set(recipe_names())
