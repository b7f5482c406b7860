"""Where in a log with timestamps one was, to go on from there."""

from __future__ import annotations

import re

_LINE = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d+))?Z ?(.*)", re.DOTALL)


class Position:
    """The place after the last line that was read."""

    def __init__(self) -> None:
        self._last = ("", "")
        self._catching_up = False

    def advance(self, line: str) -> str | None:
        """The text of a line such as `2026-01-31T12:00:00.5Z text`; None when it was read before."""
        match = _LINE.fullmatch(line)
        if match is None:
            return line  # a message of the server's own
        moment = (match[1], (match[2] or "").ljust(9, "0"))
        self._catching_up = self._catching_up and moment <= self._last
        if self._catching_up:
            return None
        self._last = moment
        return match[3]

    def query(self) -> dict[str, str]:
        """What to ask the API server for, so that it need not send everything again.

        It takes whole seconds; what was seen of the first one is left out by its timestamp.
        """
        second, _ = self._last
        if not second:
            return {}
        self._catching_up = True
        return {"sinceTime": f"{second}Z"}
