"""How an arena's metadata travels to the vLLM workers: lists and numbers only, because vLLM sends it as msgpack."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from rlflow.config import LoraConfig
from rlflow.roles import StagedWeights, TensorSlot

BACKEND = "rlflow_shm"
"""Name under which vLLM knows the shared-memory transport."""
ADAPTER_ID = 1
"""Of the one adapter, in every version, where adapters are sent alone."""


def update_message(staged: StagedWeights, bucket: tuple[int, int]) -> dict[str, Any]:
    """What one update call carries for the slots [first, end) of `bucket`."""
    first, end = bucket
    slots = [[slot.name, slot.dtype, list(slot.shape), slot.offset, slot.num_bytes] for slot in staged.slots[first:end]]
    return {"path": staged.path, "num_bytes": staged.num_bytes, "version": staged.version, "slots": slots}


def adapter_message(staged: StagedWeights, lora: LoraConfig) -> dict[str, Any]:
    """What one call carries for adapters: all slots, and what the adapters are multiplied by."""
    return {**update_message(staged, (0, len(staged.slots))), "rank": lora.rank, "alpha": lora.alpha}


def slots_of(rows: Sequence[Sequence[Any]]) -> list[TensorSlot]:
    """The slots of an `update_message`."""
    return [
        TensorSlot(name=name, dtype=dtype, shape=tuple(shape), offset=offset, num_bytes=num_bytes)
        for name, dtype, shape, offset, num_bytes in rows
    ]


def staged_version(path: str) -> int | None:
    """The version that an arena's header holds now, -1 while it is rewritten; None when the file is gone."""
    try:
        with open(path, "rb") as file:
            return int.from_bytes(file.read(8), sys.byteorder, signed=True)
    except FileNotFoundError:
        return None
