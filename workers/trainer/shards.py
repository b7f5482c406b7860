"""Checkpoints of sharded tensors, without pickle: each rank writes what it holds, and any layout can read it.

    manifest.json         ranks, updates, state of the objective, kinds of tensors, optimiser, settings of the adapters
    rank_R.json           name -> global shape, dtype, elements that rank R holds
    rank_R.safetensors    "<kind>/<name>" -> those elements

A shard is a run of elements in row-major order, so rows of a parameter and pieces of a flat buffer are the same thing.
Kinds are `parameter` and, with the optimiser, `exp_avg` and `exp_avg_sq`, always float32. What Muon trains lacks the
last one.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rlflow.config import LoraConfig, Optimizer
from rlflow.errors import RunError
from rlflow.runtime.disk import write_digested, write_tensors

PARAMETER = "parameter"
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(kw_only=True, slots=True)
class Shard:
    """One rank's elements of a parameter and of everything that is laid out like it."""

    name: str
    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    start: int
    """First element of the shard."""
    tensors: Mapping[str, Tensor]
    """Kind -> the elements, flat."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Snapshot:
    """One rank's part of a checkpoint, in memory of its own, so later training does not change it."""

    rank: int
    num_ranks: int
    shards: Sequence[Shard]
    """Every trained parameter in the order of the model, even those of which this rank holds nothing."""
    updates: int
    """Updates by the optimiser so far."""
    steps: int
    """Steps of the run that these belong to: fewer, if a step makes several."""
    objective: Mapping[str, float] = field(default_factory=dict)
    """The state that the objective must remember."""
    expert_loads: Sequence[Sequence[float]] = ()
    """`Balance.before`; empty without a balance loss."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """If its `rank` is set, the parameters are those of adapters."""
    optimizer: Optimizer = Optimizer.adamw

    def write(self, folder: Path) -> dict[str, str]:
        """Write this rank's files, and on rank 0 the manifest; from any thread. Returns the SHA-256 of each by name."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors: dict[str, Tensor] = {}
        layout: dict[str, dict[str, Any]] = {}
        for shard in self.shards:
            stop = shard.start + len(shard.tensors[PARAMETER])
            dtype = str(shard.tensors[PARAMETER].dtype).removeprefix("torch.")
            layout[shard.name] = {"shape": shard.shape, "dtype": dtype, "start": shard.start, "stop": stop}
            if stop > shard.start:
                tensors |= {f"{kind}/{shard.name}": tensor.contiguous() for kind, tensor in shard.tensors.items()}
        name, arrays = f"rank_{self.rank}.safetensors", {key: each.detach().numpy() for key, each in tensors.items()}
        digests = {name: write_tensors(folder / name, arrays, {"updates": str(self.updates)})}
        texts = {f"rank_{self.rank}.json": json.dumps(layout)}
        if self.rank == 0:
            manifest = {
                "num_ranks": self.num_ranks,
                "updates": self.updates,
                "steps": self.steps,
                "kinds": sorted({kind for shard in self.shards for kind in shard.tensors}),
                "optimizer": self.optimizer.value,
                "objective": dict(self.objective),
                "expert_loads": list(self.expert_loads),
                "lora": asdict(self.lora),
            }
            texts["manifest.json"] = json.dumps(manifest)
        return digests | {name: write_digested(folder / name, [text.encode()]) for name, text in texts.items()}


