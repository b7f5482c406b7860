"""Reward functions that behave, and those that do not."""

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transcripts import said, task_with

from rlflow.errors import ConfigError
from rlflow.rewards.call import ChosenReward
from rlflow.rewards.client import with_group
from rlflow.rewards.pool import ScorerPool
from rlflow.types import EpisodeEnd, Message, Task, Verdict


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
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            while True:
                time.sleep(1)
        case "child":
            # A process that leaves the group and ignores polite signals, and a parent that waits for it.
            pid = os.fork()
            if pid == 0:
                os.setsid()
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                Path(rest).write_text(str(os.getpid()))
                time.sleep(600)
            os.waitpid(pid, 0)
        case "fork":
            os.fork()
        case "meddle":
            for descriptor in os.listdir("/proc/self/fd"):
                if os.path.islink(link := f"/proc/self/fd/{descriptor}") and os.readlink(link).startswith("socket:"):
                    os.write(int(descriptor), b"\xff\xff\xff\xff" if rest == "long" else b"\0\0\0\4oops")
        case "keys":
            return float(any(name.startswith("RAY_AUTH_TOKEN") for name in os.environ))
        case "memory":
            return [0] * (1 << 62)
        case "flood":
            return {"score": 1.0, **{f"{'x' * 1000}{index}": index for index in range(10_000)}}
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


async def exits_later(completion: str) -> float:
    await asyncio.sleep(0)
    raise SystemExit(completion)


def scores_group(completions: list[list[Message]], answer: list[str], **columns: object) -> list[float | None]:
    assert columns["prompts"] == [[{"role": "user", "content": "2+2"}]] * 2 and columns["level"] == [3, 3]
    assert columns["completion_ids"] == [[7, -1], []]
    return [float(reply[-1]["content"] == right) for reply, right in zip(completions, answer, strict=True)]


def misbehaves_on_groups(completions: list[list[Message]]) -> list[float]:
    if completions[0][-1]["content"] == "hang":
        time.sleep(600)
    raise ValueError("by design")


def scores_solution(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, float]:
    return {"score": float(solution_str == ground_truth), "level": extra_info["level"]}


def looks_at_everything(
    messages: list[Message], end: EpisodeEnd, num_sampled: int, environment_reward: float, timeout_s: float
) -> dict[str, float]:
    assert (end, timeout_s) == (EpisodeEnd.MAX_TURNS, 20.0)
    return {"score": environment_reward, "messages": len(messages), "tokens": num_sampled}


def positional(guess: str, /) -> float:
    return 0.0


def chosen(function: Any, name: str = "mine", **changes: Any) -> ChosenReward:
    return ChosenReward(name=name, function=function, **changes)


@asynccontextmanager
async def pool_of(*functions: Any, timeout_s: float = 20.0, workers: int = 1) -> AsyncIterator[ScorerPool]:
    rewards = [each if isinstance(each, ChosenReward) else chosen(each) for each in functions]
    pool = ScorerPool(rewards, workers=workers, timeout_s=timeout_s)
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()


def gives(reward: float, **metrics: float) -> Verdict:
    named = {f"rewards/mine/{name}": value for name, value in metrics.items()}
    return Verdict(reward=reward, metrics={"rewards/mine": reward, **named})


