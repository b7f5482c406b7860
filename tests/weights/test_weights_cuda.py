"""Weights from one process's GPU to another's: through shared memory on one GPU, through NCCL between two."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from layouts import Model, engine_layout_by_hand
from processes import spawn_ranks, start_ranks
from rank_tensors import Targets, landings_of, opening, tensors_of
from torch import Tensor
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]

from rlflow.weights.ipc.receiver import SharedReceiver, device_id
from rlflow.weights.ipc.sender import SharedSender
from rlflow.weights.p2p.exchange import MessageStamp, check, cut_messages, digest, pack, seal, unpack
from rlflow.weights.p2p.receiver import PeerReceiver, Worker
from rlflow.weights.p2p.rendezvous import TrainerStore
from rlflow.weights.p2p.sender import PeerSender
from rlflow.weights.shape.layout import EngineLayout, Layout, fsdp_layout
from rlflow.weights.shape.plan import plan

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices: one for each process")

MODEL = Model(layers=2, hidden=64, intermediate=96, heads=4, key_value_heads=2, head_dim=16, vocabulary=300)


class Alone:
    """A back end of the only rank; see `TrainerBackend`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def layout(self) -> Layout:
        return fsdp_layout(MODEL.shapes(), "float32", 1)

    def held(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors_of(self.layout(), torch.float32)[0].items():
            yield name, tensor.to(self._device)

    def parameter_specs(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        return [(name, torch.bfloat16, shape) for name, shape in MODEL.shapes().items()]

    def add_up(self, values: list[float]) -> list[float]:
        return values


def blank_targets(wanted: Layout, device: torch.device) -> dict[str, Tensor]:
    return {name: torch.zeros_like(each, device=device) for name, each in tensors_of(wanted, torch.bfloat16)[0].items()}


def assert_filled(targets: dict[str, Tensor], wanted: Layout) -> None:
    for name, each in tensors_of(wanted, torch.bfloat16)[0].items():
        assert torch.equal(targets[name].cpu(), each), name


def share_until_read(rank: int, gpu: int, addresses: Any, done: Any) -> None:
    device = torch.device("cuda", gpu)
    torch.cuda.set_device(device)
    sender = SharedSender(Alone(device), 0, "", 60.0, device)  # pyright: ignore[reportArgumentType]
    staged = sender.stage(1)
    assert staged is not None
    addresses.put(staged.path)
    assert done.wait(timeout=100)
    sender.close()


@pytest.mark.parametrize("gpu", [0, pytest.param(1, marks=needs_two)])
def test_a_worker_reads_the_memory_of_a_trainer(gpu: int) -> None:
    context = torch.multiprocessing.get_context("spawn")
    addresses, done = context.Queue(), context.Event()
    ranks = start_ranks(1, share_until_read, gpu, addresses, done)
    device, wanted = torch.device("cuda", 0), engine_layout_by_hand(MODEL, 1)
    try:
        trainer = TrainerStore(addresses.get(timeout=100), 60.0)
        targets = blank_targets(wanted, device)
        destination = Targets(wanted.shapes, targets, landings_of(wanted, 0))
        receiver = SharedReceiver(destination, trainer, device_id(device))
        assert receiver.open(opening(1)) == 1
        assert receiver.receive(0) is None
        assert_filled(targets, wanted)
    finally:
        done.set()
        while not ranks.join(timeout=60):
            pass


def send_or_receive(rank: int, folder: Path) -> None:
    """The trainer on one GPU, the engine on the other."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    script = FileStore(str(folder / "script"), 2)
    if rank == 0:
        sender = PeerSender(Alone(device), 0, 1, "", 60.0, bucket_bytes=20_000)  # pyright: ignore[reportArgumentType]
        staged = sender.stage(1)
        assert staged is not None
        script.set("address", staged.path)
        script.wait(["done"])
        assert sender._failure is None
        sender.close()
        return
    wanted = engine_layout_by_hand(MODEL, 1)
    trainer = TrainerStore(script.get("address").decode(), 60.0)
    targets, worker = blank_targets(wanted, device), Worker(engine=0, rank=0, num_ranks=1, device=device)
    receiver = PeerReceiver(Targets(wanted.shapes, targets, landings_of(wanted, 0)), trainer, worker)
    for transfer in (1, 2):
        num_buckets = receiver.open(opening(1, transfer))
        assert num_buckets > 4
        assert {receiver.receive(bucket) for bucket in range(num_buckets)} == {None}
        assert_filled(targets, wanted)
    # What is gone is noticed when the last bucket has come, before anything is committed.
    num_buckets = receiver.open(opening(7, 3))
    assert [receiver.receive(bucket) for bucket in range(num_buckets)][-1] == 1
    # Half a transfer: giving it up ends the sends and receives that are queued on both GPUs, and the next one works.
    receiver.open(opening(1, 4))
    receiver.receive(0)
    receiver.abort()
    torch.cuda.synchronize(device)
    for each in targets.values():
        each.zero_()
    num_buckets = receiver.open(opening(1, 5))
    assert {receiver.receive(bucket) for bucket in range(num_buckets)} == {None}
    assert_filled(targets, wanted)
    receiver.shutdown()
    script.set("done", "")


@needs_two
def test_a_worker_is_sent_what_a_trainer_on_another_gpu_holds(tmp_path: Path) -> None:
    spawn_ranks(2, send_or_receive, tmp_path)


def test_a_message_is_packed_and_checked_without_a_word_from_the_gpu() -> None:
    """Nothing between packing and the last check may wait for the device."""
    device = torch.device("cuda", 0)
    wanted = engine_layout_by_hand(MODEL, 1)
    made = plan(Alone(device).layout(), [EngineLayout(layout=wanted)], 1 << 20)
    held = {name: tensor.to(device) for name, tensor in Alone(device).held()}
    targets, version = blank_targets(wanted, device), torch.full((1,), 3, device=device)
    (messages,) = cut_messages(made.moves_from(0), made.num_buckets)
    stamp, digests = MessageStamp(transfer=5, version=3, bucket=0), []
    memory = [torch.zeros(message.num_bytes, dtype=torch.uint8, device=device) for message in messages]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for message, packed in zip(messages, memory, strict=True):
            pack(message, held, packed)
            seal(packed, stamp, version)
            digests.append(digest(packed))
            unpack(message, packed, targets)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [check(each, stamp) for each in torch.stack(digests).tolist()] == [3]
    assert_filled(targets, wanted)
