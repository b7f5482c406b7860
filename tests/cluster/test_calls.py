"""Ray's errors end at rlflow.cluster.calls: what the driver sees is a WorkerError, or the cause itself."""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import ray
from ray import cloudpickle
from ray.exceptions import ObjectLostError, OutOfMemoryError, RayError, RayTaskError, TaskCancelledError

from rlflow.cluster.calls import DISK, WATCH, answer, has_ended, open_calls, wait_until_ended
from rlflow.cluster.pulse import watched
from rlflow.cluster.start import ray_cluster
from rlflow.cluster.trainers import RayTrainer
from rlflow.config import Config, TrainerConfig
from rlflow.errors import ConfigError, DeadlineError, PayloadLost, RunError, WorkerError, WorkerLost
from rlflow.roles import StepOutcome
from rlflow.rundir.killed import KilledLog

pytestmark = pytest.mark.slow


class Faulty:
    def config(self) -> None:
        raise ConfigError("model.path is wrong")

    def deadline(self) -> None:
        raise DeadlineError("loading", 3.0, "wait longer")

    def bug(self) -> None:
        raise KeyError("lost")

    def die(self) -> None:
        os._exit(1)

    def hang(self) -> None:
        ctypes.PyDLL(None).sleep(1000)  # which keeps Python's lock

    async def wait(self) -> None:
        await asyncio.Event().wait()


class Rank:
    """A rank of a trainer whose write ends only after its next step."""

    def __init__(self) -> None:
        self._stepped = threading.Event()

    def snapshot(self) -> None:
        self._stepped.clear()

    def step(self, is_last: bool) -> StepOutcome:
        self._stepped.set()
        return StepOutcome(applied=True, grad_norm=1.0, learning_rate=0.1, metrics={})

    def write_snapshot(self, folder: Path) -> dict[str, str]:
        if not self._stepped.wait(timeout=60):
            raise TimeoutError("the step waited for the write")
        if folder.name == "full":
            raise RunError("no disk space left")
        return {f"rank of process {os.getpid()}": "e3b0"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    # The workers cannot import this file, so the class travels whole.
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with ray_cluster(Config()):
        yield


async def test_open_calls_are_told_by_kind() -> None:
    waiting = [asyncio.get_running_loop().create_future() for _ in range(2)]
    calls = [asyncio.create_task(answer("clerk", future, "file")) for future in waiting]
    await asyncio.sleep(0)
    assert open_calls() == ["clerk, file: 2 calls open, the oldest for 0 s"]
    for future in waiting:
        future.set_result(7)
    assert await asyncio.gather(*calls) == [7, 7]
    assert open_calls() == []


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ObjectLostError("00", b"", ""), "^what the clerk answered was stored on a machine that is lost$"),
        (
            RayTaskError("file", "", ObjectLostError("00", b"", "")),
            "^what the clerk was to read was stored on a machine that is lost$",
        ),
    ],
)
async def test_what_is_lost_with_a_machine_is_no_lost_worker(error: RayError, message: str) -> None:
    reference = asyncio.get_running_loop().create_future()
    reference.set_exception(error)
    with pytest.raises(PayloadLost, match=message) as raised:
        await answer("clerk", reference)
    assert not isinstance(raised.value, WorkerLost)


@pytest.mark.parametrize(
    ("method", "kind", "message"),
    [
        ("config", ConfigError, r"^model\.path is wrong$"),
        ("deadline", DeadlineError, r"^loading did not finish within its deadline of 3 s; wait longer$"),
        ("bug", WorkerError, r"^the clerk failed: KeyError: 'lost'$"),
        ("die", WorkerLost, r"^the clerk died: "),
    ],
)
async def test_what_a_worker_raises(cluster: None, method: str, kind: type[Exception], message: str) -> None:
    actor = ray.remote(Faulty).options(num_cpus=0).remote()
    with pytest.raises(kind, match=message):
        await answer("clerk", getattr(actor, method).remote())


class Killed:
    """An actor that Ray has killed because its machine ran out of memory: every call to it ends so."""

    @property
    def __ray_call__(self) -> Any:
        return self

    def options(self, **_: object) -> Any:
        return self

    async def remote(self, *_: object) -> None:
        raise OutOfMemoryError("4 worker(s) were killed due to the node running low on memory.\nDetails: ...")


async def test_a_process_that_ray_kills_for_its_memory_is_lost() -> None:
    message = r"^Ray killed the clerk, because its machine ran out of memory: 4 worker\(s\) .* low on memory\.; give"
    with pytest.raises(WorkerLost, match=message) as caught:
        await answer("clerk", Killed().remote())
    assert has_ended(caught.value)
    with pytest.raises(WorkerLost, match=message):
        await wait_until_ended("clerk", Killed())


async def test_the_end_of_a_process_is_noticed_while_nobody_asks_it_for_anything(cluster: None) -> None:
    actor = cast(Any, ray.remote)(concurrency_groups={WATCH: 1})(Faulty).options(num_cpus=0).remote()
    watching = asyncio.create_task(wait_until_ended("clerk", actor))
    with pytest.raises(WorkerError, match=r"^the clerk failed: KeyError: 'lost'$"):
        await answer("clerk", actor.bug.remote())
    assert not watching.done()
    ray.kill(actor)
    with pytest.raises(WorkerLost, match="^the clerk died: "):
        await asyncio.wait_for(watching, timeout=60)


async def test_an_actor_that_waits_with_the_lock_of_python_is_lost(cluster: None, tmp_path: Path) -> None:
    """Also when Ray's own threads go on working."""
    config = Config()
    config.run.dir, config.deadlines.heartbeat_s = str(tmp_path), 2.0
    killed = KilledLog(tmp_path)
    actor = watched(Faulty, config).options(num_cpus=0).remote("clerk 3")
    with pytest.raises(WorkerLost, match="^the clerk died: "):
        await asyncio.wait_for(answer("clerk", actor.hang.remote()), timeout=120)
    (line,) = killed.news()
    assert "clerk 3 (process " in line


async def test_a_cancelled_wait_cancels_the_call(cluster: None) -> None:
    actor: Any = ray.remote(Faulty).options(num_cpus=0, max_concurrency=2).remote()
    reference = actor.wait.remote()
    waiting = asyncio.create_task(answer("clerk", reference))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    with pytest.raises(TaskCancelledError):
        await asyncio.wait_for(asyncio.ensure_future(reference), timeout=60)


async def test_a_trainer_steps_while_it_writes(cluster: None) -> None:
    actors = [cast(Any, ray.remote)(concurrency_groups={DISK: 1})(Rank).options(num_cpus=0).remote() for _ in range(2)]
    trainer = RayTrainer(actors, TrainerConfig(ranks=2))
    for name, outcome in (("saved", None), ("full", RunError)):
        await trainer.snapshot()
        writing = asyncio.create_task(trainer.write_snapshot(Path(name)))
        await asyncio.sleep(0)
        assert (await trainer.step(is_last=True)).applied
        await asyncio.wait([writing])
        if outcome is None:
            assert list(writing.result().values()) == ["e3b0", "e3b0"]
        else:
            assert isinstance(writing.exception(), outcome)
