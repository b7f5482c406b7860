"""The profile of a rank."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import torch

from rlflow.workers.trainer.profile import RankProfile


def operations(path: Path) -> set[str]:
    with gzip.open(path, "rt") as file:
        return {event["name"] for event in json.load(file)["traceEvents"]}


def test_a_profile_holds_what_was_done_in_it_and_nothing_else(tmp_path: Path) -> None:
    matrix = torch.ones(4, 4)
    torch.linalg.inv(matrix + torch.eye(4))
    for name in ("first", "second"):
        profile = RankProfile()
        torch.mm(matrix, matrix)
        profile.write(tmp_path / "profile", name)
        torch.linalg.inv(matrix + torch.eye(4))
    files = sorted((tmp_path / "profile").iterdir())
    assert [file.name for file in files] == ["first.trace.json.gz", "second.trace.json.gz"]
    for file in files:
        found = operations(file)
        assert "aten::mm" in found
        assert "aten::linalg_inv" not in found
