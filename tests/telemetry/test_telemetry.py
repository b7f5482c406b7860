"""What a person sees of a run: metrics file, console, samples, trace, trackers, report."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import io
import json
import re
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from functools import partial
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path

import pytest

import rlflow.run
from rlflow.cli import main
from rlflow.config import Config, TrackersConfig
from rlflow.errors import ConfigError, RunError
from rlflow.groups.evaluation import Evaluation
from rlflow.groups.scores import Score
from rlflow.rundir.directory import RunDir
from rlflow.rundir.store import CheckpointStore
from rlflow.telemetry import about, metrics, observer
from rlflow.telemetry.console import Console, Curve, sparkline
from rlflow.telemetry.metrics import REQUIRED, MetricsFile, StepRecord
from rlflow.telemetry.record import busy_share
from rlflow.telemetry.report import curves
from rlflow.telemetry.report.report import write_report
from rlflow.telemetry.samples import ShownEpisode, read_samples, rows, sampled_steps, table_row, write_samples
from rlflow.telemetry.text import duration, number, printable, shorten
from rlflow.telemetry.trace import Trace
from rlflow.telemetry.trackers import check_trackers, open_trackers
from rlflow.types import EpisodeEnd, Span

NO_SPACE = Path("/dev/full")
"""Every write to it fails as on a full disk."""


def make_record(step: int, **values: float | int | None) -> StepRecord:
    return {**dict.fromkeys(REQUIRED, 0.5), "step": step, "version": step, **values}


def write_metrics(path: Path, *records: StepRecord) -> None:
    with closing(MetricsFile(path)) as file:
        for record in records:
            file.append(record)


def make_episode(reply: str, reward: float = 1.0, task_id: str = "sum/1") -> ShownEpisode:
    return ShownEpisode(
        task_id=task_id,
        reward=reward,
        end=EpisodeEnd.COMPLETED,
        messages=[{"role": "user", "content": "2 + 3 ="}, {"role": "assistant", "content": reply}],
    )


def make_span(start_s: float, end_s: float, actor: str = "trainer-0", name: str = "train") -> Span:
    return Span(actor=actor, name=name, start_s=start_s, end_s=end_s)


# -- metrics.jsonl


def test_metrics_are_read_back_and_what_is_not_finite_is_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_metrics(path, make_record(1, loss=0.25), make_record(2, grad_norm=float("inf"), loss=float("nan"), kl=None))
    first, second = metrics.read(path)
    assert first["step"] == 1 and first["loss"] == 0.25
    assert second["grad_norm"] is None and second["loss"] is None and second["kl"] is None


def test_required_names_hold_every_reason_for_a_drop() -> None:
    dropped = [name.removeprefix("groups/dropped_") for name in REQUIRED if name.startswith("groups/dropped_")]
    assert dropped == ["stale", "filtered", "no_verdict", "failed", "cancelled", "slow"]


def test_a_record_without_a_required_name_is_a_bug(tmp_path: Path) -> None:
    record = make_record(1)
    del record["staleness/max"]
    with closing(MetricsFile(tmp_path / "metrics.jsonl")) as file, pytest.raises(AssertionError, match="staleness/max"):
        file.append(record)


def test_truncate_drops_later_steps_and_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_metrics(path, *(make_record(step) for step in (1, 2, 3, 4)))
    with path.open("a") as file:
        file.write('{"step": 5, "rew')
    assert [record["step"] for record in metrics.read(path)] == [1, 2, 3, 4]
    metrics.truncate_after(path, 2)
    write_metrics(path, make_record(3))
    assert [record["step"] for record in metrics.read(path)] == [1, 2, 3]


def test_truncate_keeps_all_lines_up_to_the_step_and_drops_only_the_torn_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_metrics(path, make_record(1), make_record(2))
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"step": 3}')
    metrics.truncate_after(path, 9)
    assert path.read_bytes() == whole
    metrics.truncate_after(tmp_path / "missing.jsonl", 1)
    assert not (tmp_path / "missing.jsonl").exists()


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(RunError, match=r"line 2 of .*metrics.jsonl"):
        metrics.read(path)


def test_missing_metrics_are_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no metrics at"):
        write_report(tmp_path)


def test_a_full_disk_says_what_to_do() -> None:
    file = MetricsFile(NO_SPACE)
    with pytest.raises(RunError, match="no disk space left for metrics"):
        file.append(make_record(1))
    with pytest.raises(RunError, match="resumes from the last complete checkpoint"):
        file.close()


# -- utilisation


@pytest.mark.parametrize(
    ("spans", "share"),
    [
        ([], 0.0),
        ([(0.0, 10.0)], 1.0),
        ([(1.0, 3.0), (2.0, 4.0), (6.0, 8.0)], 0.5),
        ([(2.0, 9.0), (3.0, 4.0)], 0.7),
        ([(6.0, 8.0), (1.0, 3.0)], 0.4),
        ([(-5.0, 1.0), (9.0, 20.0)], 0.2),
        ([(-5.0, -1.0), (11.0, 12.0), (4.0, 4.0)], 0.0),
    ],
)
def test_busy_share_is_the_union_within_the_window(spans: list[tuple[float, float]], share: float) -> None:
    assert busy_share([make_span(*span) for span in spans], 0.0, 10.0) == pytest.approx(share)


# -- text and sparkline


def test_control_characters_are_written_out() -> None:
    assert printable("a\x1b[31mb\x07\r\nc\td\x9b\u202e\ud800") == "a\\x1b[31mb\\x07\nc    d\\x9b\\u202e\\ud800"
    assert printable("naive caf\u00e9 \u4f60 \U0001f600") == "naive caf\u00e9 \u4f60 \U0001f600"


def test_shorten_keeps_both_ends() -> None:
    assert shorten("short", 5) == "short"
    assert shorten("abcdefghijklmnopqr", 9) == "abcdef [... 9 characters cut ...] pqr"


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (3, "3"), (2.0, "2"), (0.53219, "0.532"), (13412.2, "13.4k"), (2_500_000, "2.5M"),
     (0.0000123, "1.2e-05"), (-0.25, "-0.25"), (1234.5, "1234"), (float("nan"), "nan")],
)  # fmt: skip
def test_numbers_for_people(value: float | None, text: str) -> None:
    assert number(value) == text


def test_durations_for_people() -> None:
    assert [duration(seconds) for seconds in (8.44, 281, 11100, 187200)] == ["8.4 s", "4m 41s", "3h 05m", "2d 04h"]


def test_sparkline_spans_its_levels() -> None:
    assert sparkline([0, 1, 2, 3], 4, levels="abcd") == "abcd"
    assert sparkline([0, 0, 3, 3], 2, levels="abcd") == "ad"
    assert sparkline([0.5, 0.5], 5, levels="abcd") == "aa"
    assert sparkline([], 5) == ""


def test_the_curve_is_bounded_and_keeps_the_whole_run() -> None:
    curve = Curve(max_points=4)
    for value in range(1, 10):
        curve.add(value)
    assert curve.points == [2.5, 6.5, 9.0]
    for value in range(10_000):
        curve.add(value)
    assert len(curve.points) <= 4


# -- samples


def test_samples_are_written_and_read_back(tmp_path: Path) -> None:
    recorded = {"answer": "5", "metrics": {"rewards/exact": 1.0}, "advantages": [0.5], "figures": {"prompt_tokens": 7}}
    best, worst = replace(make_episode("5"), **recorded), make_episode("\x1b[2J\ud800", reward=0.0)
    for step in (10, 2):
        write_samples(tmp_path, step, best, worst)
    assert sampled_steps(tmp_path) == [2, 10]
    read = read_samples(tmp_path, 10)
    assert (read.step, read.best, read.worst) == (10, best, worst)
    assert sorted(path.name for path in (tmp_path / "samples").iterdir()) == ["step_10.json", "step_2.json"]


def test_a_foreign_samples_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "step_3.json").write_text('{"step": 3}')
    with pytest.raises(RunError, match=r"step_3.json does not hold the samples"):
        read_samples(tmp_path, 3)


def test_rows_are_bounded_and_keep_the_end() -> None:
    assert rows(make_episode("5\x1b[2J"), width=40) == ["user: 2 + 3 =", "assistant: 5\\x1b[2J"]
    shown = rows(make_episode("\n".join(str(line) for line in range(100))), width=40, max_rows=5)
    assert shown == ["[... 97 rows cut ...]", "96", "97", "98", "99"]
    assert max(len(row) for row in rows(make_episode("x" * 5000), width=40)) <= 40


# -- console


class Terminal(io.StringIO):
    """A text stream that says it is a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_anything_but_a_terminal_gets_one_plain_line_a_step() -> None:
    stream = io.StringIO()
    with Console(100, Path("runs/demo"), stream) as console:
        console.phase("starting")
        for step in (1, 2):
            console.step(make_record(step, reward=0.25, step_time=2.0, **{"throughput/tokens_per_s": 13412.0}))
            console.evaluated(0.75)
            console.phase("training")
    figures = "entropy 0.5  length 0.5, 50% cut  no signal 50%"
    others = "rollout/train 0.5/0.5 s  tokens/s 13.4k  grad norm 0.5"
    assert stream.getvalue() == (
        "starting ...\n"
        f"step 1/100  reward 0.25 (std 0.5)  {figures}  {others}  2.00 s  left 3m 18s\n"
        f"step 2/100  reward 0.25 (std 0.5)  {figures}  held-out 0.75  {others}  2.00 s  left 3m 16s\n"
    )


