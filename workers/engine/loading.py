"""How an engine is given a version of the weights: what happens while it samples, and what while it is paused.

StagedWeights -> prepare (sampling) -> load (paused) -> compare;  the caller pauses and resumes the engine

Each step is a call to all vLLM workers of the engine, which `rlflow.weights.extension` answers.
"""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlflow.config import Config, Transport, Verify
from rlflow.errors import WeightsOvertaken
from rlflow.roles import StagedWeights
from rlflow.runtime.derived import adapter_scale, sends_adapters, transport_of
from rlflow.weights.disk.manifest import version_folder
from rlflow.weights.engine.messages import (
    COMPARISON,
    NUM_VERIFIED,
    OPENING,
    VERIFIED_COLUMNS,
    Columns,
    Comparison,
    Opening,
    WeightReport,
    merged_reports,
)
from rlflow.weights.shm.arena import staged_version

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


class Loading:
    """One version on its way into the workers of one engine."""

    def __init__(self, engine: AsyncLLM, config: Config, index: int, staged: StagedWeights) -> None:
        """`index` is the engine's among all."""
        self._engine = engine
        self._config = config
        self._index = index
        self._staged = replace(staged, spans=())
        self._transport = transport_of(config)
        self._is_beside = False
        self._num_buckets = 0

    async def prepare(self) -> None:
        """Do what can be done while the engine samples under another version."""
        lora, adapter = self._config.lora, None
        if sends_adapters(self._config):
            assert lora.rank is not None, "the settings of a model with adapters"
            adapter = lora.rank, lora.rank * adapter_scale(lora)
        opening = Opening(
            staged=self._staged,
            transport=self._transport,
            engine=self._index,
            # 53 bits, so that nothing else that stamps messages is taken for this transfer.
            transfer=uuid.uuid4().int >> 75,
            timeout_s=self._config.deadlines.weights_s,
            adapter=adapter,
        )
        message = OPENING.dump_python(opening, mode="json")
        found = await self._call("rlflow_open", **message)
        assert len({is_beside for is_beside, _ in found}) == 1, "all workers of an engine have the same model"
        self._is_beside, self._num_buckets = found[0]
        if self._is_beside:
            # One by one, so that the engine samples between them.
            found = [await self._call("rlflow_receive", bucket=bucket) for bucket in range(self._num_buckets)]
            self._check_found(chain.from_iterable(found))

    async def load(self) -> None:
        """Let the workers of a paused engine compute with the version. If it fails, they may hold a half of it."""
        if self._is_beside:
            await self._call("rlflow_commit")
        else:
            self._check_found(await self._call("rlflow_load", num_buckets=self._num_buckets))

    @property
    def is_comparable(self) -> bool:
        """Whether there is something left to compare with: what has come into the model's own tensors is not kept."""
        return self._is_beside or bool(self._staged.slots)

    async def compare(self, verify: Verify) -> WeightReport:
        """Compare what the workers compute with to what was staged, bit for bit.

        If nothing of that can be seen from here any more, compare to what has come, which carried checksums.
        """
        slots, columns = self._staged.slots, None
        if verify is not Verify.full:
            slots = tuple(random.Random(self._staged.version).sample(slots, min(NUM_VERIFIED, len(slots))))
            columns = Columns(count=VERIFIED_COLUMNS, seed=self._staged.version)
        comparison = Comparison(staged=replace(self._staged, slots=slots, buckets=()), columns=columns)
        message = COMPARISON.dump_python(comparison, mode="json")
        return merged_reports(await self._call("rlflow_compare", **message))

    async def give_up(self) -> bool:
        """After a failure, let a complete version be loaded next; whether the trainer has replaced this one."""
        await self._call("rlflow_abort")
        path, version = self._staged.path, self._staged.version
        if self._staged.slots:
            return await asyncio.to_thread(staged_version, path) != version
        if self._transport is Transport.disk:
            return not await asyncio.to_thread(version_folder(Path(path), version).exists)
        return False

    async def _call(self, method: str, **arguments: Any) -> list[Any]:
        return await self._engine.collective_rpc(method, kwargs=arguments)

    def _check_found(self, found: Iterable[int | None]) -> None:
        if any(version is not None for version in found):
            raise WeightsOvertaken(f"the trainer no longer has version {self._staged.version}")
