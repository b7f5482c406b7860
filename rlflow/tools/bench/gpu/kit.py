"""`rlflow bench gpu`: every stage in a process of its own, with a deadline and a line of result.

    machine, model -> Plan -> stage after stage -> bench-gpu.md, bench-gpu.json, bench-gpu/STAGE.log

A stage that fails, hangs or is killed costs itself only, and keeps what it had measured. The files are written anew
after each stage, so that an interrupted kit loses nothing either.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rlflow.errors import ConfigError
from rlflow.processes.sandbox import linux
from rlflow.tools.bench.gpu.plan import DEFAULT_ON_CPU, DEFAULT_ON_GPU, RANDOM, SHAPES, Figure, Plan, Report, file_name

MINUTES = 60.0
PREPARE_S = 900.0
"""The limit for the two stages before the others: a cold disk, a model that is downloaded or written."""
GRACE_S = 5.0
"""Between asking the processes of a stage to end and killing them."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Stage:
    name: str
    share: float
    """Its part of the time that is left, beside the shares of the stages that are still to come."""
    least_s: float
    """A stage that has less than this is not begun."""
    measures: str


STAGES = (
    Stage(name="tests/cuda", share=8, least_s=60, measures="the CUDA tests of a checkout"),
    Stage(name="trainer/kernels", share=5, least_s=30, measures="attention and log-probabilities against float64"),
    Stage(name="trainer/packed", share=6, least_s=30, measures="a training step, shared prefixes computed once"),
    Stage(name="trainer/copies", share=6, least_s=30, measures="the same with a copy of the prompt for each sample"),
    Stage(name="trainer/padded", share=6, least_s=30, measures="the same as padded batches of transformers"),
    Stage(name="engine/stream", share=8, least_s=60, measures="replies through rlflow's engine"),
    Stage(name="engine/plain", share=6, least_s=60, measures="the same prompts through vLLM's LLM.generate"),
    Stage(name="weights/ipc", share=8, least_s=90, measures="new weights from the memory of the same GPU"),
    Stage(name="weights/shm", share=8, least_s=90, measures="new weights through the memory of the CPU"),
    Stage(name="weights/p2p", share=8, least_s=90, measures="new weights from GPU to GPU"),
    Stage(name="engine/sleep", share=6, least_s=60, measures="an engine that sleeps and wakes with new weights"),
    Stage(name="trainer/offload-cpu", share=5, least_s=30, measures="a step with the state in CPU memory"),
    Stage(name="trainer/offload-nvme", share=6, least_s=60, measures="a step with the state on a disk"),
    Stage(name="run/grpo", share=12, least_s=120, measures="20 steps of GRPO, engine and trainer on one GPU"),
    Stage(name="run/trl", share=6, least_s=60, measures="TRL's trainer on the samples of trainer/packed"),
)
"""In the order in which an hour is spent best: what else depends on comes first."""


@dataclass(kw_only=True, slots=True)
class Result:
    """How a stage ended. `status` is done, failed or skipped."""

    stage: str
    status: str = "skipped"
    why: str = ""
    seconds: float = 0.0
    figures: dict[str, Figure] = field(default_factory=dict)
    log: str = ""


@dataclass(kw_only=True, slots=True)
class Kit:
    """What has been found so far."""

    folder: Path
    machine: dict[str, Figure] = field(default_factory=dict)
    model: str = ""
    results: list[Result] = field(default_factory=list)

    @property
    def on_gpu(self) -> bool:
        return bool(self.machine.get("on_gpu"))

    def write(self) -> None:
        """bench-gpu.md and bench-gpu.json beside the folder of the logs."""
        beside = self.folder.parent / self.folder.name
        beside.with_suffix(".json").write_text(json.dumps(self.as_json(), indent=1) + "\n")
        beside.with_suffix(".md").write_text(self.as_text())

    def as_json(self) -> dict[str, Any]:
        stages = [asdict(result) for result in self.results]
        return {"machine": self.machine, "model": self.model, "stages": stages}

    def as_text(self) -> str:
        measures = {stage.name: stage.measures for stage in STAGES}
        about = [f"- {name.replace('_', ' ')}: {_shown(value)}" for name, value in self.machine.items()]
        rows = [
            f"| {each.stage} | {measures[each.stage]} | {each.status}{': ' if each.why else ''}{_cell(each.why)} | "
            f"{_figures(each.figures)} | {each.seconds:.0f} |"
            for each in self.results
        ]
        stand_in = [] if self.on_gpu else ["", "No GPU: every stage is a stand-in on the CPU, with small sizes."]
        header = ["| stage | what | result | figures | s |", "|---|---|---|---|---|"]
        lines = ["# rlflow bench gpu", "", *about, f"- model: {self.model}", *stand_in, "", *header, *rows]
        return "\n".join(lines) + "\n"


def chosen(only: Sequence[str] | None) -> list[Stage]:
    """The stages that `only` names, whole or by what they begin with; all without it. Raises ConfigError."""
    for word in only or ():
        if not any(stage.name.startswith(word) for stage in STAGES):
            names = ", ".join(stage.name for stage in STAGES)
            raise ConfigError(f"--only names stages, or what they begin with; got {word}; choose among {names}")
    return [stage for stage in STAGES if not only or stage.name.startswith(tuple(only))]


def limit_of(stages: Sequence[Stage], left_s: float) -> float:
    """Seconds that the first of these stages gets: its share of what is left, but not less than it needs; 0 if that
    is more than there is.

    Example: two stages with shares 6 and 2 have 80 s left. The first gets 60 s. If it ends after 20 s, the second gets
    all of the other 60 s.
    """
    stage = stages[0]
    limit_s = max(left_s * stage.share / sum(each.share for each in stages), stage.least_s)
    return limit_s if limit_s <= left_s else 0.0


