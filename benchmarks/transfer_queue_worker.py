"""TransferQueue's side of `rlflow bench queue`: one round; the last line printed is one JSON object.

Runs in the virtual environment of requirements/transfer_queue.lock. Set-up: the default SimpleStorage back end with its
two storage units, and the asynchronous low-level client in the process of producers and consumer. The controller polls:
its blocking mode sleeps for five seconds whenever it finds too few rows. A row is a group; its payload is one uint8
column. `single` puts each group by itself, as groups end in a run; `batched` puts as many as the consumer takes.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

import argparse
import asyncio
import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path

import ray
import torch
import transfer_queue
from omegaconf import OmegaConf
from tensordict import TensorDict

PARTITION = "train"
POLL_S = 0.0005
ACTOR_SLOTS = 16
"""Logical processors: each of its actors asks Ray for one, and would wait forever on a small machine."""


class Round:
    """The groups of one round on their way from the producers to the consumer."""

    def __init__(self, client: transfer_queue.TransferQueueClient, options: argparse.Namespace) -> None:
        self._client = client
        self._options = options
        self._places = asyncio.Semaphore(options.max_waiting)

    async def run(self, num_groups: int, put_size: int) -> float:
        """Groups a second."""
        starts = iter(range(0, num_groups, put_size))
        started = time.perf_counter()
        producers = [self._produce(starts, put_size) for _ in range(self._options.producers)]
        await asyncio.gather(self._consume(num_groups), *producers)
        return num_groups / (time.perf_counter() - started)

    async def _produce(self, starts: Iterator[int], put_size: int) -> None:
        for start in starts:
            for _ in range(put_size):
                await self._places.acquire()
            numbers = torch.arange(start, start + put_size).remainder(256).to(torch.uint8)
            payload = numbers[:, None].repeat(1, self._options.payload_bytes)
            await self._client.async_put(
                data=TensorDict({"payload": payload}, batch_size=put_size), partition_id=PARTITION
            )

    async def _consume(self, num_groups: int) -> None:
        left = num_groups
        while left:
            meta = await self._client.async_get_meta(
                data_fields=["payload"],
                batch_size=self._options.groups_per_take,
                partition_id=PARTITION,
                task_name="train",
            )
            if not len(meta):
                await asyncio.sleep(POLL_S)
                continue
            data = await self._client.async_get_data(meta)
            assert all(len(row) == self._options.payload_bytes and row[0] == row[-1] for row in data["payload"])
            await self._client.async_clear_samples(meta)
            for _ in range(len(meta)):
                self._places.release()
            left -= len(meta)


async def measure(options: argparse.Namespace) -> dict[str, float]:
    one_round = Round(transfer_queue.get_client(), options)
    await one_round.run(options.warm_up, 1)
    return {
        "single": await one_round.run(options.groups, 1),
        "batched": await one_round.run(options.groups, options.groups_per_take),
    }


def package_lines() -> int:
    """Lines of the package that are not empty."""
    files = Path(str(transfer_queue.__file__)).parent.rglob("*.py")
    return sum(1 for file in files for line in file.read_text().splitlines() if line.strip())


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("groups", "warm-up", "payload-bytes", "max-waiting", "producers", "groups-per-take"):
        parser.add_argument(f"--{name}", type=int, required=True)
    options = parser.parse_args()
    ray.init(
        address="local",
        num_cpus=ACTOR_SLOTS,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _node_ip_address="127.0.0.1",
    )
    transfer_queue.init(OmegaConf.create({"controller": {"polling_mode": True}}))
    found = asyncio.run(measure(options))
    transfer_queue.close()
    ray.shutdown()
    print(json.dumps({**found, "lines": package_lines()}))


if __name__ == "__main__":
    main()
