"""What goes to the vLLM workers, and comes back: lists and numbers only, because vLLM sends it as msgpack."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, TypedDict

from rlflow.config import LoraConfig, Transport
from rlflow.roles import StagedWeights, TensorSlot

NUM_VERIFIED = 4
VERIFIED_COLUMNS = 32
"""Parameters, and columns of each, that are compared of each version with weights.verify=sample: it takes milliseconds,
where to unpack a whole embedding would take a second."""
ADAPTER_ID = 1
"""Of the one adapter, in every version, where adapters are sent alone."""


def backend_of(transport: Transport) -> str:
    """The name under which vLLM knows a transport."""
    return f"rlflow_{transport.value}"


class LoadMode(StrEnum):
    """How an engine's workers load a version."""

    beside = "beside"
    """Into tensors beside the model while it samples; a pause only swaps them in."""
    in_place = "in_place"
    """Into the model's own tensors, during a pause."""
    reloaded = "reloaded"
    """By vLLM's loader from whole parameters, during a pause: the model does not keep them as they are loaded."""


class WeightReport(TypedDict):
    num_equal: int
    different: list[str]
    unverified: list[str]
    """Parameters which have no counterpart that can be read back, such as packed experts."""


def update_message(staged: StagedWeights, bucket: tuple[int, int]) -> dict[str, Any]:
    """What one update call carries for the slots [first, end) of `bucket`."""
    return message_of(staged, staged.slots[slice(*bucket)])


def message_of(staged: StagedWeights, chosen: Sequence[TensorSlot]) -> dict[str, Any]:
    """Says where some tensors of a version are."""
    slots = [[slot.name, slot.dtype, list(slot.shape), slot.offset, slot.num_bytes] for slot in chosen]
    return {"path": staged.path, "num_bytes": staged.num_bytes, "version": staged.version, "slots": slots}


def open_message(staged: StagedWeights, engine: int, timeout_s: float) -> dict[str, Any]:
    """With what an engine's workers ask for a version that comes straight to where it belongs: an `Opening`."""
    # Of 53 bits: what else stamps messages must not be taken for this transfer's.
    transfer = uuid.uuid4().int >> 75
    return {
        "path": staged.path,
        "engine": engine,
        "version": staged.version,
        "transfer": transfer,
        "timeout_s": timeout_s,
    }


def adapter_message(staged: StagedWeights, chosen: Sequence[TensorSlot], lora: LoraConfig) -> dict[str, Any]:
    """Says where some tensors of adapters are, and what the adapters are multiplied by."""
    return {**message_of(staged, chosen), "rank": lora.rank, "alpha": lora.alpha}


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


def merged_reports(reports: Sequence[WeightReport]) -> WeightReport:
    """Of all workers of an engine: a parameter is equal where every worker's part of it is."""
    different = list(dict.fromkeys(name for report in reports for name in report["different"]))
    unverified = {name: None for report in reports for name in report["unverified"] if name not in different}
    num_compared = reports[0]["num_equal"] + len(reports[0]["different"]) + len(reports[0]["unverified"])
    return WeightReport(
        num_equal=num_compared - len(different) - len(unverified),
        different=different,
        unverified=list(unverified),
    )
