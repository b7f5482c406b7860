"""A version of the weights, from the trainer into the engines while training goes on.

    stage: laid out where the engines read -> hand_over: the engines load it -> loaded: groups are admitted under it

Rules: one version is loaded at a time, and nothing is staged over one that engines still read. With staleness 0, or on
shared devices, training waits for the load. A load that fails ends the run through the intake.
"""

import asyncio
from collections.abc import Callable

from rlflow.config import Config, Late, Placement
from rlflow.errors import RunError
from rlflow.groups.intake import Intake, PhaseListener, Progress
from rlflow.groups.updates import wake_trainer
from rlflow.roles import StagedWeights, Workers
from rlflow.runtime.deadlines import or_hung, within
from rlflow.runtime.derived import MISMATCH, dtype_of
from rlflow.types import Span


class Publisher:
    """Hands each version of the weights to the engines."""

    def __init__(
        self,
        *,
        config: Config,
        workers: Workers,
        intake: Intake,
        progress: Progress,
        listener: PhaseListener,
        now: Callable[[], float],
    ) -> None:
        self.spans: list[Span] = []
        """Added here, taken out by the reader."""
        self.pause_s = 0.0
        """The longest pause of an engine since the reader set this to 0."""
        self._config = config
        self._is_colocated = config.cluster.placement is Placement.colocated
        self._workers = workers
        self._intake = intake
        self._progress = progress
        self._listener = listener
        self._now = now
        self._loading: asyncio.Task[None] | None = None
        self._is_compared = workers.probe is None

    async def stage(self) -> StagedWeights | None:
        """Lay out the trainer's weights as the current version; None without engines that take it."""
        if not self._config.rollout.engines:
            return None
        await self.wait_until_loaded()  # the engines still read the version before from where this one will be
        self._listener.phase("weights")
        staging = self._workers.trainer.stage_weights(self._progress.version)
        staged = await or_hung("staging the weights", self._config.deadlines, "weights_s", staging)
        self.spans += staged.spans
        return staged

    async def hand_over(self, staged: StagedWeights) -> None:
        """Let the engines load a version; wait for them if nothing can go on without them."""
        if self._is_colocated:
            offloading = self._workers.trainer.offload()
            await or_hung("taking the trainer off its devices", self._config.deadlines, "weights_s", offloading)
        self._loading = asyncio.create_task(self._load(staged, self._progress.step), name="load weights")
        if self._config.staleness.max_versions == 0 or self._is_colocated:
            await self.wait_until_loaded()

    async def begin(self) -> None:
        """Hand over the first version of this process, and let the engines and the trainer be compared.

        Raises RunError if they differ.
        """
        await self._first()
        probe, deadlines = self._workers.probe, self._config.deadlines
        if probe is None:
            return
        self._listener.phase("comparing engines and trainer")
        replies = await or_hung("asking the engines what they compute", deadlines, "start_s", probe.replies())
        await wake_trainer(self._config, self._workers)
        comparing = probe.difference(replies)
        difference = await or_hung("comparing engines and trainer", deadlines, "train_s", comparing)
        dtype = dtype_of(self._config).value
        if not difference <= MISMATCH[dtype]:
            raise RunError(
                f"engines and trainer compute different models: the log-probabilities of {len(replies)} short replies "
                f"differ by {difference:.2g} nats on average, and may by {MISMATCH[dtype]:g} with model.dtype={dtype}; "
                "update vLLM and transformers, or choose another model"
            )
        self._is_compared = True
        if self._is_colocated:
            await self._first()
        else:
            self._intake.admit()

    async def _first(self) -> None:
        staged = await self.stage()
        if staged is None:
            self._intake.admit()
        else:
            await self.hand_over(staged)
            await self.wait_until_loaded()

    async def wait_until_loaded(self) -> None:
        """Wait until the engines have what was last handed over. Raises what made the run fail meanwhile."""
        if self._loading is not None:
            await self._loading
            self._loading = None
        self._intake.raise_failure()

    async def close(self) -> None:
        """End the load under way, if there is one."""
        if self._loading is not None:
            self._loading.cancel()
            await asyncio.wait([self._loading])

    async def _load(self, staged: StagedWeights, step: int) -> None:
        """Never raises: a failure reaches the main task through the intake."""
        engines = self._workers.engines
        try:
            if self._config.staleness.late is Late.requeue:
                # First, so that no engine is paused for tokens that nobody will train on, or carries them over.
                cancelling = self._workers.runners.cancel_stale(self._intake.oldest_allowed)
                await within("ending the groups that are too old", engines.patience_s, cancelling)
            start_s = self._now()
            loading = engines.load_weights(staged)
            loaded = await within("loading the weights into the engines", engines.patience_s, loading)
            facts: dict[str, int | str] = {"version": staged.version}
            self.spans.append(Span(actor="engines", name="weights", start_s=start_s, end_s=self._now(), facts=facts))
        except Exception as error:
            self._intake.fail(error)
            return
        self.pause_s = max(self.pause_s, loaded.pause_s)
        self._progress.served_step, self._progress.served_version = step, staged.version
        if self._is_compared:
            self._intake.admit()
