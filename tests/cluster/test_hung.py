"""What becomes of actors that do not answer, with stand-ins for the actors."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from rlflow.cluster import start
from rlflow.cluster.engines import RayEngine
from rlflow.cluster.runners import RayRunners
from rlflow.config import DeadlinesConfig
from rlflow.errors import EngineLost, WorkerHung, WorkerLost
from rlflow.roles import StagedWeights

STAGED = StagedWeights(version=1, path="", num_bytes=0, slots=(), buckets=())


class Hung:
    """A method of an actor that never answers."""

    def remote(self, *arguments: object) -> asyncio.Future[None]:
        return asyncio.get_running_loop().create_future()


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The actors that were killed so that Ray restarts them."""
    found: list[object] = []

    def kill(actor: object, *, no_restart: bool) -> None:
        assert not no_restart
        found.append(actor)

    monkeypatch.setattr("ray.kill", kill)
    monkeypatch.setattr("ray.cancel", lambda call: call.cancel())
    return found


async def test_an_engine_that_hangs_is_killed_and_lost_like_one_that_died(killed: list[object]) -> None:
    actor = SimpleNamespace(load_weights=Hung(), sleep=Hung(), start=Hung())
    engine = RayEngine(actor, 3, DeadlinesConfig(start_s=0.01, weights_s=0.01))
    for call, stage in (
        (engine.load_weights(STAGED), "a weight update"),
        (engine.sleep(), "the sleep"),
        (engine.start(), "the start"),
    ):
        with pytest.raises(EngineLost, match=f"^{stage} of rollout engine 3 did not finish within its deadline"):
            await call
    assert killed == [actor] * 3


async def test_a_runner_that_hangs_is_killed_when_it_is_told_what_is_stale(
    killed: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlflow.cluster.runners.TELL_S", 0.01)
    actor = SimpleNamespace(cancel_stale=Hung())
    await RayRunners([actor], on_one_machine=True, patience_s=1.0).cancel_stale(3)
    assert killed == [actor]


@pytest.mark.parametrize("is_lost", [False, True])
async def test_a_fault_of_the_driver_is_not_taken_for_a_loss(is_lost: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when a rank ends at the same moment: the run would go on, and nobody would read the fault."""

    async def until_ended(who: str, actor: object) -> None:
        if not is_lost:
            await asyncio.Event().wait()
        raise WorkerLost(f"the {who} died")

    async def work() -> None:
        raise KeyError("a bug")

    async def end() -> None:
        pass

    monkeypatch.setattr(start, "wait_until_ended", until_ended)
    fleet: Any = SimpleNamespace(is_joined=True, has_ended=False, end=end, vital={"trainer rank 0": None})
    async with asyncio.timeout(30):
        with pytest.raises(KeyError, match="a bug"):
            await start.run_unless_lost(fleet, work())


async def test_the_deadline_is_told_and_not_the_end_of_the_processes_that_it_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    killed = asyncio.Event()

    async def until_ended(who: str, actor: object) -> None:
        await killed.wait()
        raise WorkerLost(f"the {who} died")

    async def end() -> None:
        fleet.has_ended = True
        killed.set()

    async def work() -> None:
        await end()
        for _ in range(10):
            await asyncio.sleep(0)
        raise WorkerHung("accumulating gradients", 10.0)

    monkeypatch.setattr(start, "wait_until_ended", until_ended)
    fleet: Any = SimpleNamespace(is_joined=False, has_ended=False, end=end, vital={"trainer rank 0": None})
    async with asyncio.timeout(30):
        with pytest.raises(WorkerHung, match="^accumulating gradients"):
            await start.run_unless_lost(fleet, work())
