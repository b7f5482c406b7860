"""What another user of this machine gets from each port of a run: a table.

    sudo .venv/bin/python benchmarks/other_user.py [setting=value ...]

A run of the tiny model is started as the user that runs this, which must be root, because the attempts are made as
user 65534. To each TCP port on which the run listens they connect, ask for a page over HTTP, call Ray over gRPC without
a token, and ask as a client of torch's store. Then they try the run's files, sockets and shared memory.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from listening import ports_of, socket_files  # pyright: ignore[reportMissingImports]  of the tests

SETTINGS = (
    "recipe=smoke", "trainer.ranks=2", "rollout.engines=2", "cluster.reference_ranks=2",
    "algorithm.kl_coefficient=0.01", "weights.transport=p2p", "run.steps=1000000", "run.checkpoint_every=0",
)  # fmt: skip
OTHER = 65534
PROBE = r"""
import json, socket, struct, sys

def talk(port, sent, wait=0.5):
    with socket.create_connection(("127.0.0.1", port), timeout=wait) as each:
        if sent:
            each.sendall(sent)
        try:
            return each.recv(4096)
        except TimeoutError:
            return b"(silence)"
        except ConnectionError:
            return b"(closed)"

def grpc(port):
    # HTTP/2: preface, empty settings, one request without a token.
    def literal(name, value):
        return bytes([0, len(name)]) + name + bytes([len(value)]) + value
    headers = b"".join(literal(*pair) for pair in (
        (b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/ray.rpc.NodeInfoGcsService/GetAllNodeInfo"),
        (b":authority", b"x"), (b"content-type", b"application/grpc"), (b"te", b"trailers")))  # codespell:ignore te
    def frame(kind, flags, stream, payload):
        return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload
    sent = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b"") + frame(1, 4, 1, headers)
    sent += frame(0, 1, 1, bytes(5))
    found = b""
    with socket.create_connection(("127.0.0.1", port), timeout=0.5) as each:
        each.sendall(sent)
        try:
            while part := each.recv(4096):
                found += part
        except (TimeoutError, ConnectionError):
            pass
    return found

def store(port):
    # torch's own protocol: validate with its magic number, ping, and read the answer.
    return talk(port, struct.pack("<BI", 0, 0x3C85F7CE) + struct.pack("<BI", 13, 0x01020304))

answers = {}
for port in json.loads(sys.argv[1]):
    try:
        page = talk(port, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").split(b"\r\n")[0].decode("latin1")[:60]
        called, stored = grpc(port), store(port)
        answers[port] = [page, "unauthenticated" if b"oken" in called or b"nauth" in called else f"{len(called)} bytes",
                         "yes" if stored == struct.pack("<I", 0x01020304) else "no"]
    except OSError as error:
        answers[port] = [str(error), "", ""]
opened = []
for path in json.loads(sys.argv[2]):
    try:
        if path.startswith("socket:"):
            socket.socket(socket.AF_UNIX).connect(path.removeprefix("socket:"))
        else:
            open(path, "rb").close()
        opened.append(path)
    except OSError:
        pass
print(json.dumps([answers, opened]))
"""


def main() -> None:
    if os.geteuid() != 0:
        sys.exit("other_user: error: only root can try what another user can do; run it with sudo")
    with tempfile.TemporaryDirectory(prefix="rlflow-other-user-") as folder:
        command = [sys.executable, "-m", "rlflow", "train", *SETTINGS, f"run.dir={folder}/run", *sys.argv[1:]]
        run = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        try:
            assert run.stdout is not None
            for line in run.stdout:
                if "step 2/" in line:
                    break
            ports = ports_of(run.pid)
            files = [f"socket:{path}" for path in socket_files(run.pid)]
            files += [str(path) for path in Path("/dev/shm").iterdir() if path.is_file()]
            files += [str(path) for path in Path(folder).rglob("*") if path.is_file()]
            answers, opened = _as_other_user(sorted(ports), files)
            ended = run.poll()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGINT)
            run.wait(60)
    print("| port | process | HTTP | Ray without a token | torch's store |\n|---|---|---|---|---|")
    for port, process in sorted(ports.items(), key=lambda item: item[1]):
        print(f"| {port} | {process} | " + " | ".join(answers[str(port)]) + " |")
    print(f"files, sockets and shared memory that opened: {opened or 'none'} of {len(files)}")
    print(f"the run {'goes on' if ended is None else f'ended with {ended}'}")


def _as_other_user(ports: list[int], files: list[str]) -> tuple[dict[str, list[str]], list[str]]:
    probe = [
        "setpriv",
        f"--reuid={OTHER}",
        f"--regid={OTHER}",
        "--clear-groups",
        sys.executable,
        "-I",
        "-S",
        "-c",
        PROBE,
    ]
    done = subprocess.run([*probe, json.dumps(ports), json.dumps(files)], capture_output=True, text=True, check=True)
    answers, opened = json.loads(done.stdout)
    return answers, opened


if __name__ == "__main__":
    main()
