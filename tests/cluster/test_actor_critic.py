"""A policy and its critic prepare the same groups side by side, one of them in a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any, cast

from rlflow.cluster.trainers import RayActorCritic
from rlflow.types import ReadyGroup

WAIT_S = 20


class Meeting:
    """The critic is amid the handles of a group when the policy adds its own."""

    def __init__(self) -> None:
        self.is_reading, self.is_written = threading.Event(), threading.Event()

    async def prepare(self, groups: Sequence[ReadyGroup], oldest_version: int | None) -> None:
        assert await asyncio.to_thread(self.is_reading.wait, WAIT_S)
        groups[0].frozen["proximal"] = ["p"]
        self.is_written.set()

    async def per_token(self, method: str, groups: Sequence[ReadyGroup]) -> list[list[object]]:
        def read() -> list[str]:
            names = []
            for name in groups[0].frozen:
                self.is_reading.set()
                assert self.is_written.wait(WAIT_S)
                names.append(name)
            return names

        assert await asyncio.to_thread(read) == ["reference"]
        return [["v"]]

    async def measure(self, groups: Sequence[ReadyGroup], oldest_version: int | None) -> None:
        assert groups[0].values == ["v"]


async def test_the_policy_may_add_handles_while_the_critic_reads_them() -> None:
    group = ReadyGroup(
        group_id=1,
        task_id="t",
        task_kind="k",
        episodes=[],
        payloads=[],
        advantages=[],
        num_bytes=0,
        frozen={"reference": ["r"]},
    )
    both = cast(Any, Meeting())
    await RayActorCritic(both, both).prepare([group], None)
    assert (group.frozen, group.values) == ({"reference": ["r"], "proximal": ["p"]}, ["v"])
