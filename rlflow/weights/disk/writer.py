"""Writing versions of the weights to disk: each rank of the trainer its own part, and of most versions what changed.

every rank: compare -> (added up over the ranks) -> every rank: write -> (all have written) -> rank 0: publish

`compare` copies what it needs: afterwards training may go on while the version is written. `manifest.py` describes the
layout of the folder. While a version is written or removed, there are also:

version_NNNNNN.part/       being written
    rank_R.safetensors
    rank_R.json            what rank R says of its file; gone when the version is complete
version_NNNNNN.old/        being removed
"""

import math
import shutil
import uuid
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from pydantic import TypeAdapter
from safetensors import SafetensorError
from torch import Tensor

from rlflow.errors import RunError
from rlflow.runtime.disk import disk_errors, sync
from rlflow.weights.disk.delta import Changes, bits, changed, position_dtype, positions_in
from rlflow.weights.disk.manifest import (
    MANIFEST,
    POSITIONS,
    REMOVED,
    UNFINISHED,
    VALUES,
    FileSum,
    Manifest,
    ParameterSpec,
    Stamp,
    box_key,
    rank_file,
    version_folder,
    versions_in,
    write_part,
)
from rlflow.weights.shape.boxes import Index, extents, num_elements

ANCHOR_EVERY = 20
"""Versions from one anchor to the next: with one changed element in 100 their deltas take about half the bytes of one
anchor, which is what an engine that joins late reads in addition, and what the disk holds."""
NamedBox = tuple[str, Index, Index]
"""The name of a parameter, and where a box of it starts and stops."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Part:
    """The box [start, stop) of a parameter, and its elements."""

    name: str
    start: Index
    stop: Index
    tensor: Tensor
    """The box's elements in its shape, with any strides, or flat in row-major order; of any dtype, on any device."""


@dataclass(kw_only=True, slots=True)
class _Staged:
    """One version between `compare` and `publish`."""

    version: int
    base: int | None
    """The version that the positions are relative to; None: only an anchor can be written."""
    positions: dict[NamedBox, Tensor] = field(default_factory=dict)
    """What changed, in the box laid flat."""
    num_changed: int = 0
    delta_bytes: int = 0
    density: float = 1.0


@dataclass(kw_only=True, slots=True, frozen=True)
class _RankReport:
    """What a rank says of its file."""

    base: int | None
    file: FileSum
    boxes: tuple[NamedBox, ...]
    """All boxes of this rank, including those in which nothing changed."""


_RANK_REPORT = TypeAdapter(_RankReport)


