"""Profiles of all ranks and engines, begun and ended at the same time."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from rlflow.cluster.calls import answer
from rlflow.errors import WorkerError


async def profile(ranks: Mapping[str, Any], engines: Sequence[Any], is_on: bool) -> None:
    """Begin the profiles, or end them and write their files. An engine that is not there has none.

    `ranks`: name -> actor of each rank of trainer and critic.
    """
    calls = [answer(name, actor.profile.remote(is_on)) for name, actor in ranks.items()]
    calls += [_of_engine(f"rollout engine {index}", engine, is_on) for index, engine in enumerate(engines)]
    await asyncio.gather(*calls)


async def _of_engine(name: str, engine: Any, is_on: bool) -> None:
    with suppress(WorkerError):  # it was lost, and the fleet that watches it says so
        await answer(name, engine.profile.remote(is_on))
