"""How an engine is given a version of the weights: what happens while it samples, and what while it is paused.

prepare (sampling) -> load (paused) -> compare;  whoever calls it pauses and resumes the engine
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlflow.config import Config, LoraConfig, sends_adapters
from rlflow.roles import StagedWeights, TensorSlot
from rlflow.weights.messages import LoadMode, WeightReport, adapter_message, merged_reports, message_of, update_message

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


def loading_of(config: Config, engine: AsyncLLM) -> Loading:
    if sends_adapters(config):
        return AdapterLoading(engine, config.lora)
    return ArenaLoading(engine)


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
    async def compare(self, staged: StagedWeights, chosen: Sequence[TensorSlot]) -> WeightReport:
        """Compare what the workers compute with, to what was staged, bit for bit."""

    async def give_up(self) -> None:
        """After a failure: let a complete version be loaded next."""
        await self._call("rlflow_abort_update", {})

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

    async def compare(self, staged: StagedWeights, chosen: Sequence[TensorSlot]) -> WeightReport:
        return merged_reports(await self._call("rlflow_compare_weights", message_of(staged, chosen)))

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

    async def compare(self, staged: StagedWeights, chosen: Sequence[TensorSlot]) -> WeightReport:
        message = adapter_message(staged, chosen, self._lora)
        return merged_reports(await self._call("rlflow_compare_adapters", message))
