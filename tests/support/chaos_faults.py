"""What each fault does to a run: one function for each action of a plan."""

from __future__ import annotations

import resource
import shutil
import signal
import sqlite3
import subprocess
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from chaos_plan import HUNG_S, Fault
from chaos_run import ChaosRun, Ended
from world import SHARED_MEMORY

FAULT_S = 10.0
"""How long a condition lasts that is taken back, such as a full disk."""
SHORT_CUT_S = 4.0
CLOCK_JUMP_S = 3600.0
LOCK_S = 8.0
"""How long another process keeps the ledger from being written."""
SPARE_BYTES = 16 << 20
"""The address space that a process with limited memory may still take."""
ANY_FAILURE = frozenset({1})
WAIT_S = 60.0


@dataclass(kw_only=True, slots=True, frozen=True)
class Effect:
    """What was done."""

    hit: str
    """What was hit, for people."""
    may_end: frozenset[int] = frozenset()
    """Exit codes with which the driver may end; none of them means that it must go on."""
    must_end: bool = False
    undo: Callable[[], None] | None = None
    undo_after_s: float = 0.0
    """Undone then, or when the driver has ended."""
    before_restart: Callable[[], None] | None = None
    cure: Callable[[], None] | None = None
    """What a person would do if the run does not start again by itself."""


def inject(run: ChaosRun, fault: Fault) -> Effect | None:
    """Do it; None if there is nothing to do it to."""
    return _ACTIONS[fault.action](run, fault)


# -- processes


def _kill(run: ChaosRun, fault: Fault) -> Effect | None:
    if fault.target == "machine":
        return _kill_machine(run, fault)
    return _strike(run, fault, psutil.Process.kill)


def _kill_machine(run: ChaosRun, fault: Fault) -> Effect:
    pool, node = run.machines[int(fault.pick * len(run.machines))]
    node.kill()
    return Effect(hit=f"machine {node.ip} ({pool})", undo=lambda: run.replace_machine(pool, node), undo_after_s=FAULT_S)


def _hang(run: ChaosRun, fault: Fault) -> Effect | None:
    """Stopped for good: only a kill helps."""
    return _strike(run, fault, psutil.Process.suspend)


def _strike(run: ChaosRun, fault: Fault, strike: Callable[[psutil.Process], None]) -> Effect | None:
    victim = _victim(run, fault)
    if victim is None:
        return None
    effect = _told(run, fault.target, victim)
    strike(victim)
    return effect


def _pause(run: ChaosRun, fault: Fault) -> Effect | None:
    victim = _victim(run, fault)
    if victim is None:
        return None
    victim.suspend()
    return Effect(hit=_named(fault.target, victim), undo=lambda: _resume(victim), undo_after_s=HUNG_S)


def _limit_memory(run: ChaosRun, fault: Fault) -> Effect | None:
    """Hardly any more address space, for a while."""
    victim = _victim(run, fault)
    if victim is None:
        return None
    hard = resource.prlimit(victim.pid, resource.RLIMIT_AS)[1]
    resource.prlimit(victim.pid, resource.RLIMIT_AS, (victim.memory_info().vms + SPARE_BYTES, hard))

    def undo() -> None:
        with suppress(ProcessLookupError):
            resource.prlimit(victim.pid, resource.RLIMIT_AS, (hard, hard))

    return Effect(hit=_named(fault.target, victim), undo=undo, undo_after_s=FAULT_S)


def _out_of_memory(run: ChaosRun, fault: Fault) -> Effect | None:
    """As the system does it: the process with the highest score is killed."""
    scores = []
    for kind, process in run.processes():
        with suppress(OSError):
            scores.append((int(Path(f"/proc/{process.pid}/oom_score").read_text()), process.pid, kind, process))
    _, _, kind, victim = max(scores)
    victim.kill()
    return _told(run, kind, victim)


def _victim(run: ChaosRun, fault: Fault) -> psutil.Process | None:
    found = run.of_kind(fault.target)
    return found[int(fault.pick * len(found))] if found else None


