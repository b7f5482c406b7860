"""Shared memory when the ranks of a trainer are on several machines, which folders stand for here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import Tensor

from rlflow.runtime import scratch
from rlflow.weights.shm.arena import ArenaView
from rlflow.weights.shm.sender import AdapterSender, SharedMemorySender

WEIGHTS = {"a": torch.arange(6, dtype=torch.float32).reshape(2, 3), "b": torch.ones(5)}
SPECS = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in WEIGHTS.items()]


class Meeting:
    """What ranks in threads add up."""

    def __init__(self, ranks: int) -> None:
        self._barrier = Barrier(ranks)
        self._rows: list[list[float]] = [[] for _ in range(ranks)]

    def add_up(self, rank: int, values: Sequence[float]) -> list[float]:
        self._rows[rank] = list(values)
        self._barrier.wait(timeout=20)
        total = [sum(column, 0.0) for column in zip(*self._rows, strict=True)]
        self._barrier.wait(timeout=20)
        return total


class Rank:
    """A back end whose parameters are whole on every rank; it has no layout, so that ranks gather."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting, self._rank = meeting, rank

    def add_up(self, values: Sequence[float]) -> list[float]:
        return self._meeting.add_up(self._rank, values)

    def parameter_specs(self) -> list[Any]:
        return SPECS

    adapter_specs = parameter_specs

    def layout(self) -> None:
        return None

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        yield from WEIGHTS.items()

    adapter_parameters = full_parameters


@pytest.mark.parametrize("kind", [SharedMemorySender, AdapterSender])
@pytest.mark.parametrize("machines", [[0, 0], [0, 1], [0, 0, 1, 1, 2]])
def test_each_machine_has_the_version_under_the_same_name(kind: Any, machines: list[int], tmp_path: Path) -> None:
    folders = [tmp_path / f"machine_{index}" for index in range(max(machines) + 1)]
    for folder in folders:
        folder.mkdir()
        (folder / f"{scratch.folder().name}-0123").touch()  # of a trainer that was killed
        (folder / "rlflow-run-ba9876543210-0123").touch()  # of another run
    meeting = Meeting(len(machines))

    def run(rank: int) -> Any:
        sender = kind(Rank(meeting, rank), rank, len(machines), folders[machines[rank]])
        return sender, sender.stage(7)

    with ThreadPoolExecutor(len(machines)) as threads:
        found = list(threads.map(run, range(len(machines))))
    first, *others = [staged for _, staged in found]
    assert others == [None] * len(others)
    for folder in folders:
        (path,) = set(folder.iterdir()) - {folder / "rlflow-run-ba9876543210-0123"}
        assert path.name == Path(first.path).name
        view = ArenaView(str(path), first.num_bytes)
        view.check(7)
        assert all(torch.equal(tensor, WEIGHTS[name]) for name, tensor in view.tensors(first.slots))
    for sender, _ in found:
        sender.close()
    assert all([path.name for path in folder.iterdir()] == ["rlflow-run-ba9876543210-0123"] for folder in folders)
