"""`rlflow report RUN --watch`: the report over HTTP on loopback, rendered anew whenever the run has written something.

    browser --GET /KEY/ every few seconds--> files changed? -- no --> 304
                                                  +-- yes --> render -> the page, which takes the new parts over

Rules: only the machine itself is answered, only under the names of loopback (a page of another site whose name points
here is refused), and only for the key in the address, because other users of the machine reach the port too.
"""

import hmac
import secrets
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock

from rlflow.errors import ConfigError, RunError
from rlflow.telemetry import metrics
from rlflow.telemetry.report.report import render

HOST = "127.0.0.1"
REQUEST_S = 30.0
"""How long a connection may take to say what it wants, and to take the answer."""
_SOURCES = ("metrics.jsonl", "evaluations.jsonl", "alarms.jsonl", "about.json", "config.yaml", "samples")


class ReportServer(ThreadingHTTPServer):
    """Serves one page, at `address`, from `serve_forever` to `server_close`."""

    daemon_threads = True

    def __init__(self, run_dir: Path, port: int = 0) -> None:
        """Port 0 takes a free one. Raises ConfigError for one that cannot be had."""
        self._run_dir = run_dir
        self._lock = Lock()
        self._tag, self._page = "", b""
        try:
            super().__init__((HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"port {port} cannot be listened on ({error}); choose another --port") from error
        self.path = f"/{secrets.token_urlsafe(16)}/"
        self.names = {f"{name}:{self.server_port}" for name in (HOST, "localhost")}

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.server_port}{self.path}"

    def page(self, known_tag: str | None) -> tuple[str, bytes | None]:
        """(tag, page) of what the run has written until now; None for a page that has `known_tag`.

        Raises RunError for a file that the run did not write.
        """
        tag = f'"{hash(tuple(_state(self._run_dir / name) for name in _SOURCES)):x}"'
        if tag == known_tag:
            return tag, None
        with self._lock:  # one thread renders, the others take its page
            if tag != self._tag:
                path = self._run_dir / "metrics.jsonl"
                records = metrics.read(path) if path.is_file() else []
                self._page, self._tag = render(self._run_dir, records, is_watched=True).encode(), tag
            return tag, self._page

    def handle_error(self, request: object, client_address: object) -> None:
        """A browser that went away is none of ours."""


class _Handler(BaseHTTPRequestHandler):
    timeout = REQUEST_S

    def do_GET(self) -> None:
        server = self.server
        assert isinstance(server, ReportServer)
        if self.headers.get("Host") not in server.names:
            self.send_error(HTTPStatus.FORBIDDEN, "ask by the address that was printed")
            return
        if not hmac.compare_digest(self.path.encode(), server.path.encode()):
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        try:
            tag, page = server.page(self.headers.get("If-None-Match"))
        except (RunError, OSError) as error:  # such as a file that is being replaced
            self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, explain=str(error))
            return
        self.send_response(HTTPStatus.NOT_MODIFIED if page is None else HTTPStatus.OK)
        self.send_header("ETag", tag)
        self.send_header("Cache-Control", "no-cache")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        if page is not None:
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        if page is not None:
            self.wfile.write(page)

    def log_message(self, format: str, *args: object) -> None:
        """One line every few seconds would tell nobody anything."""


def watch(run_dir: Path, port: int, tell: Callable[[str], None]) -> None:
    """Serve until Ctrl-C."""
    with ReportServer(run_dir, port) as server:
        try:
            tell(f"{server.address}  (refreshes itself; Ctrl-C ends)")
            server.serve_forever()
        except KeyboardInterrupt:
            tell("ended")


def _state(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_mtime_ns, found.st_size