def test_the_age_of_tokens_is_shown_when_it_can_be_above_0() -> None:
    stream = io.StringIO()
    with Console(100, Path("runs/demo"), stream, is_asynchronous=True) as console:
        console.step(make_record(1, **{"staleness/max": 2, "queue/ready": 3}))
    assert "staleness mean/max 0.5/2  ready 3" in stream.getvalue()


def test_the_stages_of_the_start_are_told_once_with_their_times(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 1.0, 1.0, 9.0, 9.0, 12.0, 12.0, 13.0, 13.0, 14.0, 14.0])
    monkeypatch.setattr("rlflow.telemetry.console.time.monotonic", lambda: next(times))
    stream = io.StringIO()
    with Console(100, Path("runs/demo"), stream) as console:
        for phase in ("starting", "weights", "waiting for episodes", "training", "waiting for episodes"):
            console.phase(phase)
    assert stream.getvalue().splitlines() == [
        "starting ...",
        "weights ... (starting took 8.0 s)",
        "waiting for episodes ... (weights took 3.0 s)",
        "training ... (waiting for episodes took 1.0 s)",
    ]


def test_a_system_prompt_is_shown_once_and_the_answer_and_the_parts_of_a_reward_always() -> None:
    def episode(reply: str) -> ShownEpisode:
        messages = [{"role": "system", "content": "Be brief."}, *make_episode(reply).messages]
        metrics = {"rewards/right": 1.0, "rewards/brief": 0.25, "turns": 1.0}
        return replace(make_episode(reply), messages=messages, answer="5", metrics=metrics)

    stream = io.StringIO()
    with Console(1, Path("runs/demo"), stream) as console:
        console.samples(episode("5"), episode("five"))
        console.samples(make_episode("5"), episode("6"))
    assert stream.getvalue().count("system: Be brief.") == 2
    assert "-- worst: reward 1 (right 1, brief 0.25), task sum/1, completed\n" in stream.getvalue()
    assert "assistant: five\nexpected: 5\n" in stream.getvalue()


