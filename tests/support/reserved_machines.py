"""The driver of a run that only reserves machines, loses one, and waits for another: `reserved_machines.py ADDRESS`."""

from __future__ import annotations

import asyncio
import json
import sys

from rlflow.cluster.devices import Devices, wait_for_room
from rlflow.cluster.start import ray_cluster
from rlflow.config import Config, ProcessKind, Transport


def main(address: str) -> None:
    config = Config()
    config.cluster.address, config.weights.transport = address, Transport.p2p
    config.rollout.engines, config.trainer.ranks = 2, 3
    with ray_cluster(config):
        asyncio.run(_reserve(config))


async def _reserve(config: Config) -> None:
    found = []
    devices = Devices(config)
    await devices.reserve()
    found.append(_machines(devices))
    print("kill", *found[0][ProcessKind.engine], flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    devices.release()
    waiting = asyncio.create_task(wait_for_room(config))
    # It looks at all machines that Ray believes in before it waits for one that it has not seen.
    done, _ = await asyncio.wait((waiting,), timeout=10)
    print("now", len(done), flush=True)
    await waiting
    devices = Devices(config, is_restart=True)
    await devices.reserve()
    found.append(_machines(devices))
    print(json.dumps(found), flush=True)


def _machines(devices: Devices) -> dict[str, list[str]]:
    return {kind.value: sorted(machines) for kind, machines in devices.machines().items()}


main(sys.argv[1])
