"""The figures of `rlflow bench train`, and that its sides do the same work."""

from __future__ import annotations

import json
from pathlib import Path

import forks
import pytest
from other_systems import figures_of, worker_script
from rounding import allowed_difference
from train_step import SIDES, summarize, with_window
from training import VOCABULARY, save_model, shuffled, tiny_llama

from rlflow.batching.pack import pack
from rlflow.errors import RunError
from rlflow.tools.bench.training_sides import Workload, _sharing_prompts, read_groups, run_side

SMALL = Workload(groups=2, group_size=3, prompt=7, shortest=1, longest=9)


def test_ratios_are_of_medians_and_to_our_side() -> None:
    steps = {"packed": [2.0, 1.0, 9.0], "padded": [5.0, 5.0, 5.0], "trl": [8.0, 1.0, 80.0], "unshared": [6.0, 6.0, 6.0]}
    steps |= {"rows": [3.0, 3.0, 3.0], "prompts": [4.0, 4.0, 4.0]}
    found = {
        (name, side): [{"step_s": step, "peak_mb": 10 * step, "grad_norm": 2.0} for step in steps[side]]
        for name, sides in SIDES.items()
        for side in sides
    }
    figures = summarize(found)
    assert figures["ragged/packed/step_s"] == 2.0
    assert figures["ragged/padded/speed_up"] == figures["ragged/padded/memory_ratio"] == 2.5
    assert figures["ragged/trl/speed_up"] == 4.0
    assert figures["long_prompt/unshared/speed_up"] == 3.0
    assert figures["long_prompt/unshared/gradient_difference"] == 0.0


def test_all_sides_have_the_same_gradient(tmp_path: Path) -> None:
    model = save_model(tiny_llama(), tmp_path / "model")
    SMALL.write(tmp_path / "samples.npz", VOCABULARY)
    groups = read_groups(tmp_path / "samples.npz")
    assert [len(group) for group in groups] == [3, 3]
    figures = {side: run_side(side, groups, model) for side in ("packed", "prompts", "unshared", "rows", "padded")}
    norms = [found["grad_norm"] for found in figures.values()]
    others = [run_side("packed", shuffled(groups, seed), model)["grad_norm"] for seed in range(3)]
    assert norms == pytest.approx([norms[0]] * 5, rel=allowed_difference(abs(one / norms[0] - 1) for one in others))
    tokens = {side: found["row_tokens"] for side, found in figures.items()}
    assert tokens["packed"] <= tokens["prompts"] < tokens["unshared"] < min(tokens["rows"], tokens["padded"])


async def test_episodes_that_fork_at_every_turn_are_mostly_repetition(tmp_path: Path) -> None:
    await forks.write(tmp_path / "forks.npz")
    groups = read_groups(tmp_path / "forks.npz")
    assert [len(group) for group in groups] == [forks.TURNS] * forks.EPISODES
    shared, prompts = len(pack(groups).input_ids), sum(len(_sharing_prompts([group]).input_ids) for group in groups)
    assert prompts == sum(one.sample.num_tokens - 1 for group in groups for one in group)
    assert prompts > 3 * shared


def test_a_window_changes_the_model_and_not_its_weights(tmp_path: Path) -> None:
    model = Path(save_model(tiny_llama(), tmp_path / "model"))
    SMALL.write(tmp_path / "samples.npz", VOCABULARY)
    groups = read_groups(tmp_path / "samples.npz")
    windowed = str(with_window(model, tmp_path / "windowed", window=4))
    whole, *norms = (
        run_side(side, groups, path)["grad_norm"]
        for side, path in (("packed", str(model)), ("packed", windowed), ("padded", windowed))
    )
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    assert abs(norms[0] / whole - 1) > 1e-2


def test_a_side_that_fails_says_how() -> None:
    with pytest.raises(RunError, match="(?s)the side x ended with exit code 3; it ends with:.*too bad"):
        figures_of("the side x", ["sh", "-c", "echo too bad; exit 3"], timeout_s=10)
    assert figures_of("y", ["echo", json.dumps({"a": 1})], timeout_s=10) == {"a": 1}


def test_the_other_side_is_in_the_checkout() -> None:
    assert worker_script("trl_training_worker.py").name == "trl_training_worker.py"
