"""Bringing an engine's tensors to a version on disk: the files are verified first, then written over the tensors.

folder, version, what is held -> fetch -> FetchedUpdate (verified, mapped) -> apply -> the rank's own tensors
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rlflow.errors import ConfigError
from rlflow.weights.disk.delta import land, land_box
from rlflow.weights.disk.manifest import (
    POSITIONS,
    VALUES,
    Manifest,
    PartFile,
    Stamp,
    chain,
    missing,
    parse_box_key,
    rank_file,
    version_folder,
)
from rlflow.weights.shape.landings import Landings
from rlflow.weights.shape.layout import Shapes


@dataclass(kw_only=True, slots=True, frozen=True)
class FetchedUpdate:
    """What leads from one version to another; no versions if they are the same."""

    base: Stamp | None
    """What must be held; None if that does not matter."""
    versions: tuple[tuple[Manifest, tuple[PartFile, ...]], ...]
    """Their files are open and verified."""


class StoreReader:
    """One rank of an engine that follows the versions in a folder."""

    def __init__(self, folder: Path, targets: Mapping[str, Tensor], landings: Landings, shapes: Shapes) -> None:
        """`targets` are the rank's contiguous tensors, `landings` what they take of each parameter; `shapes` are the
        parameters' as the engine knows them."""
        self.held: Stamp | None = None
        """What the targets hold; None while something is being written to them, and if that did not end well."""
        self._folder = folder
        self._targets = targets
        self._landings = landings
        self._shapes = shapes

    def fetch(self, version: int) -> FetchedUpdate:
        """Open and verify what leads from what is held to `version`. The targets are not touched.

        Raises WeightsOvertaken when the version is not there (any more), WeightsDamaged when a file is not what was
        written or what the version builds on is not there, ConfigError when it is of another model.
        """
        manifests = chain(self._folder, version, self.held)
        for manifest in manifests:
            self._check(manifest)
        base = manifests[0].base if manifests else self.held
        versions: list[tuple[Manifest, tuple[PartFile, ...]]] = []
        for manifest in manifests:
            path = version_folder(self._folder, manifest.stamp.version)
            try:
                files = tuple(PartFile(rank_file(path, rank), each) for rank, each in enumerate(manifest.files))
            except FileNotFoundError as error:
                raise missing(self._folder, manifests[-1], f"the file {error.filename}") from error
            versions.append((manifest, files))
        return FetchedUpdate(base=base, versions=tuple(versions))

    def apply(self, update: FetchedUpdate) -> Iterator[None]:
        """Write an update to the targets, one file each time the next is asked for; it counts once all are done.

        If that fails, the next update that is fetched begins with an anchor.
        """
        assert update.base in (None, self.held), "an update is applied to what it was fetched for"
        if not update.versions:
            return
        self.held = None
        for manifest, files in update.versions:
            for file in files:
                with torch.no_grad():
                    if manifest.base is None:
                        self._apply_boxes(file)
                    else:
                        self._apply_changes(file)
                yield
        self.held = update.versions[-1][0].stamp

    def _check(self, manifest: Manifest) -> None:
        for name, landings in self._landings.items():
            found = manifest.parameters.get(name)
            if found is None or found.shape != tuple(self._shapes[name]):
                has = "none" if found is None else f"the shape {found.shape}"
                raise ConfigError(
                    f"the engine takes a parameter {name!r} of the shape {tuple(self._shapes[name])}; version "
                    f"{manifest.stamp.version} in {self._folder} has {has}; both must be of one model"
                )
            # A buffer is written in float32, of which the engine may keep less. It never changes, so no delta has it.
            taken = {found.dtype, "bfloat16"} if found.dtype == "float32" else {found.dtype}
            if other := {landing.dtype for landing in landings} - taken:
                raise ConfigError(
                    f"the engine keeps {name!r} as {other.pop()}; version {manifest.stamp.version} in {self._folder} "
                    f"has {found.dtype}; write it in the engine's dtype"
                )

    def _apply_boxes(self, file: PartFile) -> None:
        for key in file.names:
            name, start = parse_box_key(key)
            values = file.tensor(key)
            for landing in self._landings.get(name, ()):
                for region in landing.regions:
                    land_box(self._targets[landing.tensor], region, start, values)

    def _apply_changes(self, file: PartFile) -> None:
        for key in file.names:
            name = key.removesuffix(POSITIONS)
            if name == key or name not in self._landings:
                continue
            positions, values = file.tensor(key), file.tensor(name + VALUES)
            for landing in self._landings[name]:
                target = self._targets[landing.tensor]
                positions, values = positions.to(target.device), values.to(target.device)
                for region in landing.regions:
                    land(target, region, self._shapes[name], positions, values)
