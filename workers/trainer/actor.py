"""One rank of the trainer as a Ray actor: fetches its share of the payloads and hands it to the back end."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlflow.batching import plan_micro_batches, spread_over_turns
from rlflow.compute import keep_memory, share_cpu
from rlflow.config import Config
from rlflow.disk import disk_errors
from rlflow.roles import StagedWeights, StepOutcome
from rlflow.staleness import without_old_tokens
from rlflow.types import EpisodePayload, FloatArray, ReadyGroup, Span, TrainSample

if TYPE_CHECKING:
    from rlflow.workers.trainer.base import MicroBatch


class TrainerWorker:
    """Wrapped by `ray.remote`. `start` builds the back end; every other call needs it."""

    def __init__(self, config: Config, model_path: str, rank: int, world_size: int, threads: int) -> None:
        share_cpu(threads)
        keep_memory()
        self._config = config
        self._model_path = model_path
        self._rank = rank
        self._world_size = world_size

    def rendezvous(self) -> str:
        """An address for the ranks to meet at; loopback unless they live on several machines."""
        import ray

        host = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((host, 0))
            return f"tcp://{host}:{probe.getsockname()[1]}"

    def start(self, rendezvous: str) -> None:
        from rlflow.weights.arena import Arena
        from rlflow.workers.trainer.backends import build_backend

        self._backend = build_backend(self._config, self._model_path, self._rank, self._world_size, rendezvous)
        self._arena = Arena(self._backend.parameter_specs()) if self._rank == 0 else None

    def accumulate(self, groups: list[ReadyGroup], oldest_version: int | None) -> Span:
        """Add the gradients of this rank's share of `groups`. Every rank plans the same shares from the metadata."""
        start_s = time.time()
        silent, loud = [], []
        for group in groups:
            (silent if self._has_no_gradient(group) else loud).append(group)
        self._backend.accumulate(self._share(loud, oldest_version))
        self._backend.observe(self._share(silent, oldest_version))
        return self._span("train", start_s)

    def _has_no_gradient(self, group: ReadyGroup) -> bool:
        """Whether the loss of every token is zero for every policy: no episode was better than another, no KL term."""
        values = (value for advantages in group.advantages if advantages is not None for value in advantages)
        return not any(values) and self._config.algorithm.kl_coefficient == 0

    def _share(self, groups: list[ReadyGroup], oldest_version: int | None) -> list[MicroBatch]:
        """This rank's micro-batches of `groups`; none when there are no groups."""
        if not groups:
            return []
        episodes = [group.episodes for group in groups]
        plans = plan_micro_batches(episodes, self._world_size, self._config.trainer.micro_batch_tokens)
        fetch = _Fetcher(groups, oldest_version)
        return [[fetch.samples(piece.group, piece.episodes) for piece in plan.pieces] for plan in plans[self._rank]]

    def step(self) -> StepOutcome:
        start_s = time.time()
        outcome = self._backend.step()
        outcome.spans.append(self._span("train", start_s))
        return outcome

    def stage_weights(self, version: int) -> StagedWeights | None:
        """Gather the full parameters; rank 0 lays them out for the engines and returns where."""
        start_s = time.time()
        self._backend.version = version
        named = self._backend.full_parameters()
        if self._arena is None:
            for _ in named:
                pass
            return None
        staged = self._arena.stage(version, named)
        return StagedWeights(
            version=staged.version,
            path=staged.path,
            num_bytes=staged.num_bytes,
            slots=staged.slots,
            buckets=staged.buckets,
            spans=(self._span("weights", start_s),),
        )

    def save(self, folder: Path) -> None:
        with disk_errors("a checkpoint", folder):
            self._backend.save(folder)

    def load(self, folder: Path) -> None:
        self._backend.load(folder)

    def offload(self) -> None:
        self._backend.offload()

    def reload(self) -> None:
        self._backend.reload()

    def close(self) -> None:
        self._backend.close()
        if self._arena is not None:
            self._arena.close()

    def _span(self, name: str, start_s: float) -> Span:
        return Span(actor=f"trainer {self._rank}", name=name, start_s=start_s, end_s=time.time())


class _Fetcher:
    """Reads payloads from the object store as training samples, without the tokens that are too old."""

    def __init__(self, groups: Sequence[ReadyGroup], oldest_version: int | None) -> None:
        self._groups = groups
        self._oldest_version = oldest_version

    def samples(self, group_index: int, episodes: Sequence[int]) -> list[TrainSample]:
        import ray

        group = self._groups[group_index]
        payloads: list[EpisodePayload] = ray.get([group.payloads[index] for index in episodes])  # type: ignore[assignment]
        references: list[Any] = [None] * len(payloads)
        if group.references is not None:
            references = ray.get([group.references[index] for index in episodes])  # type: ignore[assignment]
        found: list[TrainSample] = []
        for index, payload, reference in zip(episodes, payloads, references, strict=True):
            advantages = group.advantages[index]
            if advantages is not None:
                found += self._train_samples(payload, advantages, reference)
        return found

    def _train_samples(
        self, payload: EpisodePayload, advantages: Sequence[float], references: list[FloatArray] | None
    ) -> list[TrainSample]:
        samples = payload.samples
        rows: Sequence[float | FloatArray] = [advantages[0]] * len(samples)
        if len(advantages) > 1:
            rows = spread_over_turns(samples, advantages)
        if self._oldest_version is not None:
            samples = [without_old_tokens(sample, self._oldest_version) for sample in samples]
        return [
            TrainSample(sample=sample, advantage=row, reference_logprobs=reference)
            for sample, row, reference in zip(samples, rows, references or [None] * len(samples), strict=True)
        ]
