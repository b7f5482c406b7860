"""Checkpoints beside the steps: the state of a moment is copied, and written while training goes on.

    take: the trainer's snapshot, then everything else at once -> write: payloads, files -> fsync -> rename -> saved

Rules: all parts of a checkpoint are of one moment. One copy exists at a time, and nothing changes what a write reads. A
checkpoint is on disk whole or not at all. When a machine is lost with payloads, or with the runner that writes them,
the checkpoint is given up and the run goes on: the next one has what is there then.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rlflow.config import Config
from rlflow.errors import DeadlineError, PayloadLost, WorkerLost
from rlflow.groups.intake import Intake, PhaseListener, Progress
from rlflow.groups.ledger import Ledger
from rlflow.roles import Workers
from rlflow.rundir.store import CheckpointStore, RunState, state_to_json
from rlflow.runtime.deadlines import or_hung, within
from rlflow.runtime.disk import disk_errors, write_digested
from rlflow.types import PayloadRef, Span


@dataclass(kw_only=True, slots=True, frozen=True)
class _Taken:
    """Everything in a checkpoint except the trainer's part, which the trainer keeps."""

    step: int
    state: dict[str, Any]
    ledger: Awaitable[bytes]
    payloads: tuple[PayloadRef, ...]
    """Those of the groups in `state`, in order; what they refer to never changes."""


class SaveListener(PhaseListener, Protocol):
    """Told when training waits for a checkpoint, when one is complete, and when one is given up."""

    def saved(self, folder: Path) -> None: ...

    def given_up(self, step: int, why: str) -> None: ...