@pytest.mark.slow
async def test_answers_of_every_kind_and_the_process_goes_on() -> None:
    meddled = "the scoring process was killed by SIGKILL, for it sent what it must not"
    no_reward = {
        "raise by design": (EpisodeEnd.REWARD_ERROR, "mine: ValueError: by design (test_rewards.py:"),
        "exit early": (EpisodeEnd.REWARD_ERROR, "mine: SystemExit: early (test_rewards.py:"),
        "memory": (EpisodeEnd.REWARD_ERROR, "mine: MemoryError: "),
        "nan": (EpisodeEnd.REWARD_INVALID, "mine: a reward is None, or a number from -1e+15 to 1e+15; got nan (float)"),
        "text": (
            EpisodeEnd.REWARD_INVALID,
            "mine: a reward is None, or a number from -1e+15 to 1e+15; got '0.5' (str)",
        ),
        "list": (
            EpisodeEnd.REWARD_INVALID,
            "mine: a reward is None, or a number from -1e+15 to 1e+15; got [0.5] (list)",
        ),
        "none": (EpisodeEnd.NO_VERDICT, "mine: returned None"),
        "kill": (
            EpisodeEnd.REWARD_ERROR,
            "the scoring process was killed by SIGKILL; the kernel does that when memory",
        ),
        "die": (EpisodeEnd.REWARD_ERROR, "the scoring process exited with code 3"),
        "crash": (EpisodeEnd.REWARD_ERROR, "the scoring process was killed by SIGSEGV"),
        "meddle long": (EpisodeEnd.REWARD_ERROR, f"{meddled} (4294967295 bytes, more than the 1048576 "),
        "meddle": (EpisodeEnd.REWARD_ERROR, f"{meddled} (an answer that is no verdict: b'oops')"),
    }
    async with pool_of(misbehave) as pool:
        for text, (end, detail) in no_reward.items():
            verdict = await pool.score(said(text))
            assert (verdict.reward, verdict.end) == (None, end), text
            assert verdict.detail.startswith(detail)
            assert await pool.score(said("4")) == gives(1.0)
        for _ in range(2):
            assert await pool.score(said("fork")) == gives(0.0)
            assert await pool.score(said("4")) == gives(1.0)
        assert await pool.score(said("print")) == gives(0.0)
        assert await pool.score(said("true")) == gives(1.0)
        assert await pool.score(said("numpy")) == gives(0.25)
        assert await pool.score(said("dict")) == gives(0.5, format=1.0, correct=1.0)
        flood = await pool.score(said("flood"))
        assert (flood.reward, len(str(flood.metrics)) < 20_000) == (1.0, True)


@pytest.mark.slow
async def test_a_function_is_not_given_what_opens_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/home/me/secret")
    async with pool_of(misbehave) as pool:
        assert await pool.score(said("keys")) == gives(0.0)


