"""The queue benchmark: its figures, and our side of it on a real object store."""

from __future__ import annotations

from pathlib import Path

import pytest
from group_queue import count_lines, our_round, summarize

from rlflow.cli import main
from rlflow.tools.bench import command


def test_the_ratio_is_of_medians_and_to_the_better_way() -> None:
    found = {
        "rlflow": [900.0, 1000.0, 5000.0],
        "transfer_queue": [100.0, 90.0, 110.0],
        "transfer_queue_batched": [250.0, 260.0, 10.0],
    }
    figures = summarize(found, their_lines=12000)
    assert figures["rlflow_groups_per_s"] == 1000.0
    assert figures["transfer_queue_groups_per_s"] == 100.0
    assert figures["transfer_queue_batched_groups_per_s"] == 250.0
    assert figures["speed_up"] == 4.0
    assert (figures["transfer_queue_lines"], figures["rounds"]) == (12000, 3)
    assert figures["rlflow_lines"] > 100


def test_empty_lines_do_not_count(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n\n  \ny = 2\n")
    assert count_lines([tmp_path / "a.py"]) == 2


def test_bench_queue_takes_no_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "queue", "run.steps=3"]) == 2
    error = "rlflow: error: bench queue takes no settings; got run.steps=3; leave them out\n"
    assert capsys.readouterr().err == error


@pytest.mark.parametrize("name", ["queue", "train", "weights"])
def test_without_a_checkout_the_other_side_is_missed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "BENCHMARKS", tmp_path / "benchmarks")
    assert main(["bench", name]) == 2
    assert capsys.readouterr().err == (
        "rlflow: error: this measurement needs a checkout of rlflow for its other side, and there is no "
        f"{tmp_path}/benchmarks; get rlflow's repository, run `make setup` in it, and measure with its "
        ".venv/bin/rlflow\n"
    )


@pytest.mark.slow
def test_every_group_goes_through_ledger_and_object_store() -> None:
    assert our_round(num_groups=100) > 0
