"""The rank-to-rank transport: what is packed arrives, engines may die in the middle, and vLLM computes with it."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import Model, engine_layout_by_hand, run_layout
from processes import spawn_ranks
from rank_tensors import Targets, landings_of, opening, tensors_of
from torch import Tensor
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]

from rlflow.errors import RunError
from rlflow.weights.p2p import rendezvous
from rlflow.weights.p2p import sender as p2p
from rlflow.weights.p2p.exchange import Arrivals, MessageStamp, check, cut_messages, digest, pack, seal, unpack
from rlflow.weights.p2p.receiver import PeerReceiver, Worker
from rlflow.weights.p2p.rendezvous import TrainerStore, host_store
from rlflow.weights.p2p.sender import PeerSender, submit
from rlflow.weights.shape.landings import (
    landings_from_json,
    landings_to_json,
    layout_from_json,
    layout_of,
    layout_to_json,
)
from rlflow.weights.shape.layout import EngineLayout, Layout, fsdp_layout, mesh_layout
from rlflow.weights.shape.plan import plan
from rlflow.workers.trainer.process_group import join

MODEL = Model(layers=2, hidden=6, intermediate=8, heads=4, key_value_heads=2, head_dim=3, vocabulary=70, has_bias=True)
SOURCES = {
    "rows": lambda shapes: fsdp_layout(shapes, "float32", 3),
    "slices": lambda shapes: fsdp_layout(shapes, "float32", 4, 2, {name: 0 for name in shapes if "q_proj" in name}),
    "runs": lambda shapes: run_layout(shapes, "float32", 3),
    "copies": lambda shapes: mesh_layout(shapes, "float32", 4, lambda _: ((2, None), (2, 0))),
}


@settings(max_examples=40, deadline=None)
@given(
    source=st.sampled_from(sorted(SOURCES)),
    size=st.sampled_from([1, 2, 4]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    bucket_bytes=st.sampled_from([64, 200, 1 << 20]),
)
def test_what_is_packed_arrives(source: str, size: int, dtype: str, bucket_bytes: int) -> None:
    held, wanted = SOURCES[source](MODEL.shapes()), engine_layout_by_hand(MODEL, size, dtype)
    made = plan(held, [EngineLayout(layout=wanted)], bucket_bytes)
    senders = [cut_messages(made.moves_from(rank), made.num_buckets) for rank in range(held.num_ranks)]
    sources, expected = tensors_of(held, torch.float32), tensors_of(wanted, getattr(torch, dtype))
    for rank, tensors in enumerate(expected):
        moves = list(made.moves_to(0, rank))
        arrivals, targets = (
            Arrivals(held.placements, moves),
            {name: torch.zeros_like(each) for name, each in tensors.items()},
        )
        complete = arrivals.without_moves()
        for bucket, messages in enumerate(cut_messages(moves, made.num_buckets)):
            for message in messages:
                assert message in senders[message.source][bucket]
                packed = torch.full((message.num_bytes,), 255, dtype=torch.uint8)
                stamp = MessageStamp(transfer=5, version=3, bucket=bucket)
                pack(message, sources[message.source], packed)
                seal(packed, stamp, torch.tensor([3]))
                assert check(digest(packed).tolist(), stamp) == 3
                unpack(message, packed, targets)
                complete += arrivals.arrived(message.moves)
        assert sorted(complete) == sorted(held.placements)
        assert all(torch.equal(targets[name], each) for name, each in tensors.items())


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:0", "file://{folder}/store"])
def test_a_request_that_never_comes_holds_up_no_other(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker took its number, and died before it wrote."""
    monkeypatch.setattr(rendezvous, "LOOK_AGAIN", datetime.timedelta(milliseconds=100))
    store, _ = host_store(address.format(folder=tmp_path), 10.0)
    assert store.add(p2p.NUM_REQUESTS, 1) == 1
    submit(store, {"engine": 3})
    assert p2p._next(store, 0) is None
    assert p2p._next(store, 1) == {"engine": 3}


def test_a_message_that_was_changed_or_is_another_is_refused() -> None:
    held, wanted = SOURCES["rows"](MODEL.shapes()), engine_layout_by_hand(MODEL, 1, "float32")
    made = plan(held, [EngineLayout(layout=wanted)], 1 << 20)
    ((message, *_),) = cut_messages(made.moves_from(0), made.num_buckets)
    packed, stamp = torch.zeros(message.num_bytes, dtype=torch.uint8), MessageStamp(transfer=5, version=3, bucket=0)
    pack(message, tensors_of(held, torch.float32)[0], packed)
    seal(packed, stamp, torch.tensor([3]))
    for other in (replace(stamp, transfer=6), replace(stamp, bucket=1)):
        with pytest.raises(RunError, match="was awaited, but bucket 0 of transfer 5 came"):
            check(digest(packed).tolist(), other)
    packed[-3] ^= 1
    with pytest.raises(RunError, match="bucket 0 of the weights of version 3 did not arrive as it was sent"):
        check(digest(packed).tolist(), stamp)
    seal(packed, stamp, torch.tensor([4]))
    assert check(digest(packed).tolist(), stamp) == 4


