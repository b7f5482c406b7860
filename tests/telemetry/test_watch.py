"""The report that is served while a run goes on."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from threading import Thread

import pytest
from test_telemetry import drawn_data, make_record, write_metrics

from rlflow.errors import ConfigError
from rlflow.telemetry.report.watch import ReportServer


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ReportServer]:
    with ReportServer(tmp_path) as server:
        serving = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        serving.start()
        yield server
        server.shutdown()
        serving.join(10)


def ask(server: ReportServer, path: str | None = None, **headers: str) -> tuple[HTTPResponse, str]:
    connection = HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request("GET", server.path if path is None else path, headers=named)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer, text


def test_the_page_follows_the_run_and_is_sent_only_when_it_has_changed(server: ReportServer, tmp_path: Path) -> None:
    answer, text = ask(server)
    assert answer.status == 200 and "No step has finished yet." in text
    assert drawn_data(text)["watched"] is True and drawn_data(text)["first"] == []
    tag = answer.headers["ETag"]
    answer, text = ask(server, If_None_Match=tag)
    assert (answer.status, text) == (304, "")
    write_metrics(tmp_path / "metrics.jsonl", make_record(1, reward=0.25))
    answer, text = ask(server, If_None_Match=tag)
    assert answer.status == 200 and answer.headers["ETag"] != tag
    assert drawn_data(text)["columns"]["reward"]["values"] == [0.25]


@pytest.mark.parametrize("host", ["evil.example", "evil.example:{port}", "127.0.0.1", ""])
def test_a_name_that_was_made_to_point_here_is_refused(server: ReportServer, host: str) -> None:
    answer, text = ask(server, Host=host.format(port=server.server_port))
    assert answer.status == 403 and "rlflow run report" not in text


def test_only_the_report_is_served_and_only_for_its_key(server: ReportServer, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("run: {name: hidden}")
    for path in ("/", "/config.yaml", f"{server.path}config.yaml", f"{server.path}../config.yaml", server.path[:-1]):
        answer, text = ask(server, path)
        assert (answer.status, "hidden" in text) == (404, False)
    assert server.server_address[0] == "127.0.0.1"


def test_a_file_that_is_not_the_runs_is_named_and_the_server_goes_on(server: ReportServer, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("run: [")
    answer, text = ask(server)
    assert answer.status == 503 and "config.yaml is not YAML" in text
    (tmp_path / "config.yaml").write_text("run: {name: mended}")
    answer, text = ask(server)
    assert answer.status == 200 and "mended" in text


def test_a_port_that_is_taken_is_named(server: ReportServer, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"port {server.server_port} cannot be listened on .* choose another --port"):
        ReportServer(tmp_path, server.server_port)


def test_ctrl_c_ends_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rlflow", "report", str(tmp_path), "--watch"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline().startswith("http://127.0.0.1:")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert (process.stdout.read(), process.stderr.read()) == ("ended\n", "")