def test_plain_output_escapes_model_text_and_what_the_stream_cannot_encode() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    with Console(1, Path("runs/demo"), stream) as console:
        console.samples(make_episode("caf\u00e9 \x1b[31m[bold]"), make_episode("no", reward=0.0))
        console.alarm("grad norm\x1b is inf")
    text = raw.getvalue().decode("ascii")
    assert "assistant: caf\\xe9 \\x1b[31m[bold]\n" in text
    assert "-- worst: reward 0, task sum/1, completed\n" in text
    assert "ALARM: grad norm\\x1b is inf\n" in text


@pytest.mark.parametrize("no_color", [False, True])
def test_a_terminal_gets_a_live_display(monkeypatch: pytest.MonkeyPatch, no_color: bool) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    with Console(100, Path("runs/[demo]"), stream) as console:
        console.step(make_record(1, reward=0.0))
        console.step(make_record(2, reward=0.75))
        console.samples(make_episode("[red]5[/red] \x1b[2J"), make_episode("no"))
        console.alarm("engine and trainer disagree")
        console.phase("training")
    text = stream.getvalue()
    shown = text[text.rindex("rlflow ") :]
    for part in ("runs/[demo]", "step 2/100", "0.75", "\u2581\u2588", "grad norm", "1 alarm(s)", "training"):
        assert part in shown
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    assert max(len(line) for line in plain.splitlines()) <= 80  # also on a wide terminal, which may become narrower
    assert "step 1/100  reward 0  entropy 0.5  length 0.5, 50% cut  no signal 50%\n" in plain  # it stays
    assert "[red]5[/red] \\x1b[2J" in text
    assert "\x1b[2J" not in text
    assert ("\x1b[32m" in text) is not no_color


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    with Console(2, Path("runs/demo"), stream) as console:
        console.message("resumed at step 1")
    assert stream.getvalue() == "resumed at step 1\n"