def bench_gpu(model: str | None, minutes: float, only: Sequence[str] | None, tell: Callable[[str], None]) -> Kit:
    """Run the stages; `tell` is given each line at once. An interrupt ends the stage under way and skips the rest.

    Raises ConfigError for a model or stage that does not exist, and for GPUs that torch cannot use.
    """
    stages = chosen(only)
    sizes = [f"{RANDOM}{size}" for size in SHAPES]
    if model is not None and model.startswith(RANDOM) and model not in sizes:
        raise ConfigError(f"--model {model} is none of {', '.join(sizes)}; take one of them, or what model.path takes")
    ends_at_s = time.monotonic() + 60 * minutes
    kit = Kit(folder=Path("bench-gpu").absolute())
    kit.folder.mkdir(exist_ok=True)
    plan = Plan(folder=str(kit.folder), on_gpu=False, num_gpus=0, model=model or "")
    with _interruptible():
        try:
            plan = _prepare(plan, kit, tell)
        except KeyboardInterrupt:
            raise ConfigError("interrupted before anything was measured; start it again") from None
        is_stopped = False
        for number, stage in enumerate(stages):
            limit_s = limit_of(stages[number:], ends_at_s - time.monotonic())
            result = Result(stage=stage.name, why="interrupted" if is_stopped else "no time left")
            if not is_stopped and limit_s:
                result = run_stage(stage.name, limit_s, kit.folder)
                is_stopped = result.why == "interrupted"
            kit.results.append(result)
            tell(line_of(result, kit.on_gpu))
            kit.write()
    return kit


def _prepare(plan: Plan, kit: Kit, tell: Callable[[str], None]) -> Plan:
    """Find out what the machine is, and bring the model. Raises ConfigError when either fails."""

    def prepared(name: str, given: Plan) -> dict[str, Figure]:
        given.write()
        result = run_stage(name, PREPARE_S, kit.folder)
        if result.why == "interrupted":
            raise KeyboardInterrupt
        if result.status != "done":
            raise ConfigError(f"{result.why}; the whole output is in {result.log}")
        return result.figures

    kit.machine = prepared("machine", plan)
    default = DEFAULT_ON_GPU if kit.on_gpu else DEFAULT_ON_CPU
    plan = replace(plan, on_gpu=kit.on_gpu, num_gpus=int(kit.machine["num_gpus"]), model=plan.model or default)
    kit.model = plan.model
    tell("  ".join(f"{name} {_shown(value)}" for name, value in kit.machine.items()))
    plan = replace(plan, model_path=str(prepared("model", plan)["model_path"]))
    plan.write()
    return plan


def run_stage(name: str, limit_s: float, folder: Path, module: str = "rlflow.tools.bench.gpu.stage") -> Result:
    """A stage in a process of its own. When it ends, is over its limit or is interrupted, all that it started ends."""
    log = folder / f"{file_name(name)}.log"
    figures = folder / f"{file_name(name)}.json"
    figures.unlink(missing_ok=True)
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "HYDRA_FULL_ERROR": "1"}
    started = time.monotonic()
    why = ""
    code = None
    with log.open("w") as output, _ending_children():
        command = [sys.executable, "-m", module, name, str(folder)]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True
        )
        try:
            code = process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            why = f"over its limit of {limit_s:.0f} s"
        except KeyboardInterrupt:
            why = "interrupted"
    report = Report.read(figures)
    if code is not None and code < 0 and not report.failed:
        why = f"killed by signal {signal.Signals(-code).name}"
    elif code and not report.failed:
        why = f"exit code {code}"
    status = "failed" if why or report.failed else "skipped" if report.skipped else "done"
    return Result(
        stage=name,
        status=status,
        why=why or report.failed or report.skipped,
        seconds=time.monotonic() - started,
        figures=report.figures,
        log=str(log),
    )


def line_of(result: Result, on_gpu: bool) -> str:
    """One line: stage, how it ended, seconds, figures, and the log of a stage that failed."""
    parts = [f"{result.stage:21}{result.status:8}{result.seconds:6.0f} s"]
    parts += [result.why.splitlines()[0]] if result.why else []
    parts += [_figures(result.figures)] if result.figures else []
    parts += ["stand-in on CPU"] if not on_gpu and result.status != "skipped" else []
    parts += [f"log: {result.log}"] if result.status == "failed" else []
    return "  ".join(parts)


def _figures(figures: dict[str, Figure]) -> str:
    return ", ".join(f"{name} {_shown(value)}" for name, value in figures.items())


def _shown(value: Figure) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"


def _cell(text: str) -> str:
    """One line that does not break a table."""
    return text.partition("\n")[0].replace("|", "/")


@contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM interrupts like Ctrl-C."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _ending_children() -> Iterator[None]:
    """At the end, end all processes below this one that were not there at the beginning, in whatever session."""
    import psutil

    # What a process of the stage leaves behind becomes a child of this one.
    linux.prctl("CHILD_SUBREAPER", linux.PR_SET_CHILD_SUBREAPER, 1)
    this = psutil.Process()
    before = set(this.children(recursive=True))
    try:
        yield
    finally:
        started = set[psutil.Process]()
        for end in (psutil.Process.terminate, psutil.Process.kill):
            started |= set(this.children(recursive=True)) - before
            for each in started:
                try:
                    end(each)
                except psutil.NoSuchProcess:
                    continue
            psutil.wait_procs(started, timeout=GRACE_S)
