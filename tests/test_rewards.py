"""Reward functions that behave, and those that do not."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlflow.errors import ConfigError
from rlflow.reward_call import Shape, call, shape_of, verdict_of
from rlflow.rewards import ScorerPool
from rlflow.types import EpisodeEnd, Json, Message, Task, Verdict

TASK = Task(id="t/0", prompt=(Message(role="user", content="2+2"),), answer="4", data={"level": 3})


def misbehave(task: Task, completion: str) -> object:
    """A reward function that does what the completion says."""
    word, _, rest = completion.partition(" ")
    match word:
        case "print":
            print("noise on standard output", flush=True)
            os.write(1, b"more noise\n")
        case "raise":
            raise ValueError(rest)
        case "exit":
            raise SystemExit(rest)
        case "die":
            os._exit(3)
        case "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "hang":
            while True:
                time.sleep(1)
        case "child":
            # A process that ignores polite signals, and a parent that waits for it.
            pid = os.fork()
            if pid == 0:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                Path(rest).write_text(str(os.getpid()))
                time.sleep(600)
            os.waitpid(pid, 0)
    answers: dict[str, object] = {
        "nan": float("nan"),
        "inf": np.float32("inf"),
        "huge": 10**400,
        "text": "0.5",
        "none": None,
        "true": True,
        "list": [0.5],
        "numpy": np.float32(0.25),
        "dict": {"score": 0.5, "format": 1, "correct": True, "parsed": "4", "loss": float("nan")},
    }
    return answers.get(word, float(completion == task.answer))


async def scores_async(task: Task, completion: str) -> float:
    await asyncio.sleep(0)
    return float(completion == task.answer)


def scores_batch(completions: list[list[Message]], answer: list[str], **columns: list[object]) -> list[float | None]:
    assert columns == {"prompts": [[{"role": "user", "content": "2+2"}]], "level": [3]}
    return [float(reply[0]["content"] == right) for reply, right in zip(completions, answer, strict=True)]


def scores_solution(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, float]:
    return {"score": float(solution_str == ground_truth), "level": extra_info["level"]}


def wrong_shape(question: str, guess: str) -> float:
    return 0.0


@asynccontextmanager
async def pool_of(function: Any, timeout_s: float = 20.0, workers: int = 1) -> AsyncIterator[ScorerPool]:
    pool = ScorerPool(function, workers=workers, timeout_s=timeout_s)
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()


@pytest.mark.slow
async def test_answers_of_every_kind_and_the_process_goes_on() -> None:
    no_reward = {
        "raise by design": (EpisodeEnd.REWARD_ERROR, "ValueError: by design (test_rewards.py:"),
        "exit early": (EpisodeEnd.REWARD_ERROR, "SystemExit: early (test_rewards.py:"),
        "nan": (EpisodeEnd.REWARD_INVALID, "a reward is a finite number or None; got nan (float)"),
        "true": (EpisodeEnd.REWARD_INVALID, "a reward is a finite number or None; got True (bool)"),
        "text": (EpisodeEnd.REWARD_INVALID, "a reward is a finite number or None; got '0.5' (str)"),
        "list": (EpisodeEnd.REWARD_INVALID, "a reward is a finite number or None; got [0.5] (list)"),
        "none": (EpisodeEnd.NO_VERDICT, "the reward function returned None"),
        "die": (EpisodeEnd.REWARD_ERROR, "the scoring process exited with code 3"),
        "crash": (EpisodeEnd.REWARD_ERROR, "the scoring process was killed by SIGSEGV"),
    }
    async with pool_of(misbehave) as pool:
        for text, (end, detail) in no_reward.items():
            verdict = await pool.score(TASK, text)
            assert (verdict.reward, verdict.end) == (None, end), text
            assert verdict.detail.startswith(detail)
            assert await pool.score(TASK, "4") == Verdict(reward=1.0)
        assert await pool.score(TASK, "print") == Verdict(reward=0.0)
        assert await pool.score(TASK, "numpy") == Verdict(reward=0.25)
        assert await pool.score(TASK, "dict") == Verdict(reward=0.5, metrics={"format": 1.0, "correct": 1.0})


@pytest.mark.slow
async def test_a_hanging_function_is_killed_with_its_children(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    late = "the reward function took longer than 2 s (reward.timeout_s)"
    async with pool_of(misbehave, timeout_s=2.0) as pool:
        for text in ("hang", f"child {pid_file}"):
            assert await pool.score(TASK, text) == Verdict(reward=None, end=EpisodeEnd.REWARD_TIMEOUT, detail=late)
            assert await pool.score(TASK, "4") == Verdict(reward=1.0)
    assert not is_alive(int(pid_file.read_text()))


@pytest.mark.slow
async def test_one_hanging_process_does_not_hold_up_another_and_cancelling_frees_it() -> None:
    async with pool_of(misbehave, workers=2, timeout_s=60.0) as pool:
        hanging = asyncio.create_task(pool.score(TASK, "hang"))
        assert await asyncio.gather(*(pool.score(TASK, "4") for _ in range(5))) == [Verdict(reward=1.0)] * 5
        assert not hanging.done()
        hanging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hanging
        assert await asyncio.gather(*(pool.score(TASK, "5") for _ in range(4))) == [Verdict(reward=0.0)] * 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "metrics"), [(scores_async, {}), (scores_batch, {}), (scores_solution, {"level": 3.0})]
)
async def test_other_shapes_are_scored(function: Any, metrics: dict[str, float]) -> None:
    async with pool_of(function) as pool:
        assert await pool.score(TASK, "4") == Verdict(reward=1.0, metrics=metrics)
        assert await pool.score(TASK, "5") == Verdict(reward=0.0, metrics=metrics)


@pytest.mark.slow
async def test_a_pool_starts_at_the_first_request_and_again_after_it_was_closed() -> None:
    pool = ScorerPool(scores_async, workers=1, timeout_s=20.0)
    for _ in range(2):
        assert await asyncio.gather(pool.score(TASK, "4"), pool.score(TASK, "5")) == [
            Verdict(reward=1.0),
            Verdict(reward=0.0),
        ]
        await pool.close()


@pytest.mark.slow
async def test_closing_kills_what_is_being_scored(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    os.mkfifo(pid_file)
    pool = ScorerPool(misbehave, workers=1, timeout_s=60.0)
    scoring = asyncio.create_task(pool.score(TASK, f"child {pid_file}"))
    pid = int(await asyncio.to_thread(pid_file.read_text))
    await pool.close()
    assert (await scoring).end is EpisodeEnd.REWARD_ERROR
    async with asyncio.timeout(20):
        while is_alive(pid):
            await asyncio.sleep(0.01)


@pytest.mark.slow
async def test_a_function_in_a_file_is_loaded_by_path(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def reward(task, completion):\n    return len(completion)\n")
    async with pool_of(f"{tmp_path}/mine.py:reward") as pool:
        assert await pool.score(TASK, "abc") == Verdict(reward=3.0)


@pytest.mark.slow
async def test_a_function_that_cannot_be_used_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"wrong_shape\(question, guess\) has none of the accepted shapes"):
        await ScorerPool(wrong_shape, workers=1, timeout_s=1.0).start()
    (tmp_path / "dies.py").write_text("import os\nos._exit(7)\n")
    with pytest.raises(ConfigError, match="the scoring process exited with code 7 while it loaded the function"):
        await ScorerPool(f"{tmp_path}/dies.py:reward", workers=1, timeout_s=1.0).start()


PARENT = """
import asyncio, sys
from rlflow.rewards import ScorerPool
from rlflow.types import Task