# -- trace


def read_events(path: Path) -> list[dict]:
    return json.loads(path.read_text())


def row_names(events: list[dict]) -> dict[str, int]:
    return {event["args"]["name"]: event["tid"] for event in events if event["name"] == "thread_name"}


def test_a_closed_trace_is_json_with_one_row_for_each_actor(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with closing(Trace(path)) as trace:
        rollout = make_span(1.0, 3.0, actor="engine-0", name="rollout")
        played = replace(rollout, facts={"group": 7, "version": 2, "tokens": 90, "outcome": "4 completed"})
        trace.add([make_span(2.0, 2.5), make_span(1.0, 1.5), played], step=3)
    events = read_events(path)
    assert row_names(events) == {"engine-0": 1, "trainer-0": 2}
    assert [event for event in events if event["ph"] == "X"] == [
        {
            "name": "rollout",
            "ph": "X",
            "pid": 1,
            "tid": 1,
            "ts": 1_000_000,
            "dur": 2_000_000,
            "args": {"step": 3, "group": 7, "version": 2, "tokens": 90, "outcome": "4 completed"},
        },
        {"name": "train", "ph": "X", "pid": 1, "tid": 2, "ts": 1_000_000, "dur": 500_000, "args": {"step": 3}},
        {"name": "train", "ph": "X", "pid": 1, "tid": 2, "ts": 2_000_000, "dur": 500_000, "args": {"step": 3}},
    ]


def test_overlapping_spans_of_one_actor_get_rows_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with closing(Trace(path)) as trace:
        trace.add([make_span(0.0, 4.0), make_span(1.0, 2.0), make_span(2.0, 6.0), make_span(4.0, 5.0)])
    events = read_events(path)
    assert row_names(events) == {"trainer-0": 1, "trainer-0 (2)": 2}
    assert [event["tid"] for event in events if event["ph"] == "X"] == [1, 2, 2, 1]


@pytest.mark.parametrize("torn", [b"", b',\n{"name":"tra', b",\n", b"\n]\n"])
def test_a_trace_goes_on_after_a_kill_and_after_a_close(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "trace.json"
    first = Trace(path)
    first.add([make_span(1.0, 2.0, actor="engine-0"), make_span(1.0, 2.0)])
    first._file.close()
    path.write_bytes(path.read_bytes() + torn)
    with closing(Trace(path)) as second:
        second.add([make_span(3.0, 4.0)])
    events = read_events(path)
    assert row_names(events) == {"engine-0": 1, "trainer-0": 2}
    assert [(event["tid"], event["ts"]) for event in events if event["ph"] == "X"] == [
        (1, 1_000_000),
        (2, 1_000_000),
        (2, 3_000_000),
    ]


def test_an_empty_or_torn_first_line_starts_the_trace_anew(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(b'[\n{"name":"proc')
    with closing(Trace(path)) as trace:
        trace.add([make_span(1.0, 2.0)])
    assert [event["name"] for event in read_events(path)] == ["process_name", "thread_name", "train"]


def test_a_trace_keeps_the_newest_events_within_its_bound(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with closing(Trace(path, max_bytes=2000)) as trace:
        for second in range(200):
            trace.add([make_span(second, second + 0.5)])
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["trace.json", "trace_previous.json"]
    assert sum(file.stat().st_size for file in files) < 4400
    starts = [event["ts"] for file in reversed(files) for event in read_events(file) if event["ph"] == "X"]
    assert starts == list(range(starts[0], 200_000_000, 1_000_000))


# -- trackers


def test_tensorboard_reads_what_was_logged(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = TrackersConfig()
    [tracker] = open_trackers(config, tmp_path, {"run.steps": 3, "env.args": {}})
    for step in (1, 2, 3):
        tracker.log(step, make_record(step, reward=step / 4, kl=None, grad_norm=float("nan")))
    best = replace(make_episode("4 | 5"), answer="5", advantages=[0.5])
    tracker.samples(3, [table_row("best", best), table_row("worst", make_episode("\x1b[2J", reward=0.0))])
    tracker.close()
    [resumed] = open_trackers(config, tmp_path, {"run.steps": 3, "env.args": {}})
    resumed.log(3, make_record(3, reward=1.0))
    resumed.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward")] == [(1, 0.25), (2, 0.5), (3, 1.0)]
    assert [event.step for event in events.Scalars("kl")] == [3]
    (table,) = events.Tensors("samples")
    shown = [text.decode() for text in table.tensor_proto.string_val]
    assert shown[8:16] == ["best", "1", "sum/1", "completed", "5", "0.5", "user: 2 + 3 =", "4 | 5"]
    assert (shown[:2], shown[16:18], shown[-1]) == (["episode", "reward"], ["worst", "0"], "\\x1b[2J")
    messages = importlib.import_module("tensorboard.plugins.hparams.plugin_data_pb2")
    settings = messages.HParamsPluginData.FromString(
        events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    )
    assert settings.session_start_info.hparams["run.steps"].number_value == 3
    assert settings.session_start_info.hparams["env.args"].string_value == "{}"


@pytest.mark.parametrize(
    ("config", "package"),
    [
        (TrackersConfig(tensorboard=False, wandb_project="p"), "wandb"),
        (TrackersConfig(tensorboard=False, mlflow_experiment="e"), "mlflow"),
    ],
)
def test_a_missing_tracker_names_the_extra(tmp_path: Path, config: TrackersConfig, package: str) -> None:
    if importlib.util.find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    for look in (partial(open_trackers, config, tmp_path, {}), partial(check_trackers, config)):
        with pytest.raises(ConfigError, match=rf"pip install 'rlflow\[{package}\]'"):
            look()
    assert list(tmp_path.iterdir()) == []


def test_a_missing_tracker_is_told_before_the_run_has_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it was not installed
    monkeypatch.setattr(rlflow.run, "claim", None)  # what follows would fail
    words = ["recipe=smoke", "trackers.wandb_project=p", f"run.dir={tmp_path / 'run'}"]
    assert main(["train", *words]) == 2
    assert "needs the package wandb, which is not installed; pip install 'rlflow[wandb]'" in capsys.readouterr().err


def test_mlflow_writes_to_a_data_base_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    config = TrackersConfig(tensorboard=False, mlflow_experiment="e")
    for step in (1, 2):  # the second goes on with the first
        (tracker,) = open_trackers(config, tmp_path, {"run.steps": 2})
        tracker.log(step, make_record(step, reward=float(step)))
        tracker.close()
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    run_id = (tmp_path / "mlflow_run_id").read_text()
    history = client.get_metric_history(run_id, "reward")
    assert [(each.step, each.value) for each in history] == [(1, 1.0), (2, 2.0)]


class Broken:
    """A service that has ended."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def log(self, step: int, record: StepRecord) -> None:
        self.calls.append(f"log {step}")
        raise ConnectionError("the service ended")

    def alarm(self, text: str) -> None:
        self.calls.append(f"alarm {text}")

    def samples(self, step: int, rows: object) -> None:
        raise AssertionError("it was left out")

    def close(self) -> None:
        self.calls.append("close")
        raise ConnectionError("the service ended")


def test_a_tracker_that_fails_costs_one_alarm_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = Broken()
    trackers = [broken, *open_trackers(TrackersConfig(), tmp_path, {})]
    monkeypatch.setattr(observer, "open_trackers", lambda *_: trackers)
    config = Config()
    config.eval.every = 1
    run_dir = RunDir(path=tmp_path, checkpoints=CheckpointStore(tmp_path / "checkpoints", keep=1), resume_from=None)
    with observer.RunObserver(config, run_dir, None) as shown:
        for step in (1, 2):
            shown.evaluated(Evaluation(step=step, version=step, scores=[Score(num_tasks=1, reward=0.5)]))
    assert broken.calls == ["log 1"]
    alarms = [line for line in capsys.readouterr().out.splitlines() if "ALARM" in line]
    assert len(alarms) == 1
    assert "Broken fails, and gets nothing more of this run: ConnectionError: the service ended" in alarms[0]
    assert [record["step"] for record in metrics.read(tmp_path / "evaluations.jsonl")] == [1, 2]
    (written,) = (tmp_path / "tensorboard").iterdir()
    assert written.stat().st_size > 0


def test_a_tracker_whose_disk_is_full_costs_one_alarm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = RunDir(path=tmp_path, checkpoints=CheckpointStore(tmp_path / "checkpoints", keep=1), resume_from=None)
    config = Config()
    config.eval.every = 1
    with observer.RunObserver(config, run_dir, None) as shown:
        real = Path.open
        monkeypatch.setattr(
            Path, "open", lambda self, *how, **named: real(NO_SPACE if "tfevents" in self.name else self, *how, **named)
        )
        for step in (1, 2):
            shown.evaluated(Evaluation(step=step, version=step, scores=[Score(num_tasks=1, reward=0.5)]))
    alarms = [line for line in capsys.readouterr().out.splitlines() if "ALARM" in line]
    assert len(alarms) == 1 and "No space left on device" in alarms[0]


# -- charts and report


def test_buckets_are_bounded_and_cover_every_step() -> None:
    assert curves.bucket_bounds(10, max_points=4) == [(0, 2), (2, 5), (5, 7), (7, 10)]
    assert len(curves.bucket_bounds(10_000)) == curves.MAX_POINTS
    assert curves.bucket_bounds(0) == []


def test_a_bucket_holds_the_mean_and_the_extremes_of_its_steps() -> None:
    rows = [{"loss": value} for value in (1.0, 3.0, None, 5.0, None, None)]
    drawn = curves.column_of("loss", rows, [(0, 2), (2, 4), (4, 6)])
    assert (drawn["values"], drawn["low"], drawn["high"]) == ([2.0, 5.0, None], [1.0, 5.0, None], [3.0, 5.0, None])


def test_a_rare_spike_does_not_flatten_the_curve() -> None:
    values: list[float | None] = [1.0 + index % 2 for index in range(100)]
    values[50] = 1e6
    assert curves.axis(values) == pytest.approx((0.94, 2.06))


def test_the_band_of_a_reward_is_one_standard_deviation_to_each_side() -> None:
    records = [{"step": 1, "reward": 0.5, "reward_std": 0.25, "rewards/exact/mean": 1.0, "rewards/exact/std": 0.5}]
    drawn = curves.data_of([*records, {"step": 2, "reward": None}], [])["columns"]
    assert (drawn["reward"]["low"], drawn["reward"]["high"]) == ([0.25, None], [0.75, None])
    assert (drawn["rewards/exact/mean"]["low"], drawn["rewards/exact/mean"]["high"]) == ([0.5, None], [1.5, None])


def test_every_metric_has_a_chart_and_the_parts_of_the_reward_come_first() -> None:
    records = [make_record(1, **{"rewards/b/mean": 0.1, "rewards/b/std": 0.0, "rewards/a/mean": 0.2, "mine/own": 1.0})]
    records.append(make_record(2, **{"kl": None, "episodes/truncated_length": 3}))
    charts = curves.data_of(records, [{"step": 0, "version": 0, "eval/reward": 0.1}])["charts"]
    assert [list(chart["metrics"]) for chart in charts[:3]] == [
        ["reward", "eval/reward"],
        ["rewards/b/mean"],
        ["rewards/a/mean"],
    ]
    drawn = {name for chart in charts for name in chart["metrics"]}
    bands = {"reward_std", "rewards/b/std"}
    assert drawn | bands == {name for record in records for name in record} - {"step", "version"} | {"eval/reward"}
    assert {"mine/own", "episodes/truncated_length"} <= drawn and not bands & drawn


def test_evaluations_lie_at_their_own_steps() -> None:
    evaluations = [{"step": step, "version": step, "eval/reward": step / 10} for step in (0, 2)]
    data = curves.data_of([make_record(1, reward=0.5), make_record(2, reward=None)], evaluations)
    assert data["first"] == data["last"] == [0, 1, 2]
    assert data["columns"]["reward"]["values"] == [None, 0.5, None]
    assert data["columns"]["eval/reward"]["values"] == [0.0, None, 0.2]


def test_a_report_carries_the_library_that_draws_and_its_licence(tmp_path: Path) -> None:
    write_metrics(tmp_path / "metrics.jsonl", make_record(1))
    text = write_report(tmp_path).read_text()
    folder = resources.files("rlflow.telemetry.report") / "uplot"
    for name in ("LICENSE", "uPlot.iife.min.js", "uPlot.min.css"):
        assert (folder / name).read_text() in text


class Page(HTMLParser):
    """Checks that elements are closed in order, and collects what the page would fetch."""

    VOID = frozenset({"meta", "input"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.scripts = 0
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [value or "" for name, value in attrs if name in ("src", "href")]
        self.scripts += tag == "script"
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def drawn_data(text: str) -> dict:
    return json.loads(text.split('id="data">')[1].split("</script>")[0])


def test_report_of_an_interrupted_run_shows_everything_and_fetches_nothing(tmp_path: Path) -> None:
    records = [make_record(step, reward=step / 10, kl=None) for step in range(1, 8)]
    records[3]["grad_norm"] = float("inf")
    write_metrics(tmp_path / "metrics.jsonl", *records)
    (tmp_path / "config.yaml").write_text("run:\n  name: a <b> run\n  steps: 20\nmodel:\n  path: tiny\n")
    write_samples(tmp_path, 5, make_episode("5"), make_episode("</pre><script>alert(1)</script>\x1b[2J", reward=0.0))
    path = write_report(tmp_path)
    text = path.read_text()
    page = Page(text)
    assert page.fetched == [] and page.scripts == 2
    data = drawn_data(text)
    drawn = {name for chart in data["charts"] for name in chart["metrics"]}
    assert drawn >= {"reward", "loss", "grad_norm", "entropy", "staleness/mean", "time/train", "utilisation/train"}
    assert "kl" not in drawn
    digest = base64.b64encode(
        hashlib.sha256(text.split("<script>")[1].split("</script>")[0].encode()).digest()
    ).decode()
    assert f"default-src 'none'; connect-src 'self'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'" in text
    assert "7 of 20 steps" in text and "a &lt;b&gt; run" in text
    assert "<span>Reward, first 5 steps</span><b>0.3</b>" in text
    assert "<span>Reward, last 5 steps</span><b>0.5</b>" in text
    assert "&lt;/pre&gt;&lt;script&gt;alert(1)&lt;/script&gt;\\x1b[2J" in text
    assert data["columns"]["grad_norm"]["values"] == [0.5, 0.5, 0.5, None, 0.5, 0.5, 0.5]
    assert not path.with_name("report.html.partial").exists()


@pytest.mark.parametrize(("steps", "status"), [(0, "0 steps"), (1, "1 step"), (2, "2 steps"), (3000, "3000 steps")])
def test_report_of_any_length(tmp_path: Path, steps: int, status: str) -> None:
    write_metrics(tmp_path / "metrics.jsonl", *(make_record(step, reward=None) for step in range(1, steps + 1)))
    text = write_report(tmp_path).read_text()
    Page(text)
    assert f">{status}<" in text
    assert len(drawn_data(text)["first"]) == min(steps, curves.MAX_POINTS)
    assert len(text) < 1_000_000
    assert ("A point of a curve stands for up to 3 steps." in text) == (steps == 3000)


def test_report_shows_alarms_samples_and_who_began_the_run(tmp_path: Path) -> None:
    write_metrics(tmp_path / "metrics.jsonl", *(make_record(step) for step in range(1, 10)))
    lines = [
        {"step": 4, "name": "entropy", "state": "began", "since": 2, "what": "fell <b>", "cause": "c", "remedy": "r"},
        {"step": 7, "name": "entropy", "state": "ended", "since": 2, "what": "", "cause": "", "remedy": ""},
        {"step": 8, "name": "no_signal", "state": "began", "since": 8, "what": "w", "cause": "c", "remedy": "r"},
    ]
    (tmp_path / "alarms.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    figures = {"prompt_tokens": 31, "completion_tokens": 9, "oldest_version": 3, "newest_version": 4}
    shown = replace(
        make_episode("5"), answer="<five>", advantages=[-1.25], metrics={"rewards/exact": 1.0}, figures=figures
    )
    write_samples(tmp_path, 5, shown, make_episode("6", reward=0.0))
    about.begin(tmp_path, ["rlflow", "train", "env.args.api_key=hidden", "run.name=a b"])
    about.amend(tmp_path, machines=["host: 8 CPU, 2 GPU, H200"])
    text = write_report(tmp_path).read_text()
    Page(text)
    assert drawn_data(text)["alarms"] == [
        {"name": "entropy", "since": 2, "until": 7},
        {"name": "no_signal", "since": 8, "until": None},
    ]
    assert "<b>Step 4: fell &lt;b&gt;</b><p>c r</p>" in text and "Step 7:" not in text
    facts = {
        "expected": "&lt;five&gt;",
        "advantage": "-1.25",
        "rewards/exact": "1",
        "prompt tokens": "31",
        "oldest version": "3",
        "machines": "host: 8 CPU, 2 GPU, H200",
        "command": "rlflow train &#x27;env.args.api_key=***&#x27; &#x27;run.name=a b&#x27;",
    }
    assert [name for name, value in facts.items() if f"<dt>{name}</dt><dd>{value}</dd>" not in text] == []


def test_about_keeps_the_first_start_and_the_newest(tmp_path: Path) -> None:
    for count in range(about.MAX_STARTS + 5):
        about.begin(tmp_path, [f"start {count}"])
    about.amend(tmp_path, ended="then")
    starts = about.read(tmp_path)
    assert len(starts) == about.MAX_STARTS
    assert [start["command"] for start in (starts[0], starts[1], starts[-1])] == [
        ["start 0"],
        ["start 6"],
        ["start 54"],
    ]
    assert starts[-1]["ended"] == "then" and "ended" not in starts[-2]
    assert {"started", "user", "host", "directory", "commit", "system"} <= starts[0].keys()
    assert {"rlflow", "python", "torch", "ray"} <= starts[0]["versions"].keys()


@pytest.mark.parametrize(
    ("word", "kept"),
    [
        ("env.args.api_key=abc", "env.args.api_key=***"),
        ("+env.args.hf_token=a,b c", "+env.args.hf_token=***"),
        ("env.args={url: x, password: abc}", "env.args={url: x, password:***"),
        ("env.args.url=https://me:pass@host/x", "env.args.url=https://***@host/x"),
        ("rollout.max_new_tokens=16", "rollout.max_new_tokens=16"),
        ("reward.args.judge.key_variable=OPENAI_KEY", "reward.args.judge.key_variable=OPENAI_KEY"),
    ],
)
def test_about_has_no_secret_of_the_command_line(word: str, kept: str) -> None:
    assert about.without_secrets(word) == kept


def test_report_names_a_broken_config(tmp_path: Path) -> None:
    write_metrics(tmp_path / "metrics.jsonl", make_record(1))
    (tmp_path / "config.yaml").write_text("run: [")
    with pytest.raises(RunError, match=r"config.yaml is not YAML"):
        write_report(tmp_path)


def test_importing_telemetry_loads_none_of_the_heavy_packages() -> None:
    modules = ("console", "metrics", "report", "samples", "trace", "trackers")
    imports = "; ".join(f"import rlflow.telemetry.{module}" for module in modules)
    code = f"import sys; {imports}; print({{'torch', 'vllm', 'ray', 'rich', 'tensorboard'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "set()\n"