class StoreWriter:
    """One rank's side of a folder of versions; it holds one copy of what it writes, in the engines' dtype.

    The first version is an anchor, and so is each that comes ANCHOR_EVERY after the one before, or of which too much
    changed, or that follows one that was not published.
    """

    def __init__(self, folder: Path, rank: int, num_ranks: int, parameters: Mapping[str, ParameterSpec]) -> None:
        """`parameters` are all of the model. Rank 0 must be made before any rank writes: it tidies up."""
        self._folder = folder
        self._rank = rank
        self._num_ranks = num_ranks
        self._parameters = parameters
        self._last: dict[NamedBox, Tensor] = {}
        self._base: int | None = None  # version of `_last`; None while it may not be what is on disk
        self._num_deltas = 0  # since the anchor
        self._staged: _Staged | None = None
        self._written: _Staged | None = None  # rank 0 only
        self._chain: list[Stamp] = []  # rank 0 only: from the newest anchor on
        folder.mkdir(parents=True, exist_ok=True)
        if rank == 0:
            # What was being written or removed when its process ended.
            for suffix in (UNFINISHED, REMOVED):
                for version in versions_in(folder, suffix):
                    shutil.rmtree(version_folder(folder, version, suffix))

    def compare(self, version: int, parts: Iterable[Part]) -> Changes:
        """Take over this rank's part of a version, and count what changed since the version before.

        The parts of all ranks must make up all parameters, without overlap, and should be the same boxes each time: if
        they are not, the version will be an anchor. The version before must have been published.

        Raises ValueError for a part that does not fit its parameter.
        """
        is_due = self._num_deltas + 1 >= ANCHOR_EVERY
        may_be_delta = not is_due and self._base is not None and self._base < version
        staged = _Staged(version=version, base=self._base if may_be_delta else None)
        self._base = None
        last: dict[NamedBox, Tensor] = {}
        own_bytes = sum(values.nbytes for values in self._last.values())
        for part in parts:
            if not part.tensor.numel():
                continue
            box = (part.name, part.start, part.stop)
            last[box] = self._take_over(staged, box, self._values(part))
            if staged.delta_bytes > own_bytes:  # bounds the memory that the positions take
                staged.base = None
                staged.positions.clear()
        if last.keys() != self._last.keys():
            staged.base = None
        self._last, self._staged = last, staged
        return Changes(
            num_changed=staged.num_changed,
            num_elements=sum(values.numel() for values in last.values()),
            delta_bytes=staged.delta_bytes,
            dense_bytes=sum(values.nbytes for values in last.values()),
            num_without_base=int(staged.base is None),
        )

    def write(self, total: Changes) -> None:
        """Write this rank's part of the version that was compared; `total` is the sum of what all ranks counted.

        Raises RunError when the disk is full, and leaves nothing of the part; then the version cannot be published.
        """
        staged, self._staged = self._staged, None
        assert staged is not None, "write follows compare"
        assert staged.base is not None or not total.is_delta, "the sum has what this rank counted"
        staged.base, staged.density = staged.base if total.is_delta else None, total.density
        if staged.base is None:
            tensors = {
                box_key(name, start, stop): values.view(extents(start, stop))
                for (name, start, stop), values in self._last.items()
            }
        else:
            tensors = self._delta(staged.positions)
        folder = version_folder(self._folder, staged.version, UNFINISHED)
        path = rank_file(folder, self._rank)
        with disk_errors("the weights", self._folder):
            folder.mkdir(exist_ok=True)
            try:
                report = _RankReport(base=staged.base, file=write_part(path, tensors), boxes=tuple(self._last))
                path.with_suffix(".json").write_bytes(_RANK_REPORT.dump_json(report))
            except (OSError, SafetensorError):
                path.unlink(missing_ok=True)
                path.with_suffix(".json").unlink(missing_ok=True)
                raise
        self._num_deltas = 0 if staged.base is None else self._num_deltas + 1
        if self._rank == 0:
            self._written = staged
        else:
            self._base = staged.version

    def publish(self) -> Manifest:
        """Let readers find the version that all ranks have written, and remove what nobody needs any more. Rank 0 only.

        The newest anchor and all after it are kept, and until the version after it, also the anchor before it with its
        deltas.

        Raises RunError when the ranks' files do not belong together or do not make up all parameters, or the disk is
        full; then the next version is an anchor.
        """
        written, self._written = self._written, None
        assert written is not None, "publish follows write, on rank 0"
        base = None if written.base is None else self._chain[-1]
        assert base is None or base.version == written.base, "a delta is relative to the newest version"
        unfinished = version_folder(self._folder, written.version, UNFINISHED)
        with disk_errors("the weights", self._folder):
            reports = [_read_report(unfinished, rank) for rank in range(self._num_ranks)]
            _check(written, reports, self._parameters)
            manifest = Manifest(
                stamp=Stamp(version=written.version, id=uuid.uuid4().hex),
                base=base,
                files=tuple(report.file for report in reports),
                parameters=dict(self._parameters),
                density=written.density,
            )
            manifest.write(unfinished / MANIFEST)
            for rank in range(self._num_ranks):
                rank_file(unfinished, rank).with_suffix(".json").unlink()
            sync(unfinished / MANIFEST)
            sync(unfinished)
            final = version_folder(self._folder, written.version)
            if final.exists():  # of a run that had gone on further than its checkpoint
                _remove(self._folder, written.version)
            unfinished.rename(final)
            sync(self._folder)
        kept = [*self._chain, manifest.stamp]
        self._chain = [manifest.stamp] if base is None else kept
        self._base = written.version
        numbers = {stamp.version for stamp in kept}
        for version in reversed(versions_in(self._folder)):  # the newest first
            if version not in numbers:
                _remove(self._folder, version)
        for version in versions_in(self._folder, UNFINISHED):  # what failed
            if version < written.version:  # a rank may be writing the next already
                shutil.rmtree(version_folder(self._folder, version, UNFINISHED))
        return manifest

    def _values(self, part: Part) -> Tensor:
        """Flat, in the engines' dtype, in the memory of the CPU; maybe the trainer's own memory."""
        spec = self._parameters.get(part.name)
        if spec is None:
            raise ValueError(f"parameter {part.name!r} is none of the {len(self._parameters)} that the store is for")
        shape = extents(part.start, part.stop)
        if not all(0 <= a <= b <= size for a, b, size in zip(part.start, part.stop, spec.shape, strict=True)):
            raise ValueError(f"{part.name!r} has the shape {spec.shape}; got the box {part.start} to {part.stop}")
        if tuple(part.tensor.shape) not in (shape, (math.prod(shape),)):
            raise ValueError(f"a box {shape} of {part.name!r} must have that shape, got {tuple(part.tensor.shape)}")
        return part.tensor.detach().to(getattr(torch, spec.dtype)).cpu().reshape(-1)

    def _take_over(self, staged: _Staged, box: NamedBox, now: Tensor) -> Tensor:
        """The copy of the last values, brought up to date; what changed is noted in `staged`."""
        before = self._last.get(box)
        if before is None:
            staged.num_changed += now.numel()
            return now.clone()
        found = changed(before, now)
        before.copy_(now)
        staged.num_changed += len(found)
        position_bytes = position_dtype(math.prod(self._parameters[box[0]].shape)).itemsize
        staged.delta_bytes += len(found) * (position_bytes + now.itemsize)
        if staged.base is not None and len(found):
            staged.positions[box] = found.to(position_dtype(now.numel()))
        return before

    def _delta(self, changed_in: Mapping[NamedBox, Tensor]) -> dict[str, Tensor]:
        """The positions in each parameter, and the values now."""
        positions: dict[str, list[Tensor]] = defaultdict(list)
        values: dict[str, list[Tensor]] = defaultdict(list)
        for box, found in changed_in.items():
            name, start, stop = box
            positions[name].append(positions_in(self._parameters[name].shape, start, stop, found))
            values[name].append(bits(self._last[box]).index_select(0, found))
        dtypes = {name: getattr(torch, self._parameters[name].dtype) for name in values}
        return {name + POSITIONS: torch.cat(parts) for name, parts in positions.items()} | {
            name + VALUES: torch.cat(parts).view(dtypes[name]) for name, parts in values.items()
        }