class Saver:
    """Writes and reads the checkpoints of one run."""

    def __init__(
        self,
        *,
        config: Config,
        workers: Workers,
        intake: Intake,
        ledger: Ledger,
        checkpoints: CheckpointStore,
        progress: Progress,
        listener: SaveListener,
        now: Callable[[], float],
    ) -> None:
        self.saved_step = -1
        """The step of the newest complete checkpoint."""
        self.held_step: int | None = None
        """The last step whose evaluation has begun: its checkpoint stays until it is known whether it is the best."""
        self.spans: list[Span] = []
        """Added here, taken out by the reader."""
        self._config = config
        self._deadlines = config.deadlines
        self._workers = workers
        self._intake = intake
        self._ledger = ledger
        self._checkpoints = checkpoints
        self._progress = progress
        self._listener = listener
        self._now = now
        self._taken: _Taken | None = None
        self._writing: asyncio.Task[None] | None = None
        self._best: int | None = None

    async def take_if_due(self) -> None:
        """Every `run.checkpoint_every` steps, and when an evaluation is due: wait until the write before has ended, and
        copy the state."""
        intervals = (self._config.run.checkpoint_every, self._config.eval.every)
        if not any(every and self._progress.step % every == 0 for every in intervals):
            return
        self._listener.phase("saving")
        start_s = self._now()
        await self.wait_until_written()
        await self.take()
        self._add_span("checkpoint", start_s, f"copied after step {self._progress.step}")

    async def take(self, deadline_s: float | None = None) -> None:
        """Copy the state of this moment: between two steps, and when no write is under way.

        `deadline_s` bounds the trainer's copying too, beside deadlines.checkpoint_s.
        """
        assert self._writing is None, "there is one copy at a time"
        self._listener.phase("saving")
        stage, copying = "copying the trainer's state", self._workers.trainer.snapshot()
        if deadline_s is not None:
            copying = within(stage, deadline_s, copying)
        await or_hung(stage, self._deadlines, "checkpoint_s", copying)
        # Nothing is awaited from here on, so that the parts are of one moment.
        self._intake.drop_lost()
        progress, ready = self._progress, self._intake.ready.groups
        state = RunState(step=progress.step, version=progress.version, sampler=self._intake.sampler.state, ready=ready)
        self._taken = _Taken(
            step=progress.step,
            state=state_to_json(state),
            ledger=self._ledger.copy(),
            payloads=tuple(stored for group in ready for stored in group.stored),
        )

    def write(self) -> None:
        """Begin to write what was taken, if anything was. A failure reaches the main task through the intake."""

        def tell(writing: asyncio.Task[None]) -> None:
            if not writing.cancelled() and (error := writing.exception()) is not None:
                self._intake.fail(error)

        if self._taken is not None:
            self._writing = asyncio.create_task(self._write(self._taken), name="save")
            self._writing.add_done_callback(tell)
            self._taken = None

    async def wait_until_written(self) -> None:
        """Wait for the write under way, if there is one. Raises if it failed, but not if it was given up."""
        writing = self._writing
        await self.wait_until_ended()
        if writing is not None:
            writing.result()

    async def wait_until_ended(self) -> None:
        """Wait for the write under way, however it ends."""
        if self._writing is not None:
            self._listener.phase("saving")
            await asyncio.wait([self._writing])
            self._writing = None

    async def keep_best(self, step: int | None) -> None:
        """Have the checkpoint of a step named the best, and kept: now, or when it has been written."""
        self._best = step
        if self._writing is None or self._writing.done():
            await self._name_best()

    async def _name_best(self) -> None:
        store = self._checkpoints
        while (best := self._best) is not None and best != store.best() and best in store.steps():
            with disk_errors("the best checkpoint's name", store.folder):
                await asyncio.to_thread(store.name_best, best)

    async def restore(self, folder: Path, state: RunState) -> None:
        """Take up a checkpoint; see `Driver.restore`."""
        progress = self._progress
        progress.step = progress.served_step = self.saved_step = state.step
        progress.version = progress.served_version = state.version
        self._intake.sampler.restore(state.sampler)
        loading = self._workers.trainer.load(folder / "trainer")
        await or_hung("loading the checkpoint", self._deadlines, "checkpoint_s", loading)
        count = sum(len(group.episodes) + (group.num_images > 0) for group in state.ready)
        if count:
            reading = self._workers.runners.load_payloads(folder / "ready", count)
            payloads = iter(await or_hung("loading the ready groups", self._deadlines, "checkpoint_s", reading))
            for group in state.ready:
                group.payloads = [next(payloads) for _ in group.episodes]
                group.pictures = next(payloads) if group.num_images else None
        await self._intake.restore(state.ready)

    async def _write(self, taken: _Taken) -> None:
        await self._write_files(taken)
        await self._name_best()

    async def _write_files(self, taken: _Taken) -> None:
        start_s = self._now()
        digests: dict[str, str] = {}
        with disk_errors("a checkpoint", self._checkpoints.folder):
            partial = await asyncio.to_thread(self._checkpoints.begin, taken.step)
            # The trainer comes last, because the run does not survive the loss of its processes.
            try:
                if taken.payloads:
                    saving = self._workers.runners.save_payloads(taken.payloads, partial / "ready")
                    digests["ready"] = await within("saving the ready groups", self._deadlines.checkpoint_s, saving)
            except (WorkerLost, PayloadLost, DeadlineError) as error:
                self._listener.given_up(taken.step, str(error))
                self._add_span("write", start_s, f"step {taken.step} given up")
                return
            writing = self._workers.trainer.write_snapshot(partial / "trainer")
            shards = await or_hung("saving the trainer", self._deadlines, "checkpoint_s", writing)
            digests |= {f"trainer/{name}": digest for name, digest in shards.items()}
            ledger = await within("copying the ledger", self._deadlines.checkpoint_s, taken.ledger)
            digests["ledger.db"] = await asyncio.to_thread(write_digested, partial / "ledger.db", [ledger])
            commit, held = self._checkpoints.commit, self.held_step
            folder = await asyncio.to_thread(commit, partial, taken.state, digests, held=held)
        self.saved_step = taken.step
        self._add_span("write", start_s, f"step {taken.step} saved")
        self._listener.saved(folder)

    def _add_span(self, name: str, start_s: float, outcome: str) -> None:
        facts: dict[str, int | str] = {"outcome": outcome}
        self.spans.append(Span(actor="checkpoint", name=name, start_s=start_s, end_s=self._now(), facts=facts))
