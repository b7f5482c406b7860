"""trace.json: every phase on every actor, in Chrome's trace event format, which Perfetto opens.

The run is one process, and each actor is one row (thread). Spans of one actor that overlap go to further rows, named
"actor (2)", because the events of one row must nest. An event's `args` say the step that reported it, and the facts of
its span. The file is a JSON array with one event on each line. It is valid
after `close`; a killed run leaves out the closing bracket, which viewers accept and the next `Trace` on the path adds.

The files are bounded: one that reaches `max_bytes` becomes trace_previous.json, replacing the one before, and a new one
begins. Together they hold the newest `max_bytes` to 2 x `max_bytes` of events.
"""

import json
import os
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from rlflow.runtime.disk import disk_errors
from rlflow.types import Span

MAX_BYTES = 32 * 2**20
_PID = 1
_SEPARATOR = b",\n"
_START, _END = b"[\n", b"\n]\n"


class Trace:
    """Appends spans to one trace file; a file that is already there goes on."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        self._path, self._max_bytes = path, max_bytes
        self._row_ids: dict[str, int] = {}
        self._busy_until_s: defaultdict[str, list[float]] = defaultdict(list)
        with disk_errors("the trace", path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._open()

    def add(self, spans: Iterable[Span], **facts: int) -> None:
        """Append these spans, with facts that hold for all of them. Raises RunError when the disk is full."""
        with disk_errors("the trace", self._path.parent):
            for span in sorted(spans, key=lambda span: (span.start_s, -span.end_s)):
                start_us, end_us = round(span.start_s * 1e6), round(span.end_s * 1e6)
                event = {
                    "name": span.name,
                    "ph": "X",
                    "pid": _PID,
                    "tid": self._row_id(self._row_name(span)),
                    "ts": start_us,
                    "dur": max(end_us - start_us, 0),
                    "args": {**facts, **span.facts},
                }
                self._file.write(_SEPARATOR + _event(event))
            self._file.flush()
            if self._file.tell() >= self._max_bytes:
                self.close()
                os.replace(self._path, self._path.with_name(f"{self._path.stem}_previous{self._path.suffix}"))
                self._row_ids.clear()
                self._open()

    def close(self) -> None:
        with disk_errors("the trace", self._path.parent):
            if not self._file.closed:
                self._file.write(_END)
                self._file.close()

    def _open(self) -> None:
        end = self._read_rows() if self._path.exists() else 0
        self._file = self._path.open("r+b" if end else "wb")
        self._file.seek(end)
        self._file.truncate()
        if not end:
            self._file.write(_START)
            self._file.write(_event({"name": "process_name", "ph": "M", "pid": _PID, "args": {"name": "rlflow"}}))

    def _read_rows(self) -> int:
        """Take up the row names of the file; returns where its last whole event ends, 0 when it has none."""
        position = end = 0
        with self._path.open("rb") as file:
            for line in file:
                position += len(line)
                # The last event of a closed file and a torn one have no comma; only the former parses.
                try:
                    event = json.loads(line.rstrip(_SEPARATOR))
                except ValueError:
                    continue
                if not isinstance(event, dict):
                    continue
                end = position - (len(line) - len(line.rstrip(_SEPARATOR)))
                if event.get("name") == "thread_name":
                    self._row_ids[event["args"]["name"]] = event["tid"]
        return end

    def _row_name(self, span: Span) -> str:
        """The first row of the actor that is free at the start of the span."""
        rows = self._busy_until_s[span.actor]
        free = next((index for index, busy_until_s in enumerate(rows) if busy_until_s <= span.start_s), len(rows))
        rows[free : free + 1] = [span.end_s]
        return span.actor if free == 0 else f"{span.actor} ({free + 1})"

    def _row_id(self, name: str) -> int:
        if name not in self._row_ids:
            self._row_ids[name] = len(self._row_ids) + 1
            row = {"name": "thread_name", "ph": "M", "pid": _PID, "tid": self._row_ids[name], "args": {"name": name}}
            self._file.write(_SEPARATOR + _event(row))
        return self._row_ids[name]


def _event(event: dict[str, object]) -> bytes:
    return json.dumps(event, separators=(",", ":")).encode("ascii")
