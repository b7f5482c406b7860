"""A run outlives whoever reads what it prints; real pipes, in processes of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

RUN = """
import sys
from pathlib import Path
from rlflow.runtime.streams import make_dispensable, open_closed_streams
from rlflow.telemetry.console import Console

open_closed_streams()
make_dispensable()
file = open(sys.argv[1], "w")
with Console(3, Path("run")) as console:
    for step in range(3):
        console.step({"step": step})
        console.message("saved")
        print("to the other one", file=sys.stderr)
sys.stdout.flush()
file.write("the end")
file.close()
"""


def ended(path: Path, redirect: str = "", **streams: object) -> subprocess.CompletedProcess[str]:
    command = ["sh", "-c", f'exec "$@" {redirect}', "sh", sys.executable, "-c", RUN, str(path)]
    return subprocess.run(command, text=True, timeout=60, check=False, **streams)  # type: ignore[call-overload]


def closed_pipe() -> int:
    reading, writing = os.pipe()
    os.close(reading)
    return writing


@pytest.mark.parametrize("kind", ["a reader that is gone", "a full disk"])
def test_a_run_goes_on_without_its_standard_output_and_says_so_once(tmp_path: Path, kind: str) -> None:
    output = closed_pipe() if kind == "a reader that is gone" else os.open("/dev/full", os.O_WRONLY)
    try:
        done = ended(tmp_path / "file", stdout=output, stderr=subprocess.PIPE)
    finally:
        os.close(output)
    assert (tmp_path / "file").read_text() == "the end"
    alarm, *others = done.stderr.splitlines()
    assert alarm.startswith("ALARM: standard output cannot be written") and "metrics.jsonl has every step" in alarm
    assert (done.returncode, others) == (0, ["to the other one"] * 3)


def test_a_run_goes_on_while_its_reader_does_not_read(tmp_path: Path) -> None:
    """The reader first reads when the run has written more than the pipe holds and has ended."""
    run = RUN.replace("range(3)", "range(4000)").replace(
        'file.write("the end")', 'file.write("the end"), file.flush(); input(); print("later")'
    )
    reading, writing = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", run, str(tmp_path / "file")],
            stdin=subprocess.PIPE, stdout=writing, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(writing)
        deadline_s = time.monotonic() + 60
        while (tmp_path / "file").read_text() != "the end" if (tmp_path / "file").exists() else True:
            assert time.monotonic() < deadline_s and process.poll() is None
            time.sleep(0.05)
        told = os.read(reading, 1 << 20).decode()
        assert told.startswith("step 0") and "messages" not in told
        process.communicate(b"\n", timeout=60)
        told = os.read(reading, 1 << 20).decode()
        assert re.fullmatch(r"\[[0-9]{3,} messages were not read in time\]\nlater\n", told)
        assert process.returncode == 0
    finally:
        os.close(reading)


def test_a_run_goes_on_when_nobody_reads_anything(tmp_path: Path) -> None:
    pipe = closed_pipe()
    try:
        done = ended(tmp_path / "file", stdout=pipe, stderr=pipe)
    finally:
        os.close(pipe)
    assert (done.returncode, (tmp_path / "file").read_text()) == (0, "the end")


@pytest.mark.parametrize("redirect", [">&-", "2>&-", ">&- 2>&- <&-"])
def test_a_file_does_not_take_the_place_of_a_closed_stream(tmp_path: Path, redirect: str) -> None:
    """It would get what is printed."""
    assert ended(tmp_path / "file", redirect).returncode == 0
    assert (tmp_path / "file").read_text() == "the end"


@pytest.mark.parametrize(("output", "code"), [("pipe", 141), ("full", 1)])
def test_a_short_verb_ends_quietly_when_nobody_reads_it(output: str, code: int) -> None:
    number = closed_pipe() if output == "pipe" else os.open("/dev/full", os.O_WRONLY)
    command = [sys.executable, "-m", "rlflow", "recipes"]
    try:
        done = subprocess.run(command, stdout=number, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    finally:
        os.close(number)
    assert done.returncode == code
    assert len(done.stderr.splitlines()) == (0 if output == "pipe" else 1)
