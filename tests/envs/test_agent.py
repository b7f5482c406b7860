"""Programs as environments: commands in processes of their own, and functions."""

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlflow.envs.agent.command import KEPT_BYTES
from rlflow.envs.agent.data import sums
from rlflow.envs.agent.env import (
    CommandProgram,
    FunctionProgram,
    environment_of,
    filled,
    load,
    printed_result,
    result_of,
)
from rlflow.envs.base import Endpoint, Result
from rlflow.errors import ConfigError, EnvironmentFailure
from rlflow.types import Message, Task

TASK = Task(id="t/0", prompt=(Message(role="user", content="say {model}"),), answer="5", data={"level": 2})
ENDPOINT = Endpoint(base_url="http://127.0.0.1:9/s/v1", api_key="unused", model="policy")
TASKS = "rlflow.envs.agent.data:sums"


async def run(script: str, *words: str) -> Result:
    """A shell script as an agent; $1 and so on are `words`."""
    async with asyncio.timeout(20):
        return await CommandProgram(("/bin/sh", "-c", script, "sh", *words), os.getcwd()).run(TASK, ENDPOINT)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # the second where it ends between opening and reading
        return False
    return state != "Z"


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


async def test_the_task_is_its_standard_input_and_its_last_line_the_result() -> None:
    script = "import json, sys; task = json.load(sys.stdin); print(json.dumps({'reward': float(task['answer'])}))"
    result = await CommandProgram((sys.executable, "-c", script), os.getcwd()).run(TASK, ENDPOINT)
    assert result == Result(reward=5.0)


async def test_the_endpoint_and_the_seed_are_in_the_environment() -> None:
    program = CommandProgram(
        ("/bin/sh", "-c", "env | grep -E '^(OPENAI_BASE_URL|ANTHROPIC_BASE_URL|RLFLOW_)'; false"), os.getcwd(), "site-2"
    )
    program.seed = 12
    with pytest.raises(EnvironmentFailure) as failure:
        await program.run(TASK, ENDPOINT)
    text = str(failure.value)
    assert "OPENAI_BASE_URL=http://127.0.0.1:9/s/v1\n" in text
    assert "ANTHROPIC_BASE_URL=http://127.0.0.1:9/s\n" in text
    assert "RLFLOW_SEED=12" in text
    assert "RLFLOW_LEASE=site-2\n" in text


def test_loopback_is_not_asked_for_through_a_proxy() -> None:
    inherited = {"HTTPS_PROXY": "http://proxy", "no_proxy": "intern"}
    variables = environment_of(inherited, ENDPOINT, "/scratch")
    assert (variables["NO_PROXY"], variables["no_proxy"]) == ("intern,127.0.0.1", "intern,127.0.0.1")
    assert (variables["HTTPS_PROXY"], variables["TMPDIR"]) == ("http://proxy", "/scratch")


async def test_its_temporary_folder_goes_with_it(tmp_path: Path) -> None:
    note = tmp_path / "note"
    await run('echo x > "$TMPDIR/file"; test -f "$2" && echo "$TMPDIR" > "$1"', str(note), "{task_file}")
    folder = Path(note.read_text().strip())
    assert folder.name.startswith("rlflow-agent-")
    assert not folder.exists()


def test_only_known_names_are_filled_in_and_only_once() -> None:
    command = ("--ask={prompt}", "x/{model}", '{"a": {b}}', "{task_file}{lease}")
    words = filled(command, TASK, ENDPOINT, task_file="/t.json", lease="2")
    assert words == ["--ask=say {model}", "x/policy", '{"a": {b}}', "/t.json2"]


async def test_no_command_line_shows_the_secret_of_the_endpoint(tmp_path: Path) -> None:
    script = 'cat /proc/$$/cmdline /proc/$PPID/cmdline > "$1"; test "${OPENAI_BASE_URL%/s/v1}" = http://127.0.0.1:9'
    await run(script, str(tmp_path / "lines"), "{base_url}")
    lines = (tmp_path / "lines").read_bytes()
    assert str(tmp_path).encode() in lines
    assert ENDPOINT.base_url.encode() not in lines