class ShardReader:
    """Reads any elements of any tensor of a checkpoint, from the files that hold them.

    Raises RunError if the checkpoint is incomplete; `read_state` of the whole one has checked its bytes.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        manifest = self._read_json("manifest.json")
        self.updates: int = manifest["updates"]
        self.steps: int = manifest.get("steps", self.updates)  # checkpoints without it made one update a step
        self.objective: dict[str, float] = manifest["objective"]
        self.expert_loads: list[list[float]] = manifest.get("expert_loads", [])
        self.kinds: list[str] = manifest["kinds"]
        self.optimizer = Optimizer(manifest["optimizer"])
        self.lora = LoraConfig(**manifest["lora"])
        self._layouts = [self._read_json(f"rank_{rank}.json") for rank in range(manifest["num_ranks"])]
        self._files = [self._open(f"rank_{rank}.safetensors") for rank in range(manifest["num_ranks"])]
        found = {(file.metadata() or {}).get("updates") for file in self._files}
        if found != {str(self.updates)}:
            raise RunError(
                f"checkpoint {folder} mixes versions: its ranks have {', '.join(sorted(map(str, found)))} updates, and "
                f"should have {self.updates}; remove it to resume from the one before"
            )

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every trained parameter, in the order of the model."""
        return {name: tuple(entry["shape"]) for name, entry in self._layouts[0].items()}

    @property
    def has_optimizer(self) -> bool:
        return MOMENTS[0] in self.kinds

    def check_adapters(self, lora: LoraConfig) -> None:
        """Raise RunError if the checkpoint has other adapters than these."""
        if _adapters(self.lora) != _adapters(lora):
            raise RunError(
                f"checkpoint {self._folder} was saved with {_adapters(self.lora)}, but the run has {_adapters(lora)}; "
                "set these to what the run began with, or start anew with run.on_exists=fresh"
            )

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Raise RunError if the moments are Muon's and the run's are AdamW's, or the other way round."""
        if self.has_optimizer and (self.optimizer is Optimizer.muon) != (optimizer is Optimizer.muon):
            raise RunError(
                f"checkpoint {self._folder} was saved with trainer.optimizer={self.optimizer}, whose moments mean "
                f"nothing to {optimizer}; set trainer.optimizer to what the run began with, or start anew with "
                "run.on_exists=fresh"
            )

    def read(self, kind: str, name: str, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of a tensor, flat."""
        parts: list[Tensor] = []
        read_to = start
        holders = sorted(
            zip((layout[name] for layout in self._layouts), self._files, strict=True), key=lambda pair: pair[0]["start"]
        )
        for entry, file in holders:
            first, last = max(read_to, entry["start"]), min(stop, entry["stop"])
            if first == read_to < last:
                parts.append(file.get_slice(f"{kind}/{name}")[first - entry["start"] : last - entry["start"]])
                read_to = last
        if read_to < stop:
            raise RunError(f"checkpoint {self._folder} lacks elements {read_to} to {stop} of {name}; use an older one")
        if not parts:
            return torch.empty(0, dtype=getattr(torch, self._layouts[0][name]["dtype"]))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def read_whole(self, kind: str, name: str) -> Tensor:
        """A tensor in its shape."""
        shape = self.shapes[name]
        return self.read(kind, name, 0, math.prod(shape)).view(shape)

    def _read_json(self, name: str) -> dict[str, Any]:
        try:
            return json.loads((self._folder / name).read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError) as error:
            raise self._incomplete(name, error) from error

    def _open(self, name: str) -> Any:
        try:
            return safe_open(self._folder / name, framework="pt")
        except (OSError, SafetensorError) as error:
            raise self._incomplete(name, error) from error

    def _incomplete(self, name: str, error: Exception) -> RunError:
        return RunError(
            f"checkpoint {self._folder} cannot be read: {name}: {error}; use an older checkpoint, or start anew with "
            "run.on_exists=fresh"
        )


def _adapters(lora: LoraConfig) -> str:
    """What checkpoints must have in common; another `dropout` or `send` changes nothing that they hold."""
    if lora.rank is None:
        return "no adapters"
    found = f"adapters of lora.rank={lora.rank}, lora.alpha={lora.alpha:g}"
    found += ", lora.rank_stabilised=true" if lora.rank_stabilised else ""
    return found if lora.targets is None else f"{found}, lora.targets={sorted(lora.targets)}"


def read_full(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Every parameter of a checkpoint, whole, one at a time; tied ones once."""
    reader = ShardReader(folder)
    for name in reader.shapes:
        yield name, reader.read_whole(PARAMETER, name)
