"""The transport through shared memory of GPUs: all of it but the sharing, on the CPU; the sharing in test_cuda.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from layouts import Model, engine_layout_by_hand
from rank_tensors import Targets, landings_of, opening, tensors_of
from torch import Tensor

from rlflow.weights.ipc.receiver import SharedReceiver
from rlflow.weights.ipc.sender import SHARED_PART, Handle, SharedSender, lay_out, part_key
from rlflow.weights.p2p.rendezvous import TrainerStore
from rlflow.weights.shape.layout import Layout, fsdp_layout

MODEL = Model(layers=1, hidden=6, intermediate=8, heads=4, key_value_heads=2, head_dim=3, vocabulary=70)
CPU = torch.device("cpu")


class Alone:
    """A back end of the only rank; see `TrainerBackend`."""

    scale = 1.0

    def layout(self) -> Layout:
        return fsdp_layout(MODEL.shapes(), "float32", 1)

    def held(self) -> Iterator[tuple[str, Tensor]]:
        yield from tensors_of(self.layout(), torch.float32, self.scale)[0].items()

    def parameter_specs(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        return [(name, torch.bfloat16, shape) for name, shape in MODEL.shapes().items()]

    def add_up(self, values: list[float]) -> list[float]:
        return values


def test_tensors_lie_on_cache_lines() -> None:
    dtypes = {"a": torch.bfloat16, "b": torch.bfloat16, "c": torch.float32}
    laid_out = {"a": (0, 3, "bfloat16"), "b": (64, 40, "bfloat16"), "c": (192, 17, "float32")}
    assert lay_out({"a": 3, "b": 40, "c": 17}, dtypes) == (laid_out, 320)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_copies_what_it_keeps(rank: int) -> None:
    memory: dict[str, Tensor] = {}

    def share(given: Tensor) -> Handle:
        memory["of the trainer"] = given
        return Handle(
            gpu="of the trainer",
            memory="",
            num_bytes=given.numel(),
            offset=0,
            counter="",
            counter_offset=0,
            event="",
            must_wait=False,
        )

    backend = Alone()
    sender = SharedSender(backend, 0, "", 20.0, CPU, share)  # pyright: ignore[reportArgumentType]
    staged = sender.stage(1)
    assert staged is not None
    trainer, wanted = TrainerStore(staged.path, 20.0), engine_layout_by_hand(MODEL, 2)
    targets = {name: torch.zeros_like(each) for name, each in tensors_of(wanted, torch.bfloat16)[rank].items()}
    destination = Targets(wanted.shapes, targets, landings_of(wanted, rank))
    receiver = SharedReceiver(destination, trainer, "of the trainer", lambda handle: memory[handle.gpu])
    for version, scale in ((1, 1.0), (2, 2.0)):
        backend.scale = scale
        sender.stage(version)
        assert [receiver.receive(bucket) for bucket in range(receiver.open(opening(version)))] == [None]
        expected = tensors_of(wanted, torch.bfloat16, scale)[rank]
        assert all(torch.equal(targets[name], each) for name, each in expected.items())
        assert sorted(destination.names) == sorted(wanted.placements)
    # What the trainer no longer has is not copied.
    before = {name: each.clone() for name, each in targets.items()}
    backend.scale = 3.0
    sender.stage(3)
    assert [receiver.receive(bucket) for bucket in range(receiver.open(opening(2)))] == [3]
    assert all(torch.equal(targets[name], each) for name, each in before.items())
    assert SHARED_PART.validate_json(trainer.store.get(part_key(0))).version == 3
    sender.release()
    assert not trainer.store.check([part_key(0)])
