"""One rank of the trainer as a Ray actor: it fetches its share of the payloads and hands it to the back end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlflow.algorithms.registry import needs_critic, token_advantage_of
from rlflow.algorithms.token_advantage.gae import Moments
from rlflow.batching.shares import RankWork, Share
from rlflow.config import Backend, Config, Offload
from rlflow.errors import ConfigError
from rlflow.roles import StagedWeights, StepOutcome
from rlflow.rollout.requests import ProbePrompt
from rlflow.runtime.clock import now
from rlflow.runtime.derived import ranks_per_share
from rlflow.runtime.disk import disk_errors
from rlflow.runtime.environment import keep_memory, share_cpu
from rlflow.runtime.gpus import has_gpu
from rlflow.types import FloatArray, ReadyGroup, Sample, Span, TrainSample
from rlflow.workers.trainer.fetch import Fetcher, log_ratios, moments_of, whiten_all

if TYPE_CHECKING:
    from rlflow.workers.trainer.packed import MicroBatch, TrainerBackend
    from rlflow.workers.trainer.profile import RankProfile
    from rlflow.workers.trainer.shards import Snapshot


class TrainerWorker:
    """Wrapped by `ray.remote`. `start` builds the back end; every other call needs it."""

    def __init__(
        self, config: Config, model_path: str, rank: int, world_size: int, threads: int, is_critic: bool = False
    ) -> None:
        share_cpu(threads)
        keep_memory()
        if is_critic:
            config = replace(config, trainer=replace(config.trainer, learning_rate=config.critic.learning_rate))
        self._config = config
        self._is_critic = is_critic
        self._token_advantage = token_advantage_of(config.algorithm) if needs_critic(config.algorithm) else None
        self._model_path = model_path
        self._rank = rank
        self._world_size = world_size
        self._snapshot: Snapshot | None = None
        self._moments: Moments | None = None
        """The moments of the advantages of the step's tokens, if a critic gives each its own."""
        self._profile: RankProfile | None = None

    def rendezvous(self) -> str:
        """Where the ranks may meet."""
        from rlflow.workers.trainer.process_group import new_rendezvous

        return new_rendezvous(on_one_machine=self._config.cluster.address is None)

    def start(self, rendezvous: str) -> str:
        """Returns how tokens go through the model. Raises ConfigError for one that cannot be trained."""
        from rlflow.weights.senders import build_sender

        self._backend = build_backend(
            self._config, self._model_path, self._rank, self._world_size, rendezvous, self._is_critic
        )
        agreement = self._backend.settle_way()
        self._sender = None
        if not self._is_critic:
            self._sender = build_sender(self._config, self._backend, self._rank, self._world_size, rendezvous)
        return str(agreement)

    def measure(self, share: Share, oldest_version: int | None) -> None:
        """Take the moments of all tokens' advantages in the groups of a step, with which they will be whitened."""
        self._moments = Moments(*self._backend.add_up(moments_of(_flat(self._samples(share, oldest_version)))))

    def accumulate(self, work: RankWork, oldest_version: int | None) -> Span:
        """Add the gradients of this rank's share of some groups."""
        start_s = now()
        trained = self._samples(work.trained, oldest_version)
        if self._token_advantage is not None and not self._is_critic:
            assert self._moments is not None, "the advantages of a step are measured before it is trained"
            whiten_all(_flat(trained), self._moments)
        self._backend.accumulate(trained)
        self._backend.observe(self._samples(work.observed, oldest_version))
        self._backend.pass_over(self._samples(work.passed_over, oldest_version))
        return self._span("train", start_s, groups=work.num_groups, tokens=work.num_tokens)

    def probe_prompts(self) -> list[ProbePrompt]:
        """See `gate.probe_prompts`."""
        return self._backend.probe_prompts()

    def score(self, samples: list[Sample]) -> list[FloatArray]:
        """Log-probabilities [L] of each reply to `probe_prompts`; every rank computes all of them."""
        from rlflow.workers.trainer.gate import probe_pictures

        pictures = probe_pictures() if any(sample.images for sample in samples) else {}
        row = [TrainSample(sample=sample, advantage=0.0, pictures=pictures) for sample in samples]
        rows = self._backend.per_token([[row]])
        return [row for found in rows for row in found]

    def values(self, share: Share) -> tuple[bool | list[FloatArray], ...]:
        """A critic's answer: True, then for each episode of this rank's share the values [L] of its samples.

        The episodes are in order of training. Only the first rank of a group returns them.
        """
        return self._per_token(share, self._backend.per_token)

    def references(self, share: Share) -> tuple[bool | list[FloatArray], ...]:
        """Like `values`, from a policy with adapters: log-probabilities [L] under the model that the run began with."""
        return self._per_token(share, self._backend.reference_logprobs)

    def logprobs(self, share: Share) -> tuple[bool | list[FloatArray], ...]:
        """Like `values`, from a policy: log-probabilities [L] under the current weights."""
        return self._per_token(share, self._backend.per_token)

    def log_ratios(self, groups: Sequence[ReadyGroup]) -> list[list[float]]:
        """`fetch.log_ratios` of each of these groups."""
        return [log_ratios(group) for group in groups]

    def _per_token(
        self, share: Share, ask: Callable[[Sequence[MicroBatch]], list[list[FloatArray]]]
    ) -> tuple[bool | list[FloatArray], ...]:
        fetch = Fetcher(share.groups, None, None)
        pieces = [[fetch.bare(piece) for piece in plan.pieces] for plan in share.plans]
        micro_batches = [[[one for episode in piece for one in episode] for piece in batch] for batch in pieces]
        rows = iter(row for found in ask(micro_batches) for row in found)
        if self._rank % ranks_per_share(self._config.trainer):
            return (True,)
        return (True, *([next(rows) for _ in episode] for batch in pieces for piece in batch for episode in piece))

    def _samples(self, share: Share, oldest_version: int | None) -> list[MicroBatch]:
        algorithm = self._config.algorithm
        kl_coefficient = algorithm.kl_coefficient if algorithm.kl_in_reward else 0.0
        fetch = Fetcher(share.groups, oldest_version, self._token_advantage, kl_coefficient)
        return [[fetch.samples(piece) for piece in plan.pieces] for plan in share.plans]

    def step(self, is_last: bool) -> StepOutcome:
        """See `TrainerBackend.step`."""
        start_s = now()
        outcome = self._backend.step(is_last=is_last)
        outcome.spans.append(self._span("train", start_s, outcome="updated" if outcome.applied else "skipped"))
        return outcome

    def stage_weights(self, version: int) -> StagedWeights | None:
        """Lay out this version for the engines; rank 0 returns where it is."""
        assert self._sender is not None, "a critic has no engines"
        start_s = now()
        self._backend.version = version
        staged = self._sender.stage(version)
        return staged and replace(staged, spans=(self._span("weights", start_s),))

    def snapshot(self) -> None:
        """Copy the current state for `write_snapshot`; an earlier copy that was not written is dropped."""
        self._snapshot = None
        self._snapshot = self._backend.snapshot()

    def write_snapshot(self, folder: Path) -> dict[str, str]:
        """Write the copy of `snapshot`, and drop it. The only call that may run while others do.

        Returns the SHA-256 of each file by name.
        """
        snapshot, self._snapshot = self._snapshot, None
        assert snapshot is not None, "a snapshot is taken before it is written"
        with disk_errors("a checkpoint", folder):
            return snapshot.write(folder)

    def load(self, folder: Path) -> None:
        self._backend.load(folder)

    def offload(self) -> None:
        self._backend.offload()

    def reload(self) -> None:
        if self._sender is not None:
            # The engines sleep, so nothing needs the staged weights, and the back end needs the memory.
            self._sender.release()
        self._backend.reload()

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()
        self._backend.close()

    def profile(self, is_on: bool) -> None:
        """Begin a profile of this rank, or end it and write it to run.dir/profile. Does nothing twice."""
        from rlflow.workers.trainer.profile import RankProfile

        if is_on and self._profile is None:
            self._profile = RankProfile()
        elif not is_on and self._profile is not None:
            assert self._config.run.dir is not None, "a run has a directory before it has workers"
            folder, kind = Path(self._config.run.dir) / "profile", "critic" if self._is_critic else "trainer"
            with disk_errors("a profile", folder):
                self._profile.write(folder, f"{kind}_rank_{self._rank}")
            self._profile = None

    def _span(self, name: str, start_s: float, **facts: int | str) -> Span:
        if not self._is_critic:
            facts["version"] = self._backend.version
        return Span(actor=f"trainer {self._rank}", name=name, start_s=start_s, end_s=now(), facts=facts)


def _flat(share: Sequence[MicroBatch]) -> list[TrainSample]:
    return [sample for batch in share for piece in batch for sample in piece]


def build_backend(
    config: Config, model_path: str, rank: int, world_size: int, rendezvous: str, is_critic: bool = False
) -> TrainerBackend:
    """One rank of the trainer; returns when all ranks have met at `rendezvous` and hold the model.

    Raises ConfigError for settings without effect on this machine, a package that is missing, or a model that cannot be
    trained.
    """
    check_offload(config, has_gpu())
    if config.trainer.backend is Backend.deepspeed:
        # Each back end is imported only when it is chosen.
        from rlflow.workers.trainer.deepspeed import DeepSpeedTrainer

        return DeepSpeedTrainer(config, model_path, rank, world_size, rendezvous, is_critic)
    from rlflow.workers.trainer.fsdp import FsdpTrainer

    return FsdpTrainer(config, model_path, rank, world_size, rendezvous, is_critic)


def check_offload(config: Config, has_gpu: bool) -> None:
    if config.trainer.offload is Offload.cpu and not has_gpu:
        raise ConfigError(
            "trainer.offload=cpu has no effect on a machine without a GPU, where everything is in the memory of the "
            "CPU; set it to none"
        )
