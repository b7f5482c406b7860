"""Groups a second through ledger and ready queue, beside TransferQueue's: `rlflow bench queue`.

One round moves `NUM_GROUPS` groups of one payload each from producers to a consumer in one process, at most
`MAX_WAITING` of them at a time, and the consumer opens every payload.

    ours    object store <- put; ledger on disk: admitted -> running -> scored -> ready -> training -> trained; get
    theirs  put (data, then the controller is told); get_meta; get_data; clear_samples

The rounds alternate, so that neither side gets the quieter half of the time. TransferQueue (AsyncFlow, 2507.01663)
lives in a virtual environment of its own, made on first use; `benchmarks/transfer_queue_worker.py` says how it is set
up.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
from other_systems import figures_of, other_python, worker_script

from rlflow.cluster.start import ray_cluster
from rlflow.config import Config, Order
from rlflow.groups.ledger import GroupState, Ledger
from rlflow.groups.ready import ReadyQueue
from rlflow.types import EpisodeEnd, EpisodeSummary, ReadyGroup

NUM_GROUPS = 2000
WARM_UP_GROUPS = 200
"""Before the clock starts: first connections, first pages."""
PAYLOAD_BYTES = 64 * 1024
MAX_WAITING = 64
PRODUCERS = 8
GROUPS_PER_TAKE = 8
ROUNDS = 3
ROUND_TIMEOUT_S = 600.0

_LIBRARY = Path(__file__).resolve().parent.parent / "rlflow"
_OUR_FILES = ("groups/ledger.py", "groups/ready.py")


class _Round:
    """The groups of one round on their way through ledger, object store and ready queue."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._ready = ReadyQueue(order=Order.oldest_first, max_versions=0, groups_per_step=GROUPS_PER_TAKE)
        self._changed = asyncio.Event()
        self._places = asyncio.Semaphore(MAX_WAITING)

    async def run(self, num_groups: int) -> float:
        """Seconds from the first admission to the last update."""
        numbers = iter(range(num_groups))
        started = time.perf_counter()
        await asyncio.gather(self._consume(num_groups), *(self._produce(numbers) for _ in range(PRODUCERS)))
        return time.perf_counter() - started

    async def _produce(self, numbers: Iterator[int]) -> None:
        for number in numbers:
            await self._places.acquire()
            group_id = self._ledger.admit(f"t{number}", task_pass=0, version=0)
            self._ready.expect(group_id, 0, was_late=False)
            self._ledger.advance(group_id, GroupState.RUNNING)
            payload = ray.put(np.full(PAYLOAD_BYTES, number % 256, dtype=np.uint8))
            self._ledger.advance(group_id, GroupState.SCORED)
            group = _group(group_id, number, payload)
            self._ledger.advance(group_id, GroupState.READY)
            self._ready.put(group)
            self._changed.set()
            await asyncio.sleep(0)  # another producer's turn: the real ones wait for workers here

    async def _consume(self, num_groups: int) -> None:
        left = num_groups
        while left:
            taken = self._ready.take(version=0, places=GROUPS_PER_TAKE)
            if not taken:
                self._changed.clear()
                await asyncio.wait_for(self._changed.wait(), ROUND_TIMEOUT_S)
                continue
            for group in taken:
                self._ledger.advance(group.group_id, GroupState.TRAINING)
            payloads = ray.get([group.payloads[0] for group in taken])  # type: ignore[assignment]
            for group, payload in zip(taken, payloads, strict=True):
                assert len(payload) == PAYLOAD_BYTES and payload[-1] == int(group.task_id[1:]) % 256
                self._ledger.advance(group.group_id, GroupState.TRAINED, version=0)
                self._places.release()
            left -= len(taken)


def queue() -> dict[str, Any]:
    """Medians of the rounds, in groups a second, and the lines of code of each side.

    Raises RunError when TransferQueue cannot be installed or fails.
    """
    worker = worker_script("transfer_queue_worker.py")
    python = other_python("transfer-queue-venv", "transfer_queue.lock")
    found: dict[str, list[float]] = {"rlflow": [], "transfer_queue": [], "transfer_queue_batched": []}
    lines = 0
    for number in range(ROUNDS):
        print(f"round {number + 1} of {ROUNDS}", file=sys.stderr, flush=True)
        found["rlflow"].append(our_round())
        theirs = _their_round(python, worker)
        found["transfer_queue"].append(theirs["single"])
        found["transfer_queue_batched"].append(theirs["batched"])
        lines = theirs["lines"]
    return summarize(found, lines)


def summarize(found: dict[str, list[float]], their_lines: int) -> dict[str, Any]:
    """Flat figures; the ratio is to the better of TransferQueue's two ways."""
    medians = {f"{name}_groups_per_s": statistics.median(rounds) for name, rounds in found.items()}
    ours = medians["rlflow_groups_per_s"]
    best = max(value for name, value in medians.items() if name != "rlflow_groups_per_s")
    return {
        **medians,
        "speed_up": ours / best,
        "rlflow_lines": _our_lines(),
        "transfer_queue_lines": their_lines,
        "payload_bytes": PAYLOAD_BYTES,
        "groups": NUM_GROUPS,
        "rounds": len(found["rlflow"]),
    }


def our_round(num_groups: int = NUM_GROUPS) -> float:
    """Groups a second of one round on our side, with a Ray of its own."""
    with ray_cluster(Config()), tempfile.TemporaryDirectory(prefix="rlflow-bench-") as folder:
        ledger = Ledger(Path(folder) / "ledger.db")
        try:
            return asyncio.run(_our_rate(ledger, num_groups))
        finally:
            ledger.close()


async def _our_rate(ledger: Ledger, num_groups: int) -> float:
    await _Round(ledger).run(WARM_UP_GROUPS)
    seconds = await _Round(ledger).run(num_groups)
    assert ledger.num_trained == ledger.counts()["admitted_total"] == WARM_UP_GROUPS + num_groups
    return num_groups / seconds


def _group(group_id: int, number: int, payload: object) -> ReadyGroup:
    episodes = [
        EpisodeSummary(
            end=EpisodeEnd.COMPLETED,
            reward=reward,
            num_prompt_tokens=0,
            num_completion_tokens=PAYLOAD_BYTES,
            num_loss_tokens=PAYLOAD_BYTES,
            oldest_version=0,
            newest_version=0,
        )
        for reward in (0.0, 1.0)
    ]
    return ReadyGroup(
        group_id=group_id,
        task_id=f"t{number}",
        task_kind="",
        episodes=episodes,
        payloads=[payload],
        advantages=[[-0.7], [0.7]],
        num_bytes=PAYLOAD_BYTES,
    )


def _their_round(python: Path, worker: Path) -> dict[str, Any]:
    settings: dict[str, int] = {
        "--groups": NUM_GROUPS,
        "--warm-up": WARM_UP_GROUPS,
        "--payload-bytes": PAYLOAD_BYTES,
        "--max-waiting": MAX_WAITING,
        "--producers": PRODUCERS,
        "--groups-per-take": GROUPS_PER_TAKE,
    }
    words = [str(word) for pair in settings.items() for word in pair]
    return figures_of("TransferQueue's side", [str(python), str(worker), *words], ROUND_TIMEOUT_S)


def _our_lines() -> int:
    return count_lines([_LIBRARY / name for name in _OUR_FILES if (_LIBRARY / name).is_file()])


def count_lines(files: Sequence[Path]) -> int:
    """Lines that are not empty."""
    return sum(1 for file in files for line in file.read_text().splitlines() if line.strip())