@pytest.mark.slow
async def test_a_hanging_function_is_killed_with_its_children(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    late = "mine: took longer than 2 s (reward.timeout_s)"
    async with pool_of(misbehave, timeout_s=2.0) as pool:
        for text in ("hang", f"child {pid_file}"):
            assert await pool.score(said(text)) == Verdict(reward=None, end=EpisodeEnd.REWARD_TIMEOUT, detail=late)
            assert await pool.score(said("4")) == gives(1.0)
    assert not is_alive(int(pid_file.read_text()))


@pytest.mark.slow
async def test_a_function_that_fails_on_a_group_costs_the_group() -> None:
    late = "mine: took longer than 2 s (reward.timeout_s for each of 2 episodes)"
    async with pool_of(misbehaves_on_groups, timeout_s=1.0) as pool:
        episodes = [(each, await pool.score(each)) for each in (said("hang"), said("4"))]
        assert [part.awaits_group for _, part in episodes] == [True, True]
        verdicts = await with_group(pool, episodes)
        assert verdicts == [Verdict(reward=None, end=EpisodeEnd.REWARD_TIMEOUT, detail=late)] * 2
        for verdict in await with_group(pool, episodes[1:]):
            assert verdict.end is EpisodeEnd.REWARD_ERROR
            assert verdict.detail.startswith("mine: ValueError: by design (test_rewards.py:")


@pytest.mark.slow
async def test_one_hanging_process_does_not_hold_up_another_and_cancelling_frees_it() -> None:
    async with pool_of(misbehave, workers=2, timeout_s=60.0) as pool:
        hanging = asyncio.create_task(pool.score(said("hang")))
        assert await asyncio.gather(*(pool.score(said("4")) for _ in range(5))) == [gives(1.0)] * 5
        assert not hanging.done()
        hanging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hanging
        assert await asyncio.gather(*(pool.score(said("5")) for _ in range(4))) == [gives(0.0)] * 4


@pytest.mark.slow
async def test_several_functions_of_every_shape_are_one_verdict() -> None:
    rewards = [
        chosen(scores_async, "async"),
        chosen(scores_group, "group", weight=2.0),
        chosen(scores_solution, "solution", weight=-0.5),
        chosen(None, "environment", weight=0.0),
        chosen("rlflow.envs.rewards.length:length", "length", args={"limit": 2}),
        chosen(misbehave, "silent"),
    ]
    async with pool_of(*rewards) as pool:
        ids = np.array([7, -1], np.int32)
        first = said("4", environment_reward=7.0, num_sampled=3, completion_ids=ids)
        group = [first, said("5", environment_reward=7.0, num_sampled=1)]
        verdict, wrong = await with_group(pool, [(each, await pool.score(each)) for each in group])
        assert wrong.reward == 0.0
        assert verdict.reward == pytest.approx(1.0 + 2.0 - 0.5 - 0.5 + 1.0)
        assert verdict.metrics == {
            "rewards/async": 1.0,
            "rewards/group": 1.0,
            "rewards/solution": 1.0,
            "rewards/solution/level": 3.0,
            "rewards/environment": 7.0,
            "rewards/length": -0.5,
            "rewards/silent": 1.0,
        }
        failed = await pool.score(said("raise by design"))
        assert (failed.reward, failed.end) == (None, EpisodeEnd.REWARD_ERROR)
        assert failed.detail.startswith("silent: ValueError: by design")


@pytest.mark.slow
async def test_a_function_sees_the_whole_episode_and_one_that_exits_later_is_an_error() -> None:
    episode = said("a", "b", end=EpisodeEnd.MAX_TURNS, environment_reward=0.5, num_sampled=9)
    async with pool_of(looks_at_everything) as pool:
        assert await pool.score(episode) == gives(0.5, messages=3.0, tokens=9.0)
    async with pool_of(exits_later) as pool:
        for _ in range(2):
            verdict = await pool.score(said("bye"))
            assert (verdict.end, verdict.detail[:20]) == (EpisodeEnd.REWARD_ERROR, "mine: SystemExit: by")


@pytest.mark.slow
async def test_a_pool_starts_at_the_first_request_and_again_after_it_was_closed() -> None:
    pool = ScorerPool([chosen(scores_async)], workers=1, timeout_s=20.0)
    for _ in range(2):
        assert await asyncio.gather(pool.score(said("4")), pool.score(said("5"))) == [gives(1.0), gives(0.0)]
        await pool.close()


@pytest.mark.slow
async def test_closing_kills_what_is_being_scored(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    os.mkfifo(pid_file)
    pool = ScorerPool([chosen(misbehave)], workers=1, timeout_s=60.0)
    scoring = asyncio.create_task(pool.score(said(f"child {pid_file}")))
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
        assert await pool.score(said("abc")) == gives(3.0)


@pytest.mark.slow
async def test_a_function_that_cannot_be_used_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"positional\(guess\) cannot be called: guess has no name to callers"):
        await ScorerPool([chosen(positional)], workers=1, timeout_s=1.0).start()
    (tmp_path / "dies.py").write_text("import os\nos._exit(7)\n")
    with pytest.raises(ConfigError, match="the scoring process exited with code 7 while it loaded the function"):
        await ScorerPool([chosen(f"{tmp_path}/dies.py:reward")], workers=1, timeout_s=1.0).start()


PARENT = """
import asyncio, sys
from rlflow.rewards.call import ChosenReward
from rlflow.rewards.pool import ScorerPool
from rlflow.types import EpisodeEnd, Task, Transcript

async def main():
    reward = ChosenReward(name="mine", function=sys.argv[1] + "/mine.py:reward")
    pool = ScorerPool([reward], workers=1, timeout_s=600)
    await pool.start()
    task = Task(id="t", prompt=())
    end = EpisodeEnd.COMPLETED
    await pool.score(
        Transcript(task=task, prompt=(), completion=(), environment_reward=None, end=end, num_sampled=0)
    )

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
    lock = threading.Lock()
    with pytest.raises(ConfigError, match=r"cannot be sent to the scoring process.*top level of an importable module"):
        ScorerPool([chosen(lambda task, completion: float(lock.locked()))], workers=1, timeout_s=1.0)


async def test_a_task_that_json_cannot_hold_is_named() -> None:
    pool = ScorerPool([chosen(scores_async)], workers=1, timeout_s=1.0)
    with pytest.raises(ConfigError, match=r"task 't/1' has data that JSON cannot hold"):
        await pool.score(said("4", task=task_with(rows={1, 2})))  # pyright: ignore[reportArgumentType]


async def test_what_is_too_long_for_one_message_is_named() -> None:
    too_long = "x" * (17 << 20)
    with pytest.raises(
        ConfigError, match="reward.args cannot be sent to the scoring process: 1782.* more than the 16777216"
    ):
        ScorerPool([chosen(scores_async, args={"text": too_long})], workers=1, timeout_s=1.0)
    pool = ScorerPool([chosen(scores_async)], workers=1, timeout_s=1.0)
    with pytest.raises(
        ConfigError, match="task 't/1': its episode cannot be sent to the scoring process: 3565.* bytes"
    ):
        await pool.score(said("4", task=task_with(text=too_long, again=too_long)))
    long = said("x" * (10 << 20))
    for verdict in await pool.score_group([long, long]):
        assert verdict.end is EpisodeEnd.REWARD_ERROR
        assert verdict.detail.startswith("the 2 episodes of the group cannot be sent to the scoring process: 2097")