def _told(run: ChaosRun, kind: str, victim: psutil.Process) -> Effect:
    """What a lost process of this kind means for the driver, which a Ray of its own does not outlive."""
    if kind == "driver":
        return Effect(hit=_named(kind, victim), may_end=frozenset({-signal.SIGKILL}), must_end=True)
    if kind == "gcs":
        return Effect(hit=_named(kind, victim), may_end=ANY_FAILURE, before_restart=_new_cluster(run))
    if kind == "raylet" and run.nodes is not None:
        return _lost_raylet(run, victim)
    return Effect(hit=_named(kind, victim), may_end=ANY_FAILURE if kind == "raylet" else frozenset())


def _lost_raylet(run: ChaosRun, victim: psutil.Process) -> Effect:
    """The machine goes with it."""
    lost = [(pool, node) for pool, node in run.machines if victim in node.processes()]
    if not lost:  # the head's
        return Effect(hit="raylet of the head", may_end=ANY_FAILURE, before_restart=_new_cluster(run))
    ((pool, node),) = lost

    def undo() -> None:
        node.stop()
        run.replace_machine(pool, node)

    return Effect(hit=f"raylet of {node.ip} ({pool})", undo=undo, undo_after_s=FAULT_S)


def _new_cluster(run: ChaosRun) -> Callable[[], None] | None:
    return run.stop_cluster if run.nodes is not None else None


def _named(kind: str, process: psutil.Process) -> str:
    return f"{kind} {process.pid}"


def _resume(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        process.resume()


# -- network, disk, memory, clock


def _cut(run: ChaosRun, fault: Fault) -> Effect:
    """The loopback device, on which all of a run on one machine meets."""
    _ip("link", "set", "lo", "down")
    return Effect(hit="lo", undo=lambda: _ip("link", "set", "lo", "up"), undo_after_s=SHORT_CUT_S)


def _cut_link(run: ChaosRun, fault: Fault) -> Effect:
    """One machine's; the odd numbers for so long that the machine counts as lost, and is replaced."""
    pool, node = run.machines[int(fault.pick * len(run.machines))]
    node.cut()
    if fault.number % 2 == 0:
        return Effect(hit=f"link of {node.ip} ({pool})", undo=node.mend, undo_after_s=SHORT_CUT_S)

    def undo() -> None:
        node.stop()
        run.replace_machine(pool, node)

    return Effect(hit=f"link of {node.ip} ({pool}), for good", undo=undo, undo_after_s=3 * FAULT_S)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=WAIT_S)


def _fill_disk(run: ChaosRun, fault: Fault) -> Effect:
    return _fill(run.path / "ballast", may_end=ANY_FAILURE)


def _fill_shared_memory(run: ChaosRun, fault: Fault) -> Effect:
    return _fill(SHARED_MEMORY / "ballast", may_end=ANY_FAILURE)


def _fill(ballast: Path, may_end: frozenset[int]) -> Effect:
    with open(ballast, "wb", buffering=0) as file, suppress(OSError):
        for size in (1 << 20, 1 << 12, 1):
            with suppress(OSError):
                while True:
                    if not file.write(bytes(size)):
                        break
    return Effect(hit=f"{ballast.parent}", may_end=may_end, undo=ballast.unlink, undo_after_s=FAULT_S)


def _read_only(run: ChaosRun, fault: Fault) -> Effect:
    """Files that are open already can still be written."""
    subprocess.run(["mount", "--bind", str(run.path), str(run.path)], check=True)

    def is_remounted() -> bool:  # not while the run holds a file that it has opened since
        remount = ["mount", "-o", "remount,bind,ro", str(run.path)]
        return subprocess.run(remount, check=False, capture_output=True).returncode == 0

    assert run.wait(is_remounted, WAIT_S), "the run always has a file open"

    def undo() -> None:
        subprocess.run(["umount", "--lazy", str(run.path)], check=True)

    return Effect(hit=str(run.path), may_end=ANY_FAILURE, undo=undo, undo_after_s=FAULT_S)


