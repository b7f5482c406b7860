"""`rlflow chat` and `rlflow serve` with vLLM's server and the tiny model."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

RLFLOW = [sys.executable, "-m", "rlflow"]


def folder_of(server: int) -> Path:
    """Its temporary files."""
    variables = Path(f"/proc/{server}/environ").read_bytes().split(b"\0")
    return Path(next(each[7:] for each in variables if each.startswith(b"TMPDIR=")).decode())


def children_of(parent: int) -> list[int]:
    """Processes that `parent` started, by what /proc says."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == parent:
            found.append(int(stat.parent.name))
    return found


def test_serve_names_a_wrong_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from rlflow.cli import main

    assert main(["serve", str(tmp_path / "none")]) == 2
    assert "is not a folder; give a folder, a hub id or one of smollm2-135m, tiny" in capsys.readouterr().err
    assert main(["chat", "tiny", "--step", "3"]) == 2
    assert "--step has no effect on tiny, which is not a run's directory" in capsys.readouterr().err


@pytest.mark.proof
@pytest.mark.slow
def test_a_chat_streams_and_leaves_nothing_behind() -> None:
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    # 64 bytes may end within a character.
    with subprocess.Popen([*RLFLOW, "chat", "tiny"], **pipes, text=True, errors="replace", bufsize=1) as chat:
        assert chat.stdin is not None and chat.stdout is not None
        assert chat.stdout.readline() == "loading tiny ...\n"
        assert chat.stdout.readline() == "Ctrl-C ends a reply, Ctrl-D the chat\n"
        (server,) = children_of(chat.pid)
        folder = folder_of(server)
        assert (folder / "socket").is_socket()
        chat.stdin.write("hello\n")
        os.read(chat.stdout.fileno(), 2)  # the prompt
        assert os.read(chat.stdout.fileno(), 64)  # the reply begins
        chat.send_signal(signal.SIGINT)
        rest = chat.communicate(timeout=60)[0]
        assert chat.returncode == 0
        assert "> " in rest
    assert not folder.exists()
    assert not Path(f"/proc/{server}").exists()


@pytest.mark.slow
def test_a_served_model_answers_those_who_know_the_key_and_ends_with_its_command() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with subprocess.Popen([*RLFLOW, "serve", "tiny", "--port", str(port)], stdout=subprocess.PIPE, text=True) as serve:
        assert serve.stdout is not None
        said = "".join(serve.stdout.readline() for _ in range(5))
        key = re.search(r"^key +(\S+)$", said, re.MULTILINE)
        assert key is not None, said
        (server,) = children_of(serve.pid)
        folder = folder_of(server)
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
        address = f"http://127.0.0.1:{port}/v1/chat/completions"
        with pytest.raises(HTTPError, match="401"):
            urlopen(Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"}), timeout=60)
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key[1]}"}
        with urlopen(Request(address, json.dumps(body).encode(), headers), timeout=60) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 4
        serve.send_signal(signal.SIGINT)
        assert serve.wait(60) == 130
    assert not folder.exists()
    assert not Path(f"/proc/{server}").exists()
