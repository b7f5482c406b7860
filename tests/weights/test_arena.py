"""The shared-memory arena: layout, what it refuses, and who cleans up."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rlflow.config import Transport
from rlflow.errors import ConfigError
from rlflow.runtime import scratch
from rlflow.weights.engine.messages import OPENING, Opening
from rlflow.weights.shm.arena import BEING_WRITTEN, Arena, cut_buckets, lay_out, tensor_at

SPECS = [
    ("embed.weight", torch.float32, (3, 5)),
    ("norm.weight", torch.bfloat16, (7,)),
    ("head.weight", torch.float32, (2, 4)),
]


def tensors(scale: float = 1.0) -> dict[str, torch.Tensor]:
    return {
        "embed.weight": torch.arange(15, dtype=torch.float32).view(3, 5) * scale,
        "norm.weight": torch.arange(7, dtype=torch.bfloat16) * scale,
        "head.weight": torch.arange(8, dtype=torch.float32).view(2, 4) * scale,
    }


def bytes_of(path: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(Path(path).read_bytes()), dtype=torch.uint8)


def test_slots_are_aligned_and_do_not_overlap() -> None:
    slots, num_bytes = lay_out(SPECS)
    assert [slot.offset for slot in slots] == [64, 128, 192]
    assert [slot.num_bytes for slot in slots] == [60, 14, 32]
    assert [slot.dtype for slot in slots] == ["float32", "bfloat16", "float32"]
    assert num_bytes == 256


@pytest.mark.parametrize(
    ("bucket_bytes", "expected"),
    [(1000, ((0, 3),)), (74, ((0, 2), (2, 3))), (73, ((0, 1), (1, 3))), (1, ((0, 1), (1, 2), (2, 3)))],
)
def test_buckets_cover_every_slot_once(bucket_bytes: int, expected: tuple[tuple[int, int], ...]) -> None:
    slots, _ = lay_out(SPECS)
    assert cut_buckets(slots, bucket_bytes) == expected


def test_stage_writes_every_tensor_in_the_dtype_of_its_slot(tmp_path: Path) -> None:
    arena = Arena(SPECS, folder=tmp_path)
    sent = tensors() | {"norm.weight": torch.arange(7, dtype=torch.float32), "head.weight": torch.ones(4, 2).t() * 3}
    staged = arena.stage(4, reversed(sent.items()))
    written = bytes_of(staged.path)
    assert staged.version == 4
    assert len(written) == staged.num_bytes
    assert written[:8].view(torch.int64).item() == 4
    for slot in staged.slots:
        assert torch.equal(tensor_at(written, slot), sent[slot.name].to(getattr(torch, slot.dtype)))
    arena.close()


def test_second_version_reuses_the_file(tmp_path: Path) -> None:
    arena = Arena(SPECS, folder=tmp_path)
    first = arena.stage(1, tensors().items())
    second = arena.stage(2, tensors(scale=2.0).items())
    assert (first.path, first.slots, first.buckets) == (second.path, second.slots, second.buckets)
    assert torch.equal(tensor_at(bytes_of(second.path), second.slots[0]), tensors(scale=2.0)["embed.weight"])
    arena.close()


def test_incomplete_or_wrong_versions_are_refused_and_marked(tmp_path: Path) -> None:
    arena = Arena(SPECS, folder=tmp_path)
    complete = list(tensors().items())
    arena.stage(1, complete)
    with pytest.raises(ValueError, match=r"1 of 3 tensors were not sent, such as 'head\.weight'"):
        arena.stage(2, complete[:2])
    assert bytes_of(str(arena.path))[:8].view(torch.int64).item() == BEING_WRITTEN
    with pytest.raises(ValueError, match=r"'embed\.weight' came twice"):
        arena.stage(2, [*complete[:1], *complete])
    with pytest.raises(ValueError, match="'other' has no slot"):
        arena.stage(2, [("other", torch.ones(1))])
    with pytest.raises(ValueError, match=r"'embed.weight' must have shape \(3, 5\); got \(5, 3\)"):
        arena.stage(2, [("embed.weight", torch.ones(5, 3))])
    arena.close()


def test_repeated_names_and_empty_arenas_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="names must differ"):
        Arena([SPECS[0], SPECS[0]], folder=tmp_path)
    with pytest.raises(ValueError, match="at least one tensor"):
        Arena([], folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_file_is_private_and_goes_with_close(tmp_path: Path) -> None:
    arena = Arena(SPECS, folder=tmp_path)
    assert stat.S_IMODE(os.stat(arena.path).st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == [arena.path.name]
    arena.close()
    arena.close()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="is closed"):
        arena.stage(1, tensors().items())


def test_too_little_room_says_how_much() -> None:
    with pytest.raises(ConfigError, match=r"too little room .*: 4194304 MiB needed, \d+ MiB free; make it larger"):
        Arena([("huge", torch.float32, (2**20, 2**20))])


def test_missing_folder_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        Arena(SPECS, folder=tmp_path / "absent")


def test_arenas_of_dead_runs_are_removed_and_those_of_living_ones_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = (
        "import os, signal, sys, torch\n"
        "from pathlib import Path\n"
        "from rlflow.runtime import scratch\n"
        "from rlflow.weights.shm.arena import Arena\n"
        "scratch.ROOT = scratch.SHARED = Path(sys.argv[1])\n"
        "arena = Arena([('a', torch.float32, (4,))], folder=scratch.SHARED)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != scratch.VARIABLE}
    killed = subprocess.run([sys.executable, "-c", script, str(tmp_path)], env=environment, check=False, timeout=120)
    assert killed.returncode == -signal.SIGKILL
    folder, left = sorted(tmp_path.iterdir())
    assert left.name.startswith(f"{folder.name}-")
    live = Arena(SPECS, folder=tmp_path)
    monkeypatch.setattr(scratch, "ROOT", tmp_path)
    monkeypatch.setattr(scratch, "SHARED", tmp_path)
    assert list(scratch.leavings(remove=True)) == [folder]
    assert list(tmp_path.iterdir()) == [live.path]
    live.close()


def test_workers_are_told_of_a_version_in_lists_and_numbers(tmp_path: Path) -> None:
    arena = Arena(SPECS, folder=tmp_path, bucket_bytes=74)
    staged = arena.stage(3, tensors().items())
    opening = Opening(
        staged=staged, transport=Transport.shm, engine=1, transfer=2**53 - 1, timeout_s=5.0, adapter=(5, 12.0)
    )
    message = OPENING.dump_python(opening, mode="json")
    assert json.loads(json.dumps(message)) == message
    assert OPENING.validate_python(message) == opening
    told = message["staged"]
    assert (told["path"], told["num_bytes"], told["version"]) == (staged.path, 256, 3)
    arena.close()