def test_a_command_that_would_show_the_secret_is_refused() -> None:
    with pytest.raises(ConfigError, match="env.args.command has {base_url}, .* OPENAI_BASE_URL"):
        load(tasks=TASKS, command="{python} my_agent.py --url={base_url}")


async def test_an_exit_code_is_a_failure_with_the_last_words() -> None:
    message = r"exited with code 3; its standard error ends with:\nno such key"
    with pytest.raises(EnvironmentFailure, match=message):
        await run("echo '{\"reward\": 1}'; echo no such key >&2; exit 3")
    with pytest.raises(EnvironmentFailure, match="was killed by SIGSEGV and wrote nothing"):
        await run("kill -SEGV $$")


async def test_a_command_that_is_not_there_is_a_failure() -> None:
    with pytest.raises(EnvironmentFailure, match="exited with code 127"):
        await CommandProgram(("no-such-program-here",), os.getcwd()).run(TASK, ENDPOINT)


async def test_of_much_output_the_end_is_kept() -> None:
    result = await run(f"head -c {20 * KEPT_BYTES} /dev/zero; echo; echo '{{\"reward\": 2}}'")
    assert result == Result(reward=2)


async def test_a_cancelled_command_is_killed_with_its_children(tmp_path: Path) -> None:
    note = tmp_path / "note"
    running = asyncio.create_task(run('sleep 1000 & echo $! $$ > "$1.new"; mv "$1.new" "$1"; yes', str(note)))
    await eventually(note.exists)
    child, leader = map(int, note.read_text().split())
    assert is_alive(child)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await eventually(lambda: not is_alive(child) and not is_alive(leader))


async def test_a_command_may_be_cancelled_at_any_moment(tmp_path: Path) -> None:
    for number in range(20):
        note = tmp_path / str(number)
        running = asyncio.create_task(run('echo $$ > "$1.new"; mv "$1.new" "$1"; sleep 1000', str(note)))
        await asyncio.sleep(number / 4000)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await eventually(lambda note=note: not note.exists() or not is_alive(int(note.read_text())))


async def test_what_a_command_leaves_behind_is_killed_and_not_waited_for(tmp_path: Path) -> None:
    note = tmp_path / "note"
    result = await run('sleep 1000 & echo $! > "$1"; echo \'{"reward": 1}\'', str(note))
    assert result == Result(reward=1)
    await eventually(lambda: not is_alive(int(note.read_text())))


async def test_a_command_dies_with_the_process_that_ran_it(tmp_path: Path) -> None:
    note = tmp_path / "note"
    script = f"""
import asyncio, os
from rlflow.envs.agent.command import run_command
command = ["/bin/sh", "-c", "echo $$ > {note}.new; mv {note}.new {note}; sleep 1000"]
asyncio.run(run_command(command, stdin=open(os.devnull, "rb"), folder="/", environment=os.environ))
"""
    owner = await asyncio.create_subprocess_exec(sys.executable, "-c", script)
    try:
        await eventually(note.exists)
    finally:
        owner.kill()
        await owner.wait()
    await eventually(lambda: not is_alive(int(note.read_text())))


@pytest.mark.parametrize(
    ("output", "result"),
    [
        ('log\n{"reward": 0.5, "metrics": {"turns": 2}}\n\n', Result(reward=0.5, metrics={"turns": 2})),
        ('{"reward": null}', Result()),
        ('{"reward": 100}\ndone', Result()),
        ('{"answer": 3}', Result()),
        ("", Result()),
    ],
)
def test_only_the_last_line_is_the_result(output: str, result: Result) -> None:
    assert printed_result(output) == result


def test_a_result_that_is_none_is_a_failure() -> None:
    with pytest.raises(EnvironmentFailure, match="a number or None; got 'yes'"):
        result_of("yes")
    with pytest.raises(EnvironmentFailure, match="`metrics` must be an object of numbers; got 3"):
        result_of({"reward": 1.0, "metrics": 3})


def answers(task: Task, base_url: str, api_key: str, model: str) -> dict[str, Any]:
    return {"reward": float(str(task.answer or 0)), "metrics": {"urls": float(base_url == ENDPOINT.base_url)}}


