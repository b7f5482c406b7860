"""Reading a few columns of what a worker computes with, beside reading all of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("vllm")

from rlflow.weights.engine.messages import Columns
from rlflow.weights.engine.verify import compare_weights
from rlflow.weights.shape.landings import Landing
from rlflow.weights.shape.layout import Region


def fused(tensor: str, rows: tuple[int, int], num_columns: int) -> list[Landing]:
    """A parameter that lies in these rows of a wider tensor [6, 40], from its column 2 on."""
    first, last = rows
    region = Region(start=(0, 0), stop=(last - first, num_columns), offset=first * 40 + 2, strides=(40, 1))
    return [Landing(tensor=tensor, dtype="float32", regions=(region,))]


def test_a_wrong_element_is_seen_where_its_column_is_chosen() -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.rand(6, 40))
    model.bias = nn.Parameter(torch.rand(3))
    whole = Region(start=(0,), stop=(3,), offset=0, strides=(1,))
    landings = {
        "q": fused("weight", (0, 4), 38),
        "k": fused("weight", (4, 6), 38),
        "bias": [Landing(tensor="bias", dtype="float32", regions=(whole,))],
    }
    sent = {"q": model.weight.detach()[:4, 2:].clone(), "k": model.weight.detach()[4:, 2:].clone()}
    sent["bias"] = model.bias.detach().clone()
    choices = [Columns(count=8, seed=seed) for seed in range(30)]
    for columns in (None, *choices):
        report = compare_weights(model, landings, sent.items(), columns)
        assert report == {"num_equal": 3, "different": [], "unverified": []}
    sent["k"][1, 20] += 1  # column 22 of the tensor
    seen = [compare_weights(model, landings, sent.items(), each)["different"] for each in (None, *choices)]
    covers = [each.first("weight", 40) <= 22 < each.first("weight", 40) + 8 for each in choices]
    assert seen == [["k"], *(["k"] if covered else [] for covered in covers)]
    assert len(set(covers)) == 2
