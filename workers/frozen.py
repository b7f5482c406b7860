"""One rank of a frozen policy as a Ray actor: the trainer's code without the optimiser's step."""

from collections.abc import Sequence

import ray

from rlflow.algorithms.distillation import num_likely
from rlflow.config import Config
from rlflow.models.opening import num_ids, open_tokenizer
from rlflow.rollout.samples import as_told
from rlflow.runtime.environment import keep_memory, share_cpu
from rlflow.types import EpisodePayload, FloatArray, Likely, PayloadRef, TrainSample


class FrozenWorker:
    """Wrapped by `ray.remote`; `start` loads the model of `model_path`."""

    def __init__(
        self, config: Config, model_path: str, rank: int, num_ranks: int, threads: int, is_teacher: bool = False
    ) -> None:
        share_cpu(threads)
        keep_memory()
        self._config = config
        self._model_path = model_path
        self._rank = rank
        self._num_ranks = num_ranks
        self._is_teacher = is_teacher
        self._num_likely = num_likely(config.teacher) if is_teacher else 0

    def rendezvous(self) -> str:
        """Where the ranks may meet."""
        from rlflow.workers.trainer.process_group import new_rendezvous

        return new_rendezvous(on_one_machine=self._config.cluster.address is None)

    def start(self, rendezvous: str) -> str:
        """Returns how tokens go through the model. Raises ConfigError for one that cannot be trained."""
        from rlflow.workers.trainer.frozen import FrozenPolicy

        self._policy = FrozenPolicy(self._config, self._model_path, self._rank, self._num_ranks, rendezvous)
        if self._num_likely:
            # Which ids the policy has too; a teacher's embedding may be larger.
            self._num_ids = num_ids(open_tokenizer(self._model_path, trust=self._config.model.trust_remote_code))
        return str(self._policy.agreement)

    def logprobs(self, handles: list[PayloadRef]) -> tuple[object, ...]:
        """True, then for each payload the log-probabilities [L] of each of its samples, 0 where there is no loss; of a
        teacher that says what is likely, `Likely` for each sample.

        All ranks are called in the same order, each with payloads of its own, of which there may be none.
        """
        try:
            payloads: list[EpisodePayload] = ray.get(handles)  # type: ignore[arg-type]
        except Exception:
            self._say([])  # the other ranks wait for this one
            raise
        read = as_told if self._is_teacher else lambda sample: sample
        groups = [[TrainSample(sample=read(one), advantage=0.0) for one in payload.samples] for payload in payloads]
        rows = iter(self._say(groups))
        return (True, *([next(rows) for _ in group] for group in groups))

    def _say(self, groups: list[list[TrainSample]]) -> Sequence[FloatArray | Likely]:
        if self._num_likely:
            return self._policy.likeliest(groups, min(self._num_likely, self._num_ids), self._num_ids)
        return self._policy.logprobs(groups)
