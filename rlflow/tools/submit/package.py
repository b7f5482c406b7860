"""The code that goes with a job to a Ray cluster: a folder and wheels, as one archive that unpacks to importable files.

Wheels are unpacked into it rather than installed on the cluster, where pip would fetch all that they depend on again,
on each machine.
"""

import os
import zipfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ray._private.runtime_env.packaging import GCS_STORAGE_MAX_SIZE, _dir_travel, _get_excludes

from rlflow.errors import ConfigError

EXCLUDED = ("/runs", "/outputs", "/checkpoints", ".git", ".venv", "venv", "__pycache__")
"""What stays behind, besides what .gitignore and .rayignore name."""
MAX_BYTES = GCS_STORAGE_MAX_SIZE
_EPOCH = (1980, 1, 1, 0, 0, 0)
"""The oldest time that an archive can hold: with the files' own, equal files would make two archives."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Source:
    """Where the content of a file is."""

    path: Path
    num_bytes: int
    member: str | None = None
    """A file of the wheel at `path`."""


Package = dict[str, Source]
"""Name in the archive -> content."""


def collect(folder: Path | None, wheels: Sequence[Path], max_bytes: int = MAX_BYTES) -> Package:
    """What is sent of a folder and of wheels.

    Raises ConfigError for a wheel that is none, for a file that is in two of them, and when all is too much.
    """
    found = {} if folder is None else _of_folder(folder)
    for wheel in wheels:
        of_wheel = _of_wheel(wheel)
        if twice := sorted(found.keys() & of_wheel):
            raise ConfigError(f"{twice[0]} is in {wheel} and in {found[twice[0]].path}; leave one of them out")
        found |= of_wheel
    total = sum(source.num_bytes for source in found.values())
    if total >= max_bytes:
        where = folder or ", ".join(map(str, wheels))
        raise ConfigError(
            f"{where} has {_size(total)}, and Ray takes less than {_size(max_bytes)}; the biggest parts are "
            f"{_biggest(found)}; put them on a file system that the cluster sees, name them in .rayignore, or give the "
            "folder with the code as --working-dir"
        )
    return found


def write(package: Package, target: Path) -> None:
    """Write the archive; equal content makes equal bytes, which Ray takes once only."""
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, source in sorted(package.items()):
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.compress_type = zipfile.ZIP_DEFLATED
            if source.member is not None:
                with zipfile.ZipFile(source.path) as wheel:
                    entry.external_attr = wheel.getinfo(source.member).external_attr
                    archive.writestr(entry, wheel.read(source.member))
            else:
                entry.external_attr = source.path.stat().st_mode << 16
                archive.writestr(entry, source.path.read_bytes())


def describe(package: Package) -> str:
    return f"{len(package)} file(s), {_size(sum(source.num_bytes for source in package.values()))}"


def _of_folder(folder: Path) -> Package:
    found: Package = {}

    def take(path: Path) -> None:
        if path.is_file():
            found[str(path.relative_to(folder))] = Source(path=path, num_bytes=path.stat().st_size)

    ignores_too = os.environ.get("RAY_RUNTIME_ENV_IGNORE_GITIGNORE", "0") != "1"
    _dir_travel(folder, [_get_excludes(folder, list(EXCLUDED))], take, include_gitignore=ignores_too)
    return found


def _of_wheel(wheel: Path) -> Package:
    if wheel.suffix != ".whl" or not zipfile.is_zipfile(wheel):
        raise ConfigError(f"--wheel {wheel} is not a wheel; give a .whl file, such as `pip wheel --no-deps .` makes")
    with zipfile.ZipFile(wheel) as archive:
        entries = [entry for entry in archive.infolist() if not entry.is_dir()]
    for entry in entries:
        if entry.filename.partition("/")[0].endswith(".data"):
            raise ConfigError(
                f"--wheel {wheel} has {entry.filename}, which only an installation can put in its place; install it on "
                "the machines of the cluster"
            )
    return {entry.filename: Source(path=wheel, num_bytes=entry.file_size, member=entry.filename) for entry in entries}


def _biggest(package: Package) -> str:
    """The folders or files at the top that are most of it, as deep as one of them is most of its parent."""
    prefix: tuple[str, ...] = ()
    while True:
        sizes: Counter[str] = Counter()
        for name, source in package.items():
            parts = name.split("/")
            if tuple(parts[: len(prefix)]) == prefix and len(parts) > len(prefix):
                sizes[parts[len(prefix)]] += source.num_bytes
        top, num_bytes = sizes.most_common(1)[0]
        inner = (*prefix, top)
        if num_bytes < 0.9 * sizes.total() or "/".join(inner) in package:
            return ", ".join(f"{'/'.join((*prefix, name))} ({_size(size)})" for name, size in sizes.most_common(3))
        prefix = inner


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"
