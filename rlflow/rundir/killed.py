"""What became of hung processes: `rlflow.processes.companion` writes it on any machine, and the driver shows it."""

from pathlib import Path

NAME = "killed.log"


class KilledLog:
    """The lines that are added to a run's `killed.log` from now on."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / NAME
        self._num_read = self._path.stat().st_size if self._path.is_file() else 0

    def news(self) -> list[str]:
        """The lines since the last call."""
        if not self._path.is_file():
            return []
        with self._path.open("rb") as file:
            file.seek(self._num_read)
            found = file.read()
        whole = found[: found.rfind(b"\n") + 1]
        self._num_read += len(whole)
        return whole.decode(errors="replace").splitlines()