async def answers_later(task: Task, base_url: str, api_key: str, model: str) -> float:
    await asyncio.sleep(0)
    return 0.5


def sleeps(task: Task, **_: str) -> None:
    time.sleep(0.2)


def exits(task: Task, **_: str) -> None:
    sys.exit("enough")


async def test_a_function_is_a_program_too() -> None:
    here = f"{__file__}:"
    assert await FunctionProgram(here + "answers").run(TASK, ENDPOINT) == Result(reward=5.0, metrics={"urls": 1.0})
    assert await FunctionProgram(here + "answers_later").run(TASK, ENDPOINT) == Result(reward=0.5)
    with pytest.raises(EnvironmentFailure, match="run: SystemExit: enough"):
        await FunctionProgram(here + "exits").run(TASK, ENDPOINT)


async def test_functions_that_block_do_so_at_once() -> None:
    asyncio.get_running_loop().set_default_executor(_one_thread())
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.01)
            ticks += 1

    ticking = asyncio.create_task(tick())
    program = FunctionProgram(f"{__file__}:sleeps")
    results = await asyncio.gather(*(program.run(TASK, ENDPOINT) for _ in range(50)))
    ticking.cancel()
    assert results == [Result()] * 50
    assert ticks > 1


def _one_thread() -> Any:
    from concurrent.futures import ThreadPoolExecutor

    return ThreadPoolExecutor(1)


def test_its_arguments_are_checked_before_the_run() -> None:
    for arguments, message in [
        ({"tasks": TASKS}, "need one of `command` and `function`; got none"),
        ({"tasks": TASKS, "command": "ls", "function": "a:b"}, "need one of `command` and `function`; got both"),
        ({"tasks": TASKS, "command": "no-such-program-here"}, "there is no program 'no-such-program-here' to run"),
        ({"tasks": TASKS, "command": []}, "env.args.command is empty"),
        ({"tasks": TASKS, "command": "ls", "folder": "/no/such"}, "env.args.folder=/no/such is not a folder"),
        ({"tasks": TASKS, "function": f"{__file__}:is_alive"}, "must take (task, base_url, api_key, model)"),
        ({"tasks": TASKS, "function": f"{__file__}:answers", "folder": "/"}, "env.args.folder=/ has no effect"),
        ({"tasks": TASKS, "function": f"{__file__}:answers", "leases": ["a"]}, "env.args.leases=['a'] has no effect"),
        ({"tasks": "nowhere.jsonl", "command": "ls"}, "env.args.tasks=nowhere.jsonl is not a file or folder"),
        ({"tasks": TASKS, "command": "ls", "system_prompt": "x"}, "env.args.system_prompt has no effect"),
    ]:
        with pytest.raises(ConfigError) as error:
            load(**arguments)  # pyright: ignore[reportArgumentType]
        assert message in str(error.value)


def test_tasks_come_from_rows_or_from_a_function(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"question": "2+2", "answer": 4}))
    spec = load(tasks=str(rows), command="{python} agent.py", evaluation_tasks=TASKS, leases=["a", "b"])
    assert spec.leases == ("a", "b")
    assert [task.answer for task in spec.tasks()] == [4]
    assert spec.evaluation_tasks is not None
    assert spec.evaluation_tasks() == sums()
    assert isinstance(spec.build(), CommandProgram)


def test_the_sums_are_those_of_their_questions() -> None:
    tasks = sums()
    assert len({task.id for task in tasks}) == 2000
    for task in tasks:
        a, b = (int(word) for word in task.prompt[0]["content"].strip("?").split() if word.isdigit())
        assert task.answer == str(a + b)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ('{"expression": "31 + 45"}', "76"),
        ('{"expression": "2 * 3"}', "error: not a sum: '2 * 3'"),
        ('{"expression": 5}', "error: expected an object with the text `expression`"),
        ("[]", "error: expected an object with the text `expression`"),
        ("{", "error: expected an object with the text `expression`"),
    ],
)
def test_the_calculator_says_what_is_wrong(arguments: str, said: str) -> None:
    pytest.importorskip("openai")
    from rlflow.envs.agent.calculator import calculate

    assert calculate(arguments).startswith(said)
