"""The figures of `rlflow bench weights`, and the whole of it on a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from weights_engine import UpdateTimes
from weights_update import DenseRound, ReloadRound, configured, summarize

from rlflow.cli import main
from rlflow.config import Dtype


def dense(stage_s: float, pause_s: float, buckets_s: list[float]) -> DenseRound:
    update = UpdateTimes(total_s=1.0, pause_s=pause_s, vllm_s=0.05, verify_s=0.01, buckets_s=buckets_s)
    return DenseRound(stage_s=stage_s, place_s=0.1, update=update)


def test_shares_and_ratios_are_of_medians() -> None:
    rounds = [dense(0.3, 0.1, [0.2, 0.3]), dense(0.2, 0.5, [0.4, 0.1]), dense(0.3, 0.08, [])]
    reloads = [ReloadRound(save_s=2.0, pause_s=0.6), ReloadRound(save_s=9.0, pause_s=0.7)]
    figures = summarize(rounds, reloads, [0.1, 0.5, 0.1], num_bytes=400_000_000)
    assert figures["copy_mb_per_s"] == pytest.approx(4000)
    assert figures["dense/mb_per_s"] == pytest.approx(1000)
    assert figures["dense/share"] == pytest.approx(0.25)
    assert figures["dense/copy_share"] == pytest.approx(0.5)
    assert (figures["dense/prepare_s"], figures["dense/longest_bucket_s"]) == (0.5, 0.4)
    assert (figures["pause/median_s"], figures["pause/worst_s"]) == (0.1, 0.5)
    assert figures["pause/swap_s"] == pytest.approx(0.04)
    assert figures["reload/pause_ratio"] == pytest.approx(6.5)
    assert figures["reload/total_ratio"] == pytest.approx((5.5 + 0.65) / 1.3)


def test_other_settings_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert configured(["model.path=tiny", "model.dtype=bfloat16"]).model.dtype is Dtype.bfloat16
    assert main(["bench", "weights", "run.steps=3"]) == 2
    assert "bench weights takes model.path and model.dtype (float32, bfloat16); got run.steps=3" in (
        capsys.readouterr().err
    )
    assert main(["bench", "queue", "--verify"]) == 2
    assert capsys.readouterr().err.startswith("rlflow: error: bench queue takes no --verify")


@pytest.mark.proof
@pytest.mark.slow
def test_a_tiny_model_arrives_whole() -> None:
    command = [sys.executable, "-m", "rlflow", "bench", "weights", "model.path=tiny", "--verify", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["verify/equal"] == figures["verify/parameters"] == figures["verify/different_before"] == 20
    assert (figures["verify/different"], figures["verify/unverified"]) == (0, 0)
    assert figures["dense/mb"] > 0.4 and figures["pause/median_s"] > 0 and figures["reload/total_s"] > 0
    name = "deltas/bfloat16_1e-06"
    assert figures[f"{name}/deltas"] == len(figures[f"{name}/density"]) == 4
    assert all(0 < share < 0.3 for share in figures[f"{name}/bytes_share"])
    assert figures["deltas/float32_1e-06/deltas"] == 0