async def main():
    pool = ScorerPool(sys.argv[1] + "/mine.py:reward", workers=1, timeout_s=600)
    await pool.start()
    await pool.score(Task(id="t", prompt=()), "")

asyncio.run(main())
"""


@pytest.mark.slow
async def test_processes_die_with_their_parent(tmp_path: Path) -> None:
    source = "import time\ndef reward(task, completion):\n    print('scoring', flush=True)\n    time.sleep(600)\n"
    (tmp_path / "mine.py").write_text(source)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    parent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PARENT, str(tmp_path)), stderr=asyncio.subprocess.PIPE, env=environment
    )
    assert parent.stderr is not None
    async with asyncio.timeout(60):
        assert await parent.stderr.readline() == b"scoring\n"
        parent.kill()
        # Standard error ends when the last process that holds it is gone, the one that scores included.
        assert await parent.stderr.read() == b""
    await parent.wait()


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


async def test_a_function_that_does_not_pickle_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cannot be sent to its scoring process.*top level of an importable module"):
        ScorerPool(lambda task, completion: 1.0, workers=1, timeout_s=1.0)


def test_shapes_are_told_by_parameter_names() -> None:
    assert shape_of(misbehave) is Shape.TASK
    assert shape_of(lambda task, text, weight=1.0: 0.0) is Shape.TASK
    assert shape_of(scores_batch) is Shape.BATCHED
    assert shape_of(scores_solution) is Shape.SOLUTION
    with pytest.raises(ConfigError, match=r"def reward\(task, completion\)"):
        shape_of(lambda task, text, weight: 0.0)


@pytest.mark.parametrize(
    ("answer", "data", "expected"),
    [
        ("4", {"reward_model": {"ground_truth": "5"}}, "4"),
        (None, {"reward_model": {"ground_truth": "5"}}, "5"),
        (None, {}, None),
    ],
)
def test_ground_truth_is_the_answer_else_the_nested_column(
    answer: str | None, data: dict[str, Json], expected: str | None
) -> None:
    task = Task(id="t", prompt=(), answer=answer, data={"data_source": "mine", "extra_info": {"split": "x"}, **data})
    seen = call(lambda **arguments: arguments, Shape.SOLUTION, task, "reply")
    assert seen == {
        "data_source": "mine",
        "solution_str": "reply",
        "ground_truth": expected,
        "extra_info": {"split": "x"},
    }


@pytest.mark.parametrize("value", [1, 1.0, np.float64(1), np.int64(1), Fraction(1), {"score": np.float32(1)}])
def test_numbers_of_every_type_are_rewards(value: object) -> None:
    verdict = verdict_of(value, Shape.TASK)
    assert (verdict.reward, type(verdict.reward)) == (1.0, float)


@pytest.mark.parametrize(
    ("value", "shape", "detail"),
    [
        (np.float32("inf"), Shape.TASK, "a reward is a finite number or None; got np.float32(inf) (float32)"),
        (np.bool_(True), Shape.TASK, "a reward is a finite number or None; got np.True_ (bool)"),
        ({"reward": 1.0, "x": 2}, Shape.TASK, 'a dict needs the key "score"; got the keys reward, x'),
        ({"score": "1"}, Shape.TASK, "a reward is a finite number or None; got '1' (str)"),
        ([1.0, 2.0], Shape.BATCHED, "a batched reward function returns a list with one number; got [1.0, 2.0] (list)"),
        (1.0, Shape.BATCHED, "a batched reward function returns a list with one number; got 1.0 (float)"),
    ],
)
def test_anything_else_is_invalid(value: object, shape: Shape, detail: str) -> None:
    assert verdict_of(value, shape) == Verdict(reward=None, end=EpisodeEnd.REWARD_INVALID, detail=detail)


def test_a_number_too_large_for_a_float_is_invalid() -> None:
    assert verdict_of(10**400, Shape.TASK).end is EpisodeEnd.REWARD_INVALID


@pytest.mark.parametrize("value", [[None], (None,)])
def test_a_batched_none_is_no_verdict(value: Sequence[None]) -> None:
    assert verdict_of(value, Shape.BATCHED).end is EpisodeEnd.NO_VERDICT
