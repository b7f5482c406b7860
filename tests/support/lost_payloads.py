"""The driver's side of `test_nodes.py::test_what_a_lost_machine_had_stored_is_known_to_be_lost`, as a program.

Prints a line when it wants something to happen to the machines, and reads one when it has.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import numpy as np
import ray

from rlflow.cluster.ray import join_ray
from rlflow.cluster.runners import RayRunners
from rlflow.errors import WorkerLost
from rlflow.types import GroupOrder, PlayedGroup, Task


class Runner:
    """Plays a group of two episodes: what one holds is too large for the driver's own memory, and the other's small.

    There are no images.
    """

    async def play(self, order: GroupOrder) -> tuple[PlayedGroup, Any, Any, None]:
        played = PlayedGroup(group_id=order.group_id, episodes=[], payloads=[], num_bytes=0)
        if order.seed:
            await asyncio.Event().wait()
        return played, np.ones(10**6), np.ones(10), None


def order(seed: int = 0) -> GroupOrder:
    return GroupOrder(group_id=1, task=Task(id="t", prompt=()), num_episodes=2, seed=seed)


async def main(address: str) -> None:
    join_ray(address, log_to_driver=False, logging_level="error")
    options = {"num_cpus": 0.1, "max_restarts": -1, "max_concurrency": 10}
    actor = ray.remote(Runner).options(**options, label_selector={"rlflow-pool": "rollout"}).remote()
    runners = RayRunners([actor], on_one_machine=False, patience_s=120)
    large, small = (await runners.play(order())).payloads
    found: dict[str, object] = {"before": runners.is_lost([large, small])}
    under_way = asyncio.create_task(runners.play(order(seed=1)))
    print("kill", flush=True)
    sys.stdin.readline()
    try:
        await under_way
    except WorkerLost as error:
        found["error"] = str(error)
    again = asyncio.create_task(runners.play(order()))
    async with asyncio.timeout(60):
        while not runners.is_lost([large]):
            await asyncio.sleep(0.1)
    found |= {"small": runners.is_lost([small]), "together": runners.is_lost([small, large])}
    found["waits"] = not again.done()
    print("add", flush=True)
    sys.stdin.readline()
    found["again"] = runners.is_lost((await again).payloads)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
