"""How an engine is given a version of the weights: what happens while it samples, and what while it is paused.

prepare (sampling) -> load (paused) -> compare;  whoever calls it pauses and resumes the engine
"""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlflow.config import Config, LoraConfig, Transport, Verify
from rlflow.errors import ConfigError, WeightsOvertaken
from rlflow.roles import StagedWeights, TensorSlot
from rlflow.runtime.derived import sends_adapters, transport_of
from rlflow.weights.disk.manifest import version_folder
from rlflow.weights.engine.messages import (
    NUM_VERIFIED,
    VERIFIED_COLUMNS,
    LoadMode,
    WeightReport,
    adapter_message,
    merged_reports,
    message_of,
    open_message,
    staged_version,
    update_message,
)

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


def loading_of(config: Config, engine: AsyncLLM, index: int) -> Loading:
    """`index` is the engine's among all."""
    if sends_adapters(config):
        return AdapterLoading(engine, config.lora)
    if transport_of(config) is Transport.shm:
        return ArenaLoading(engine)
    return DirectLoading(engine, config, index)


class Loading(ABC):
    """Of one engine, for one version after the other."""

    def __init__(self, engine: AsyncLLM) -> None:
        self._engine = engine

    @abstractmethod
    async def prepare(self, staged: StagedWeights) -> None:
        """Do what can be done while the engine samples under another version."""

    @abstractmethod
    async def load(self, staged: StagedWeights) -> None:
        """Let the workers of a paused engine compute with the version. If it fails, they may hold a half of it."""

    @abstractmethod
    async def compare(self, staged: StagedWeights, verify: Verify) -> WeightReport:
        """Compare what the workers compute with, to what was staged, bit for bit.

        Where nothing of that can be seen from here any more, to what has come, which carried checksums.
        """

    async def give_up(self, staged: StagedWeights) -> bool:
        """After a failure, let a complete version be loaded next; whether the trainer has replaced this one."""
        await self._call("rlflow_abort_update", {})
        return False

    async def _call(self, method: str, message: dict[str, Any]) -> list[Any]:
        """The answers of all workers."""
        return await self._engine.collective_rpc(method, kwargs=message)


class ArenaLoading(Loading):
    """Of a whole version from an arena, by vLLM's weight-transfer protocol."""

    _mode: LoadMode | None = None

    async def prepare(self, staged: StagedWeights) -> None:
        if await self._mode_for(staged) is LoadMode.beside:
            # One by one, so that the engine samples between them.
            for bucket in staged.buckets:
                await self._call("rlflow_prepare", update_message(staged, bucket))

    async def load(self, staged: StagedWeights) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self._engine.start_weight_update()
        for bucket in () if self._mode is LoadMode.beside else staged.buckets:
            message = WeightTransferUpdateRequest(update_info=update_message(staged, bucket))
            await self._engine.update_weights(message)
        await self._engine.finish_weight_update()

    async def compare(self, staged: StagedWeights, verify: Verify) -> WeightReport:
        message = message_of(staged, chosen(staged, verify)) | {"num_columns": num_columns(verify)}
        return merged_reports(await self._call("rlflow_compare_weights", message))

    async def give_up(self, staged: StagedWeights) -> bool:
        await super().give_up(staged)
        return await asyncio.to_thread(staged_version, staged.path) != staged.version

    async def _mode_for(self, staged: StagedWeights) -> LoadMode:
        """How the workers load such weights, which they find out once."""
        if self._mode is None:
            shapes = {slot.name: list(slot.shape) for slot in staged.slots}
            found = await self._call("rlflow_learn", {"shapes": shapes})
            assert len(set(found)) == 1, "all workers of an engine have the same model"
            self._mode = LoadMode(found[0])
        return self._mode


class AdapterLoading(Loading):
    """Of adapters alone; the workers have read the rest from model.path."""

    def __init__(self, engine: AsyncLLM, lora: LoraConfig) -> None:
        super().__init__(engine)
        self._lora = lora

    async def prepare(self, staged: StagedWeights) -> None:
        """Nothing: adapters are small."""

    async def load(self, staged: StagedWeights) -> None:
        await self._call("rlflow_load_adapters", adapter_message(staged, staged.slots, self._lora))

    async def compare(self, staged: StagedWeights, verify: Verify) -> WeightReport:
        message = adapter_message(staged, chosen(staged, verify), self._lora)
        return merged_reports(await self._call("rlflow_compare_adapters", message))

    async def give_up(self, staged: StagedWeights) -> bool:
        await super().give_up(staged)
        return await asyncio.to_thread(staged_version, staged.path) != staged.version


class DirectLoading(Loading):
    """Of elements that come straight to where the workers keep them: from rank to rank, or out of a folder."""

    def __init__(self, engine: AsyncLLM, config: Config, index: int) -> None:
        super().__init__(engine)
        self._config = config
        self._index = index
        self._mode = LoadMode.in_place
        self._num_buckets = 0

    async def prepare(self, staged: StagedWeights) -> None:
        asked = open_message(staged, self._index, self._config.deadlines.weights_s)
        found = await self._call("rlflow_open", asked)
        self._mode, self._num_buckets = LoadMode(found[0][0]), found[0][1]
        if self._mode is LoadMode.reloaded:
            raise ConfigError(
                f"weights.transport={transport_of(self._config).value} sends parts of parameters, but vLLM keeps "
                "those of this model otherwise than it loads them; set weights.transport=shm"
            )
        if self._mode is LoadMode.beside:
            await self._receive(staged)

    async def load(self, staged: StagedWeights) -> None:
        await self._engine.start_weight_update()
        if self._mode is LoadMode.in_place:
            await self._receive(staged)
        await self._engine.finish_weight_update()

    async def compare(self, staged: StagedWeights, verify: Verify) -> WeightReport:
        if staged.slots:
            message = message_of(staged, staged.slots) | {"num_columns": num_columns(verify)}
            return merged_reports(await self._call("rlflow_compare_weights", message))
        message = {"version": staged.version, "num_columns": num_columns(verify)}
        return merged_reports(await self._call("rlflow_compare_targets", message))

    async def give_up(self, staged: StagedWeights) -> bool:
        await super().give_up(staged)
        is_in_folder = transport_of(self._config) is Transport.disk
        return is_in_folder and not await asyncio.to_thread(version_folder(Path(staged.path), staged.version).exists)

    async def _receive(self, staged: StagedWeights) -> None:
        """All buckets, one by one, so that the engine samples between them if it is not paused."""
        is_overtaken = False
        for bucket in range(self._num_buckets):
            found = await self._call("rlflow_receive", {"bucket": bucket})
            is_overtaken |= any(version is not None for version in found)
        if is_overtaken:
            raise WeightsOvertaken(f"the trainer no longer has version {staged.version}")


def chosen(staged: StagedWeights, verify: Verify) -> Sequence[TensorSlot]:
    """The parameters that are compared."""
    if verify is Verify.full:
        return staged.slots
    return random.Random(staged.version).sample(staged.slots, min(NUM_VERIFIED, len(staged.slots)))


def num_columns(verify: Verify) -> int | None:
    """That are compared of each matrix; None: all."""
    return None if verify is Verify.full else VERIFIED_COLUMNS
