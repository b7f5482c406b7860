"""The frozen reference policy as a Ray actor: the trainer's code without the optimiser's step."""

from rlflow.config import Config
from rlflow.runtime.environment import keep_memory, share_cpu
from rlflow.types import EpisodePayload, TrainSample


class ReferenceWorker:
    """Wrapped by `ray.remote`; `start` loads the model that the run began with."""

    def __init__(self, config: Config, model_path: str, threads: int) -> None:
        share_cpu(threads)
        keep_memory()
        self._config = config
        self._model_path = model_path

    def start(self) -> None:
        from rlflow.workers.trainer.policy import FrozenPolicy

        self._policy = FrozenPolicy(self._config, self._model_path)

    def logprobs(self, *payloads: EpisodePayload) -> tuple[object, ...]:
        """True, then for each payload the log-probabilities [L] of each of its samples, 0 where there is no loss."""
        groups = [[TrainSample(sample=sample, advantage=0.0) for sample in payload.samples] for payload in payloads]
        rows = iter(self._policy.logprobs(groups))
        return (True, *([next(rows) for _ in group] for group in groups))
