"""What an engine tells its vLLM workers, and what they answer: lists and numbers only, because vLLM sends msgpack."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

from pydantic import TypeAdapter

from rlflow.config import Transport
from rlflow.roles import StagedWeights

NUM_VERIFIED = 4
VERIFIED_COLUMNS = 32
"""With weights.verify=sample, this many columns of this many parameters are compared for each version: it takes
milliseconds, but unpacking a whole embedding would take a second."""
ADAPTER_ID = 1
"""The id of the only adapter, in every version, when adapters are sent alone."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Opening:
    """What the workers of an engine are told about a version before they receive it."""

    staged: StagedWeights
    transport: Transport
    engine: int
    """The engine's index among all."""
    transfer: int
    """A fresh number, the same for all workers of the engine."""
    timeout_s: float
    adapter: tuple[int, float] | None = None
    """The rank, and the rank times the scale, when adapters are sent alone; None when the whole model is."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Columns:
    """A choice of columns to compare: `count` neighbours of each matrix, and all of any other tensor."""

    count: int
    seed: int
    """Equal seeds choose equally."""

    def first(self, name: str, width: int) -> int:
        return random.Random(f"{name} {self.seed}").randrange(max(1, width - self.count + 1))


@dataclass(kw_only=True, slots=True, frozen=True)
class Comparison:
    """Which tensors the workers compare what they compute with to."""

    staged: StagedWeights
    """Its slots are the parameters to compare in an arena; without slots, the workers compare to what has come."""
    columns: Columns | None
    """None: whole tensors."""


class WeightReport(TypedDict):
    """What a comparison found."""

    num_equal: int
    different: list[str]
    unverified: list[str]
    """Parameters without a counterpart that can be read back, such as packed experts."""


OPENING, COMPARISON = TypeAdapter(Opening), TypeAdapter(Comparison)
"""To and from what vLLM can send: `dump_python(..., mode="json")` and `validate_python`."""


def merged_reports(reports: Sequence[WeightReport]) -> WeightReport:
    """One report for all workers of an engine: a parameter is equal if every worker's part of it is."""
    different = list(dict.fromkeys(name for report in reports for name in report["different"]))
    unverified = {name: None for report in reports for name in report["unverified"] if name not in different}
    num_compared = reports[0]["num_equal"] + len(reports[0]["different"]) + len(reports[0]["unverified"])
    return WeightReport(
        num_equal=num_compared - len(different) - len(unverified),
        different=different,
        unverified=list(unverified),
    )
