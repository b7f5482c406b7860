"""What an update costs in calls to the workers, and that a group which one side gives up ends for the other."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from layouts import engine_layout_by_hand
from rank_tensors import Targets, landings_of, tensors_of
from test_ipc import MODEL as SMALL
from test_ipc import Alone

from rlflow.config import Config, Transport
from rlflow.errors import WeightsOvertaken
from rlflow.roles import StagedWeights
from rlflow.weights.p2p.receiver import PeerReceiver, Worker
from rlflow.weights.p2p.rendezvous import HostedStore, PeerGroup, TrainerStore
from rlflow.weights.p2p.sender import PeerSender
from rlflow.workers.engine.loading import Loading

pytest.importorskip("vllm")
CPU = torch.device("cpu")


class InPlace(Targets):
    """As on a GPU: what comes is at once what is computed with."""

    def commit(self) -> None:
        self.commits = getattr(self, "commits", 0) + 1


class Engine:
    """One worker that answers what rlflow adds to vLLM's, and notes the calls."""

    def __init__(self, receiver: PeerReceiver) -> None:
        from vllm.config import VllmConfig

        from rlflow.weights.extension import WorkerExtension

        self.calls: list[str] = []
        self._worker: Any = WorkerExtension()
        self._worker.vllm_config, self._worker.weight_transfer_engine = VllmConfig(), receiver

    async def collective_rpc(self, method: str, kwargs: dict[str, Any] | None = None) -> list[Any]:
        self.calls.append(method)
        # The engine's worker is in a process of its own, and the trainer's thread answers meanwhile.
        return [await asyncio.to_thread(getattr(self._worker, method), **(kwargs or {}))]


@contextmanager
def sent_in(bucket_bytes: int, *, is_beside: bool) -> Iterator[tuple[Engine, InPlace, PeerReceiver, StagedWeights]]:
    backend: Any = Alone()
    sender = PeerSender(backend, 0, 1, "", timeout_s=60, bucket_bytes=bucket_bytes)
    try:
        staged = sender.stage(1)
        assert staged is not None
        wanted = engine_layout_by_hand(SMALL, 1)
        targets = {name: torch.zeros_like(each) for name, each in tensors_of(wanted, torch.bfloat16)[0].items()}
        destination = InPlace(wanted.shapes, targets, landings_of(wanted, 0), is_beside=is_beside)
        worker = Worker(engine=0, rank=0, num_ranks=1, device=CPU)
        receiver = PeerReceiver(destination, TrainerStore(staged.path, 60.0), worker)
        yield Engine(receiver), destination, receiver, staged
        receiver.shutdown()
    finally:
        sender.close()


def config() -> Config:
    made = Config()
    made.weights.transport, made.deadlines.weights_s = Transport.p2p, 60.0
    return made


@pytest.mark.parametrize("bucket_bytes", [1 << 20, 600, 64])
def test_a_paused_engine_takes_any_number_of_buckets_in_one_call(bucket_bytes: int) -> None:
    with sent_in(bucket_bytes, is_beside=False) as (engine, destination, receiver, staged):
        loading = Loading(engine, config(), 0, staged)  # pyright: ignore[reportArgumentType]

        async def update() -> list[str]:
            await loading.prepare()
            before = len(engine.calls)
            await loading.load()
            return engine.calls[before:]

        assert asyncio.run(update()) == ["rlflow_load"]
        assert engine.calls == ["rlflow_open", "rlflow_load"]
        assert not loading.is_comparable
        assert {1 << 20: 1, 600: 5, 64: 41}[bucket_bytes] == len(receiver._buckets)
        assert destination.commits == 1
        for name, each in tensors_of(engine_layout_by_hand(SMALL, 1), torch.bfloat16)[0].items():
            assert torch.equal(destination.targets[name], each), name


def test_a_paused_engine_commits_nothing_of_a_version_that_is_gone() -> None:
    with sent_in(600, is_beside=False) as (engine, destination, _, staged):
        gone = StagedWeights(version=7, path=staged.path, num_bytes=0, slots=(), buckets=())
        loading = Loading(engine, config(), 0, gone)  # pyright: ignore[reportArgumentType]
        asyncio.run(loading.prepare())
        with pytest.raises(WeightsOvertaken):
            asyncio.run(loading.load())
        assert not hasattr(destination, "commits")


def test_an_engine_that_samples_meanwhile_is_called_for_each_bucket() -> None:
    with sent_in(600, is_beside=True) as (engine, destination, receiver, staged):
        loading = Loading(engine, config(), 0, staged)  # pyright: ignore[reportArgumentType]

        async def update() -> None:
            await loading.prepare()
            await loading.load()

        asyncio.run(update())
        assert engine.calls == ["rlflow_open", *["rlflow_receive"] * len(receiver._buckets), "rlflow_commit"]
        assert loading.is_comparable
        assert destination.commits == 1


def test_a_group_that_one_side_gives_up_ends_for_the_other() -> None:
    """A receive that is posted ends then, and not at its deadline, which is an hour away."""
    backend: Any = Alone()
    hosted = HostedStore(backend, 0, "", 3600.0)
    staged = hosted.staged(0)
    assert staged is not None
    trainer, found = TrainerStore(staged.path, 3600.0), {}

    def join(rank: int, home: Any) -> None:
        found[rank] = PeerGroup(home, "1/2", rank, 2, CPU)

    joining = [threading.Thread(target=join, args=each) for each in ((0, hosted), (1, trainer))]
    for thread in joining:
        thread.start()
    for thread in joining:
        thread.join(60)
    received, errors = torch.zeros(8, dtype=torch.uint8), []
    (work,) = found[1].receive([(received, 0)])

    def wait() -> None:
        try:
            work.wait()
        except RuntimeError as error:
            errors.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    found[0].give_up()
    waiting.join(60)
    assert not waiting.is_alive()
    assert len(errors) == 1
    # The other side has been told, and begins nothing more.
    for thread in threading.enumerate():
        if thread.name == "group 1/2":
            thread.join(60)
    assert found[1].is_broken
    with pytest.raises(RuntimeError, match="given up"):
        found[1].send([(received, 0)])
