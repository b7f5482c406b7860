"""`rlflow submit` without a cluster: words, names, what goes along, what is checked, and how a log is followed."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import threading
import zipfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from typing import cast

import pytest
import yaml
from ray.job_submission import JobDetails, JobStatus, JobType

from rlflow.cli import main
from rlflow.cli import parse as parse_verb
from rlflow.config import Config
from rlflow.errors import ConfigError, RunError
from rlflow.tools.submit.check import check_run
from rlflow.tools.submit.command import _hand_over, _Options, add_arguments, check_options
from rlflow.tools.submit.command_words import (
    MaybeStarted,
    config_folder,
    driver_words,
    how_to_go_on,
    job_name,
    make_job,
    run_dir_of,
    where,
)
from rlflow.tools.submit.package import Package, Source, collect, write
from rlflow.tools.submit.ray_client import UnknownJob, open_client
from rlflow.tools.submit.ray_job import ConnectionLost, Follower, Waits, tell_end

TIME = "20260102-030405"
Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cli:
    """Runs `rlflow submit ARGUMENTS` in an empty folder; exit code, stdout, stderr."""
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(["submit", *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def on_ray(run_dir: str | None = "/shared/run") -> Config:
    config = Config()
    config.run.name, config.run.dir = "smoke", run_dir
    config.cluster.address = "http://head:8265"
    config.env.name = "arithmetic"
    return config


def on_kubernetes(run_dir: str | None = None) -> Config:
    config = on_ray(run_dir)
    config.cluster.address, config.cluster.kubernetes.image = "auto", "rlflow:cpu"
    return config


# -- words


@pytest.mark.parametrize(
    ("run_name", "name"),
    [
        ("grpo_7b", f"grpo-7b-{TIME}"),
        ("My Run/\u00c4", f"my-run-{TIME}"),
        ("7b", f"run-7b-{TIME}"),
        ("___", f"run-{TIME}"),
        ("a_very_long_name_of_a_recipe_for_a_pod", f"a-very-long-name-of-a-recipe-{TIME}"),
    ],
)
def test_a_jobs_name_can_be_that_of_a_pod(run_name: str, name: str) -> None:
    assert job_name(run_name, TIME) == name
    assert re.fullmatch(r"[a-z][a-z0-9-]{0,43}[a-z0-9]", name)


def test_the_driver_gets_the_users_words_and_where_it_is() -> None:
    words = ["recipe=smoke", "--config-dir", "mine", "cluster=ray", "cluster.address=http://head:8265"]
    words += ["run.dir=${oc.env:HOME}/run", "+cluster.address=x", "trainer.ranks=2"]
    kept = ("recipe=smoke", "--config-dir", "mine", "cluster=ray", "trainer.ranks=2")
    assert driver_words(words, "/shared/run") == (*kept, "run.dir=/shared/run", "cluster.address=auto")
    assert driver_words([], "/a b/it's")[0] == r"run.dir='/a b/it\'s'"
    job = make_job(on_ray(), ["recipe=smoke"], TIME)
    assert job.words[:5] == ("python", "-m", "rlflow", "train", "recipe=smoke")
    assert (job.name, job.run_dir) == (f"smoke-{TIME}", "/shared/run")


def test_where_the_run_directory_is() -> None:
    assert run_dir_of(on_kubernetes(), "smoke-1") == "/rlflow/runs/smoke-1"
    assert run_dir_of(on_kubernetes("/rlflow/mine"), "smoke-1") == "/rlflow/mine"
    with pytest.raises(ConfigError, match="run.dir is null.*thrown away.*such as run.dir=/shared"):
        run_dir_of(on_ray(None), "smoke-1")
    with pytest.raises(ConfigError, match="run.dir=runs/a .*such as /shared/runs/a"):
        run_dir_of(on_ray("runs/a"), "smoke-1")
    with pytest.raises(ConfigError, match="such as /rlflow/runs/a"):
        run_dir_of(on_kubernetes("a"), "smoke-1")


def test_the_words_that_lead_back() -> None:
    assert how_to_go_on("smoke-1", where(on_ray().cluster)).splitlines() == [
        "follow it: rlflow submit --attach smoke-1 cluster=ray cluster.address=http://head:8265",
        "stop it:   rlflow submit --stop smoke-1 cluster=ray cluster.address=http://head:8265",
    ]
    config = on_kubernetes()
    config.cluster.kubernetes.namespace = "team"
    assert where(config.cluster) == "cluster=kuberay cluster.kubernetes.namespace=team"


def parse(words: list[str]) -> _Options:
    options = cast(_Options, parse_verb(["submit", *words], add_arguments))
    check_options(options)
    return options


def test_submits_options_are_not_the_drivers() -> None:
    words = ["recipe=smoke", "--detach", "--config-dir", "mine", "--wheel", "a.whl", "x=1", "--wheel", "b.whl"]
    options = parse(words)
    assert options.words == ["recipe=smoke", "--config-dir", "mine", "x=1"]
    assert (options.detach, options.dry_run, options.wheel) == (True, False, [Path("a.whl"), Path("b.whl")])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--attach", "a", "--stop", "b"], "contradict each other"),
        (["--attach", "a", "--detach"], "--detach has no effect with --attach"),
        (["--stop", "a", "--wheel", "x.whl"], "--wheel has no effect"),
        (["--dry-run", "--detach"], "--detach has no effect with --dry-run"),
        (["-m", "run.seed=1,2"], "one job; leave --multirun out"),
    ],
)
def test_options_that_contradict_each_other(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(words)


# -- the command


def test_what_cannot_be_submitted(cli: Cli) -> None:
    ray = ["recipe=smoke", "cluster=ray", "cluster.address=http://127.0.0.1:9"]
    for words, message in [
        (["recipe=smoke"], "cluster=local is this machine; use rlflow train"),
        (["recipe=smoke", "cluster=ray", "run.dir=/r"], "cluster.address=auto is for runs on the cluster itself"),
        (["recipe=smok", "cluster=ray"], "smoke"),
        ([*ray, "run.dir=/r", "run.step=3"], "run.step"),
        (ray, "run.dir is null"),
        ([*ray, "run.dir=/r", "reward.function=my.py:score"], "there is no file"),
        ([*ray, "run.dir=/r", "--working-dir", "missing"], "--working-dir missing is not a folder"),
        ([*ray, "run.dir=/r"], "cluster.address is http://127.0.0.1:9, but no Ray dashboard answers there"),
    ]:
        code, out, err = cli(*words)
        assert (code, out) == (2, ""), words
        assert message in err


def test_a_dry_run_for_a_ray_cluster(cli: Cli, tmp_path: Path) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "my.py").write_text("def score(completion):\n    return 1.0\n")
    words = ["recipe=smoke", "cluster=ray", "cluster.address=http://127.0.0.1:9/", "run.dir=/shared/run"]
    words += ["reward.function=my.py:score", "deadlines.group_s=0.5"]
    status, out, err = cli(*words, "--dry-run", "--working-dir", str(code))
    assert (status, err) == (0, "")
    plan = yaml.safe_load(out)
    assert re.fullmatch(r"smoke-\d{8}-\d{6}", plan.pop("job"))
    assert plan == {
        "address": "http://127.0.0.1:9",
        "run_dir": "/shared/run",
        "entrypoint": "exec python -m rlflow train recipe=smoke cluster=ray reward.function=my.py:score "
        "deadlines.group_s=0.5 run.dir=/shared/run cluster.address=auto",
        "runtime_env": {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "6001"}, "working_dir": "1 file(s), 0.0 MiB"},
    }


def test_a_dry_run_for_kubernetes(cli: Cli) -> None:
    status, out, err = cli("recipe=smoke", "cluster=kuberay_cpu", "--dry-run")
    assert (status, err) == (0, "")
    assert out.startswith("# workers 0: 2.02 of 3 CPUs; engine 0, trainer 0, runner 0, reward 0\n")
    rayjob = yaml.safe_load(out)
    name = rayjob["metadata"]["name"]
    assert re.fullmatch(r"smoke-\d{8}-\d{6}", name)
    assert rayjob["spec"]["entrypoint"] == (
        f"python -m rlflow train recipe=smoke cluster=kuberay_cpu run.dir=/rlflow/runs/{name} cluster.address=auto"
    )


def test_nobody_reads_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as unread:
        monkeypatch.setattr(sys, "stdout", unread)
        assert main(["submit", "recipe=smoke", "cluster=kuberay_cpu", "--dry-run"]) == 141


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["cluster=kuberay_cpu", "cluster.pools.workers.cpus=1"], "needs .* CPUs"),
        (["cluster=kuberay_cpu", "--wheel", "x.whl"], "--working-dir and --wheel have no effect on Kubernetes"),
        (["cluster=kuberay_cpu", "run.dir=/data/run"], "run.dir=/data/run is not on cluster.kubernetes.claim"),
        (
            [
                "cluster=ray",
                "cluster.address=http://127.0.0.1:9",
                "run.dir=/r",
                "+cluster.pools={a: {machines: 1, cpus: 1, gpus: 0}}",
            ],
            "needs .* CPUs",
        ),
    ],
)
def test_what_does_not_fit_is_not_sent(cli: Cli, words: list[str], message: str) -> None:
    code, out, err = cli("recipe=smoke", *words)
    assert (code, out) == (2, "")
    assert re.search(message, err), err


# -- what goes along


def make_wheel(folder: Path, content: str = "VALUE = 1\n", extra: str | None = None) -> Path:
    path = folder / "mine-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("mine/__init__.py", content)
        wheel.writestr("mine-1.0.dist-info/entry_points.txt", "[rlflow.environments]\nmine = mine:load\n")
        if extra is not None:
            wheel.writestr(extra, "x")
    return path


def test_what_goes_along_of_a_folder(tmp_path: Path) -> None:
    for name in ("my.py", "pkg/a.py", "pkg/runs/b.py", "runs/r/x", "outputs/x", ".git/x", "pkg/__pycache__/a.pyc"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / ".gitignore").write_text("secret.txt\n")
    (tmp_path / "secret.txt").write_text("x")
    (tmp_path / "linked").symlink_to(tmp_path / "pkg")
    expected = {".gitignore", "my.py", "pkg/a.py", "pkg/runs/b.py", "linked/a.py", "linked/runs/b.py"}
    assert set(collect(tmp_path, [])) == expected


def test_a_wheel_is_unpacked_and_equal_content_is_one_archive(tmp_path: Path) -> None:
    first = collect(None, [make_wheel(tmp_path)])
    archives = []
    for number in range(2):
        archives.append(tmp_path / f"{number}.zip")
        write(first, archives[-1])
    assert archives[0].read_bytes() == archives[1].read_bytes()
    with zipfile.ZipFile(archives[0]) as archive:
        assert archive.namelist() == ["mine-1.0.dist-info/entry_points.txt", "mine/__init__.py"]
        assert archive.read("mine/__init__.py") == b"VALUE = 1\n"
    write(collect(None, [make_wheel(tmp_path, "VALUE = 2\n")]), archives[1])  # the same name, another package
    assert archives[0].read_bytes() != archives[1].read_bytes()


def test_what_cannot_go_along(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path)
    (tmp_path / "code" / "mine").mkdir(parents=True)
    (tmp_path / "code" / "mine" / "__init__.py").write_text("")
    with pytest.raises(ConfigError, match="mine/__init__.py is in .*whl and in .*code/mine"):
        collect(tmp_path / "code", [wheel])
    with pytest.raises(ConfigError, match="which only an installation can put in its place"):
        collect(None, [make_wheel(tmp_path, extra="mine-1.0.data/scripts/run")])
    with pytest.raises(ConfigError, match="missing.whl is not a wheel"):
        collect(None, [tmp_path / "missing.whl"])


def test_too_much_code_is_said_before_it_is_sent_with_what_is_big(tmp_path: Path) -> None:
    for name, size in {"my.py": 10, "data/raw/a.bin": 7 << 20, "data/raw/b.bin": 2 << 20, "notes.txt": 1 << 18}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(bytes(size))
    assert len(collect(tmp_path, [], max_bytes=10 << 20)) == 4
    biggest = r"the biggest parts are data/raw/a.bin \(7.0 MiB\), data/raw/b.bin \(2.0 MiB\)"
    with pytest.raises(ConfigError, match=f"has 9.3 MiB, .* less than 8.0 MiB; {biggest}"):
        collect(tmp_path, [], max_bytes=8 << 20)


# -- what is checked before


def packaged(*names: str) -> Package:
    return {name: Source(path=Path(name), num_bytes=1) for name in names}


def test_files_that_stay_behind_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.py").write_text("def score(completion):\n    return 1.0\n")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1", "answer": "2"}\n')
    config = on_ray()
    config.reward.function, config.env.name, config.env.args = "my.py:score", "dataset", {"path": "rows.jsonl"}
    assert check_run(config, packaged("my.py", "rows.jsonl")) == []
    with pytest.raises(ConfigError, match="env.args.path names rows.jsonl, which does not go along"):
        check_run(config, packaged("my.py"))
    with pytest.raises(ConfigError, match="reward.function names my.py, which does not go along"):
        check_run(config, packaged("rows.jsonl"))
    (tmp_path / "rows.jsonl").write_text('{"answer": "2"}\n')
    with pytest.raises(ConfigError, match="prompt"):
        check_run(config, packaged("my.py", "rows.jsonl"))


def test_what_is_on_the_cluster_only_is_said_and_not_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = on_ray()
    config.reward.function, config.model.path = "/shared/my.py:score", "/shared/model"
    notes = ["model.path: the job looks for /shared/model", "reward.function: the job looks for /shared/my.py"]
    assert check_run(config, {}) == notes
    config.env.args = {"prompt": "/no_think"}
    assert check_run(config, {}) == notes
    config.env.args = {}
    config.reward.function = "not_installed_here.rewards:score"
    assert check_run(config, {}) == [
        notes[0], "the environment and the functions: there is no module 'not_installed_here' on this machine"
    ]  # fmt: skip
    config.reward.function = "rlflow.envs.arithmetic.reward:share_of_digit"
    with pytest.raises(ConfigError, match="share_of_digits"):  # a model elsewhere keeps nothing from being checked
        check_run(config, {})


def test_on_kubernetes_files_are_on_the_claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = on_kubernetes()
    config.reward.function = "my.py:score"
    assert check_run(config, ()) == ["reward.function: the job looks for /rlflow/my.py"]
    (tmp_path / "my.py").write_text("def other(completion):\n    return 1.0\n")
    with pytest.raises(ConfigError, match="no attribute 'score'"):
        check_run(config, ())


def test_the_folder_of_settings_goes_along_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert config_folder(["recipe=smoke", "x=1"]) is None
    for words in (["--config-dir", "mine"], ["--config-dir=mine"], ["-cd", "mine"]):
        assert config_folder(["recipe=smoke", *words, "x=1"]) == PurePosixPath("mine")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    assert check_run(on_ray(), packaged("mine/cluster/big.yaml"), Path("mine")) == []
    assert check_run(on_ray(), packaged("cluster/big.yaml"), Path()) == []
    with pytest.raises(ConfigError, match="--config-dir names mine, which does not go along"):
        check_run(on_ray(), packaged("my.py"), Path("mine"))
    assert check_run(on_kubernetes(), (), Path("mine")) == ["--config-dir: the job looks for /rlflow/mine"]


# -- following


def details(status: JobStatus, **more: object) -> JobDetails:
    fields = {"type": JobType.SUBMISSION, "submission_id": "a", "entrypoint": "x", "metadata": {"run.dir": "/r"}}
    return JobDetails.model_validate({**fields, "status": status, **more})


class ScriptedJobs:
    """A cluster that answers as it was told.

    Each log is pieces of text and what breaks it off: an error, or HANG; a log beyond the last one is refused. States
    follow each other; the last one stays.
    """

    def __init__(self, logs: Sequence[Sequence[str | Exception]], states: Sequence[JobStatus | Exception] = ()) -> None:
        self._logs, self._states = list(logs), [*states, JobStatus.SUCCEEDED]

    def get_job_info(self, job_id: str) -> JobDetails:
        state = self._states.pop(0) if len(self._states) > 1 else self._states[0]
        if isinstance(state, Exception):
            raise state
        return details(state)

    async def tail_job_logs(self, job_id: str) -> AsyncIterator[str]:
        for piece in self._logs.pop(0) if self._logs else [ConnectionError("refused")]:
            if isinstance(piece, Exception):
                raise piece
            if piece == HANG:
                await asyncio.get_running_loop().create_future()
            yield piece


HANG = "hang"
BROKEN = RuntimeError("WebSocket connection closed unexpectedly with close code 1006")  # as Ray's client says it
WAITS = Waits(retry_s=0.001, give_up_s=0.05, quiet_s=0.02, reconnect_s=0.06)


async def follow(jobs: ScriptedJobs, shown: int = 0) -> tuple[str, list[str]]:
    """What a person sees of the log, and of the connection."""
    log: list[str] = []
    told: list[str] = []
    await Follower(jobs, "a", log.append, told.append, shown=shown, waits=WAITS).wait_until_ended()
    return "".join(log), told


async def test_a_log_is_shown_once_through_lost_connections() -> None:
    running = JobStatus.RUNNING
    assert await follow(ScriptedJobs([["one\n", "two\n"]])) == ("one\ntwo\n", [])
    lost = ScriptedJobs([["one\n", "t", BROKEN], ["one\nt", "wo\n", BROKEN], ["one\ntwo\nthree\n"]], [running, running])
    assert await follow(lost) == ("one\ntwo\nthree\n", [])
    unreachable = ScriptedJobs([["one\n", BROKEN], [BROKEN], ["one\ntwo\n"]], [ConnectionError("refused")] * 2)
    assert await follow(unreachable) == ("one\ntwo\n", ["no connection to the cluster (refused); trying again"])
    assert await follow(ScriptedJobs([["one\ntwo\n"]]), shown=4) == ("two\n", [])


async def test_a_log_that_breaks_off_at_the_end_is_read_to_its_end() -> None:
    jobs = ScriptedJobs([["one\n", BROKEN], ["one\ntwo\n"]], [JobStatus.FAILED, JobStatus.FAILED])
    assert await follow(jobs) == ("one\ntwo\n", [])
    assert await follow(ScriptedJobs([["one\n", BROKEN]])) == ("one\n", [])  # the head went with the rest of it


async def test_a_connection_that_was_dropped_without_a_word_is_made_again() -> None:
    states = [JobStatus.RUNNING] * 4
    assert await follow(ScriptedJobs([["one\n", HANG], ["one\ntwo\n"]], states)) == ("one\ntwo\n", [])


async def test_no_answer_is_no_failure_of_the_job() -> None:
    with pytest.raises(ConnectionLost, match="no answer for 0.05 s: refused"):
        await follow(ScriptedJobs([["one\n", BROKEN]], [ConnectionError("refused")] * 10_000))
    with pytest.raises(UnknownJob):  # the head was started anew
        await follow(ScriptedJobs([["one\n", BROKEN]], [UnknownJob("no job a")]))


async def test_a_log_that_cannot_be_read_is_said_once() -> None:
    jobs = ScriptedJobs([[BROKEN], [BROKEN], [BROKEN], ["one\n"]], [JobStatus.PENDING] + [JobStatus.RUNNING] * 2)
    assert await follow(jobs) == ("one\n", [f"the job runs, but its log cannot be read ({BROKEN}); trying again"])
    starting = ScriptedJobs([[BROKEN], [BROKEN], ["one\n"]], [JobStatus.PENDING] * 2)
    assert await follow(starting) == ("one\n", [])


async def test_a_reader_who_has_left_is_no_lost_connection() -> None:
    def show(text: str) -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        await Follower(ScriptedJobs([["one\n"]]), "a", show, print, waits=WAITS).wait_until_ended()


@pytest.mark.parametrize(
    ("status", "driver_code", "code", "message"),
    [
        (JobStatus.SUCCEEDED, 0, 0, "job a succeeded: /r"),
        (JobStatus.STOPPED, None, 143, "was stopped; submit again with run.dir=/r"),
        (JobStatus.FAILED, 143, 143, "was stopped"),  # by `rlflow stop`, or a node that was taken away
        (JobStatus.FAILED, 2, 2, "failed with exit code 2; the lines above say why; submit again with run.dir=/r"),
        (JobStatus.FAILED, -9, 137, "failed by signal 9"),
        (JobStatus.FAILED, 127, 127, "no such command: `python` must be on the PATH of the cluster's Ray processes"),
        (JobStatus.FAILED, None, 1, "failed; submit again with run.dir=/r .*\nRay says"),
    ],
)
def test_how_a_job_ended_is_said_and_is_the_exit_code(
    capsys: pytest.CaptureFixture[str], status: JobStatus, driver_code: int | None, code: int, message: str
) -> None:
    assert tell_end(details(status, driver_exit_code=driver_code, message="Ray says why")) == code
    assert re.search(message, capsys.readouterr().err)


# -- the dashboard


@contextmanager
def dashboard(status: int, body: str) -> Iterator[str]:
    """The address of a server that answers everything so."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.do_GET()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (401, "Missing", "asks for a token, and none was sent; set RAY_AUTH_MODE=token"),
        (403, "Invalid", "asks for a token, and it does not take the one that was found here"),
        (404, "nothing", "no Ray dashboard answers there"),
        (200, "<html>a proxy</html>", "no Ray dashboard answers there"),
        (503, "busy", "no Ray dashboard answers there"),
    ],
)
def test_a_dashboard_that_does_not_let_us_in(
    monkeypatch: pytest.MonkeyPatch, status: int, body: str, message: str
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:9")  # Ray would take it instead
    with dashboard(status, body) as address, pytest.raises(ConfigError, match=f"{address}.* {message}"):
        open_client(address)


def test_an_unknown_job_is_said_to_be_unknown() -> None:
    with dashboard(200, json.dumps({"ray_version": "2.60.0"})) as address:
        client = open_client(address)
    with dashboard(404, "Job a does not exist") as address:
        client._address = address
        with pytest.raises(UnknownJob, match="has no job a"):
            client.get_job_info("a")


def test_a_start_without_an_answer_may_have_been_one(capsys: pytest.CaptureFixture[str]) -> None:
    with dashboard(200, json.dumps({"ray_version": "2.60.0"})) as address:
        client = open_client(address)
    with pytest.raises(MaybeStarted, match="did not answer: "):  # nobody listens there any more
        client.submit_job(entrypoint="x")
    with dashboard(503, "busy") as address:
        client._address = address
        with pytest.raises(MaybeStarted, match="answers 503: busy"):
            client.submit_job(entrypoint="x")
    with dashboard(400, "no") as address:
        client._address = address
        with pytest.raises(RunError, match="refuses: no"):
            client.submit_job(entrypoint="x")

    def start() -> None:
        raise MaybeStarted("no answer")

    config = on_ray()
    assert _hand_over(config, parse([]), make_job(config, [], TIME), start, len) == 75
    said = capsys.readouterr().err
    assert (
        f"no answer; it may have been started all the same:\njob smoke-{TIME}, run.dir /shared/run\nfollow it: " in said
    )
