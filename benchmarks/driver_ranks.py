"""What handing one step to the ranks of a trainer costs the driver: processor time and the lag of its loop.

    python benchmarks/driver_ranks.py --ranks 32,128,512

Ray and `RayTrainer` are real. A few actors that compute nothing stand for all ranks, because the driver's work for a
call does not depend on who takes it. Payloads are small objects of the object store, as many as the step has episodes.
"""

import argparse
import asyncio
import json
import random
import time
from typing import Any

import numpy as np
import ray

from rlflow.cluster.start import ray_cluster
from rlflow.cluster.trainers import RayTrainer
from rlflow.config import Config
from rlflow.runtime.clock import now
from rlflow.types import EpisodeEnd, EpisodeSummary, ReadyGroup, Span

TICK_S = 0.005
"""How often the loop is asked whether it is there."""


class StandIn:
    """Takes the calls of a rank, and unpacks what it is sent."""

    def accumulate(self, *_: object) -> Span:
        return Span(actor="stand-in", name="train", start_s=now(), end_s=now())


def a_group(number: int, episodes: int, draw: random.Random) -> ReadyGroup:
    """Lengths are log-normal, as those of `rlflow simulate`."""
    lengths = [min(27648, max(1, round(2000 * draw.lognormvariate(0.0, 1.0)))) for _ in range(episodes)]
    return ReadyGroup(
        group_id=number,
        task_id=f"t{number}",
        task_kind="",
        episodes=[
            EpisodeSummary(
                end=EpisodeEnd.COMPLETED,
                reward=0.0,
                num_prompt_tokens=200,
                num_completion_tokens=length,
                num_loss_tokens=length,
                oldest_version=0,
                newest_version=0,
            )
            for length in lengths
        ],
        payloads=[ray.put(np.zeros(1, np.float32)) for _ in lengths],
        advantages=[[1.0 - 2.0 * (index % 2)] for index in range(episodes)],
        num_bytes=13 * sum(lengths),
    )


async def lags(found: list[float]) -> None:
    while True:
        asked_s = time.perf_counter()
        await asyncio.sleep(TICK_S)
        found.append(time.perf_counter() - asked_s - TICK_S)


async def measure(actors: list[Any], ranks: int, groups: list[ReadyGroup], calls: int) -> dict[str, float]:
    config = Config()
    config.trainer.ranks, config.trainer.micro_batch_tokens = ranks, 16384
    trainer = RayTrainer([actors[rank % len(actors)] for rank in range(ranks)], config.trainer)
    found: list[float] = []
    watching = asyncio.create_task(lags(found))
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    for part in range(calls):
        await trainer.accumulate(groups[part::calls], None)
    cpu_s, wall_s = time.process_time() - began_cpu_s, time.perf_counter() - began_s
    watching.cancel()
    return {
        "ranks": ranks,
        "driver_cpu_s": round(cpu_s, 3),
        "ms_per_group": round(1000 * cpu_s / len(groups), 3),
        "us_per_rank_and_episode": round(1e6 * cpu_s / ranks / sum(len(group.episodes) for group in groups), 3),
        "lag_p99_ms": round(1000 * float(np.quantile(found, 0.99)), 1),
        "lag_max_ms": round(1000 * max(found), 1),
        "wall_s": round(wall_s, 2),
    }


async def main(options: argparse.Namespace) -> None:
    draw = random.Random(0)
    groups = [a_group(number, options.group_size, draw) for number in range(options.groups)]
    actors: list[Any] = [ray.remote(StandIn).options(num_cpus=0).remote() for _ in range(options.actors)]
    ray.get([actor.__ray_ready__.remote() for actor in actors])
    for ranks in map(int, options.ranks.split(",")):
        print(json.dumps(await measure(actors, ranks, groups, options.calls)), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="32,128,512", help="one measurement each (%(default)s)")
    parser.add_argument("--groups", type=int, default=512, help="of a step (%(default)s)")
    parser.add_argument("--group-size", type=int, default=16, help="episodes of a group (%(default)s)")
    parser.add_argument("--calls", type=int, default=4, help="in which the groups of the step come (%(default)s)")
    parser.add_argument("--actors", type=int, default=4, help="that stand for the ranks (%(default)s)")
    with ray_cluster(Config()):
        asyncio.run(main(parser.parse_args()))
