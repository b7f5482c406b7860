"""What one rank does, as torch's profiler sees it, and what its GPU's memory holds: files in the run's directory.

NAME.trace.json.gz     operations of the CPU and kernels, NCCL's among them; for chrome://tracing or Perfetto
NAME.memory.pickle     on a GPU: who allocated what; for pytorch.org/memory_viz
"""

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

_ALLOCATIONS = 200_000
"""The last ones, which the file of the memory tells; some hundred bytes each."""


class RankProfile:
    """One profile, from its making until `write`."""

    def __init__(self) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.memory._record_memory_history(max_entries=_ALLOCATIONS)
        self._profile = profile(activities=activities)
        self._profile.start()

    def write(self, folder: Path, name: str) -> None:
        """End the profile, and write its files."""
        self._profile.stop()
        folder.mkdir(parents=True, exist_ok=True)
        self._profile.export_chrome_trace(str(folder / f"{name}.trace.json.gz"))
        if torch.cuda.is_available():
            torch.cuda.memory._dump_snapshot(str(folder / f"{name}.memory.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