def _remove(folder: Path, version: int) -> None:
    """Nobody finds half of it meanwhile; a reader that has its files open keeps them."""
    version_folder(folder, version).rename(version_folder(folder, version, REMOVED))
    for left in versions_in(folder, REMOVED):
        # What a reader has open may stay in its folder for as long, on a network's disk; then it goes with a later one.
        shutil.rmtree(version_folder(folder, left, REMOVED), ignore_errors=True)


def _read_report(part: Path, rank: int) -> _RankReport:
    try:
        return _RANK_REPORT.validate_json(rank_file(part, rank).with_suffix(".json").read_bytes())
    except FileNotFoundError as error:
        raise RunError(f"rank {rank} of the trainer has not written its part of the weights to {part}") from error


def _check(written: _Staged, reports: Sequence[_RankReport], parameters: Mapping[str, ParameterSpec]) -> None:
    """Raise RunError unless the ranks' parts make up all parameters."""
    bases = {report.base for report in reports}
    if bases != {written.base}:
        raise RunError(f"the ranks' parts of version {written.version} build on different versions: {bases}")
    boxes = [box for report in reports for box in report.boxes]
    counts: Counter[str] = Counter()
    for name, start, stop in boxes:
        counts[name] += num_elements(start, stop)
    for (name, start, stop), count in Counter(boxes).items():
        if count > 1:
            raise RunError(f"{count} ranks wrote the elements {start} to {stop} of {name!r}; one of them must")
    for name, spec in parameters.items():
        if counts[name] != math.prod(spec.shape):
            raise RunError(
                f"parameter {name!r} has {math.prod(spec.shape)} elements, but the ranks wrote {counts[name]} of it "
                f"to version {written.version}; one rank must write each"
            )