def _damage(run: ChaosRun, fault: Fault) -> Effect:
    """The newest checkpoint, when the driver has been killed: bits flipped, an end cut off, or a file gone. There is an
    older one, because a run with no whole checkpoint rightly ends."""
    folder = run.path / "checkpoints"
    assert run.wait(lambda: len(list(folder.glob("step_*[0-9]"))) > 1, WAIT_S), "no second checkpoint"
    run.signal(signal.SIGKILL)

    def newest() -> Path:
        return max(folder.glob("step_*[0-9]"), key=lambda each: int(each.name[5:]))

    def damage() -> None:
        files = sorted(path for path in newest().rglob("*") if path.is_file() and path.stat().st_size)
        chosen = files[int(fault.pick * len(files))]
        content = chosen.read_bytes()
        match fault.number % 3:
            case 0:
                middle = len(content) // 2
                chosen.write_bytes(content[:middle] + bytes([content[middle] ^ 0x40]) + content[middle + 1 :])
            case 1:
                chosen.write_bytes(content[: len(content) // 2])
            case _:
                chosen.unlink()

    kind = ("a bit of", "half of", "all of")[fault.number % 3]
    return Effect(
        hit=f"{kind} a file",
        may_end=frozenset({-signal.SIGKILL}),
        must_end=True,
        before_restart=damage,
        cure=lambda: shutil.rmtree(newest()),
    )


def _clock(run: ChaosRun, fault: Fault) -> Effect:
    jump = CLOCK_JUMP_S if fault.pick < 0.5 else -CLOCK_JUMP_S
    run.set_clock(jump)
    return Effect(hit=f"{jump:+.0f} s, and back", undo=lambda: run.set_clock(0), undo_after_s=FAULT_S)


# -- the run itself


def _nan(run: ChaosRun, fault: Fault) -> Effect:
    before = run.num_skipped()
    run.marker.touch()
    assert run.wait(lambda: run.num_skipped() > before, WAIT_S), "no update was skipped"
    return Effect(hit="one micro-batch")


def _second_driver(run: ChaosRun, fault: Fault) -> Effect:
    done = subprocess.run(run.command(), capture_output=True, text=True, timeout=WAIT_S * 2, check=False)
    assert done.returncode == 2 and "is being written by process" in done.stderr, done.stdout + done.stderr
    return Effect(hit="refused with 2")


def _interrupt_twice(run: ChaosRun, fault: Fault) -> Effect:
    run.signal(signal.SIGINT)
    with suppress(Ended):
        run.wait(lambda: False, 0.3 * fault.pick, look_s=0.01)
        run.signal(signal.SIGINT)
    return Effect(hit="the driver", may_end=frozenset({128 + signal.SIGINT}), must_end=True)


def _terminate_while_saving(run: ChaosRun, fault: Fault) -> Effect:
    folder = run.path / "checkpoints"
    saving = run.wait(lambda: any(folder.glob("*.partial")), WAIT_S, look_s=0.0005)
    assert saving, "no checkpoint was being written"
    run.signal(signal.SIGTERM)
    return Effect(hit="the driver", may_end=frozenset({128 + signal.SIGTERM}), must_end=True)


def _hang_up(run: ChaosRun, fault: Fault) -> Effect:
    run.signal(signal.SIGHUP)
    return Effect(hit="the driver", may_end=frozenset({128 + signal.SIGHUP}), must_end=True)


def _lock_ledger(run: ChaosRun, fault: Fault) -> Effect:
    database = sqlite3.connect(run.path / "ledger.db", isolation_level=None, timeout=WAIT_S)
    database.execute("BEGIN IMMEDIATE")
    return Effect(hit="ledger.db", undo=database.close, undo_after_s=LOCK_S)


def _close_output(run: ChaosRun, fault: Fault) -> Effect:
    """Then the run is interrupted and started again, so that what it prints is seen again."""
    run.close_output()
    before = run.steps()
    assert run.wait(lambda: run.steps() > before + 2, WAIT_S), "no step without a reader of the output"
    run.signal(signal.SIGINT)
    return Effect(hit="the driver", may_end=frozenset({128 + signal.SIGINT}), must_end=True)


_ACTIONS: dict[str, Callable[[ChaosRun, Fault], Effect | None]] = {
    "kill": _kill,
    "hang": _hang,
    "pause": _pause,
    "limit_memory": _limit_memory,
    "out_of_memory": _out_of_memory,
    "cut": _cut,
    "cut_link": _cut_link,
    "fill_disk": _fill_disk,
    "fill_shared_memory": _fill_shared_memory,
    "read_only": _read_only,
    "damage": _damage,
    "clock": _clock,
    "nan": _nan,
    "second_driver": _second_driver,
    "interrupt_twice": _interrupt_twice,
    "terminate_while_saving": _terminate_while_saving,
    "hang_up": _hang_up,
    "lock_ledger": _lock_ledger,
    "close_output": _close_output,
}