@pytest.mark.parametrize("source", sorted(SOURCES))
def test_layouts_are_told_as_they_are(source: str) -> None:
    held, wanted = SOURCES[source](MODEL.shapes()), engine_layout_by_hand(MODEL, 4)
    assert layout_from_json(layout_to_json(held)) == held
    told = [landings_from_json(landings_to_json(landings_of(wanted, rank))) for rank in range(4)]
    assert layout_of(MODEL.shapes(), dict.fromkeys(MODEL.shapes(), "float32"), told) == wanted


class Rank:
    """A back end of a rank that holds what it is told; see `TrainerBackend`."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.scale = 1.0

    def layout(self) -> Layout:
        return fsdp_layout(MODEL.shapes(), "float32", 2)

    def held(self) -> Iterator[tuple[str, Tensor]]:
        yield from tensors_of(self.layout(), torch.float32, self.scale)[self.rank].items()

    def parameter_specs(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        return [(name, torch.bfloat16, shape) for name, shape in MODEL.shapes().items()]

    def add_up(self, values: list[float]) -> list[float]:
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total)
        return total.tolist()


def play(number: int, folder: Path) -> None:
    """Two ranks of a trainer, two of an engine of which the second one dies, and the process that takes its place."""
    script = FileStore(str(folder / "script"), 5)
    script.set_timeout(datetime.timedelta(seconds=100))
    if number < 2:
        play_trainer(number, script, folder)
    else:
        play_worker({2: 0, 3: 1, 4: 1}[number], script, is_second=number == 4)


def play_trainer(rank: int, script: FileStore, folder: Path) -> None:
    join(f"file://{folder / 'trainer'}", rank, 2, torch.device("cpu"), 60)
    backend = Rank(rank)
    sender = PeerSender(backend, rank, 2, "", timeout_s=60, bucket_bytes=200)  # pyright: ignore[reportArgumentType]
    staged = sender.stage(1)
    if staged is not None:
        script.set("address", staged.path)
    script.set(f"staged {rank}", "")
    script.wait(["died"])
    backend.scale = 2.0
    sender.stage(2)
    script.set(f"staged again {rank}", "")
    script.wait(["done 0", "done 1"])
    assert sender._failure is None
    sender.close()
    assert not sender._thread.is_alive()
    # The store is in the process of rank 0.
    script.set(f"closed {rank}", "")
    script.wait(["closed 0", "closed 1"])
    dist.destroy_process_group()


def play_worker(rank: int, script: FileStore, is_second: bool) -> None:
    wanted = engine_layout_by_hand(MODEL, 2)
    script.wait(["staged 0", "staged 1"])
    address = script.get("address").decode()
    if not is_second:
        receiver, targets, landed = make_receiver(rank, wanted, address)
        assert fetch(receiver, version=1, transfer=11) == {None}
        assert_holds(targets, wanted, rank, scale=1.0)
        assert sorted(landed) == sorted(wanted.placements)
        # Another version than there is: all of it is received, and nothing of it used. The next one comes as ever.
        for target in targets.values():
            target.zero_()
        assert fetch(receiver, version=7, transfer=12) == {1}
        assert not any(target.any() for target in targets.values())
        assert fetch(receiver, version=1, transfer=13) == {None}
        assert_holds(targets, wanted, rank, scale=1.0)
        receiver.open(opening(1, transfer=14))
        receiver.receive(0)
        if rank == 1:
            script.set("died", "")
            os._exit(0)
        with pytest.raises(RuntimeError, match="peer"):
            fetch_rest(receiver)
    script.wait(["staged again 0", "staged again 1"])
    receiver, targets, _ = make_receiver(rank, wanted, address)
    assert fetch(receiver, version=2, transfer=15) == {None}
    assert_holds(targets, wanted, rank, scale=2.0)
    receiver.shutdown()
    script.set(f"done {rank}", "")


def make_receiver(rank: int, wanted: Layout, address: str) -> tuple[PeerReceiver, dict[str, Tensor], list[str]]:
    trainer = TrainerStore(address, 60)
    worker = Worker(engine=0, rank=rank, num_ranks=2, device=torch.device("cpu"))
    targets = {name: torch.zeros_like(each) for name, each in tensors_of(wanted, torch.bfloat16)[rank].items()}
    destination = Targets(wanted.shapes, targets, landings_of(wanted, rank))
    return PeerReceiver(destination, trainer, worker), targets, destination.names


def fetch(receiver: PeerReceiver, version: int, transfer: int) -> set[int | None]:
    """The versions that the trainer says it has with the first buckets and with the last."""
    num_buckets = receiver.open(opening(version, transfer))
    assert num_buckets > 4
    return {receiver.receive(bucket) for bucket in range(num_buckets)}


def fetch_rest(receiver: PeerReceiver) -> None:
    for bucket in range(1, len(receiver._buckets)):
        receiver.receive(bucket)


def assert_holds(targets: dict[str, Tensor], wanted: Layout, rank: int, scale: float) -> None:
    expected = tensors_of(wanted, torch.bfloat16, scale)[rank]
    assert all(torch.equal(targets[name], each) for name, each in expected.items())


@pytest.mark.slow
def test_an_engine_may_die_while_it_is_sent_weights(tmp_path: Path) -> None:
    spawn_ranks(5, play, tmp_path)
