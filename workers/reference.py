"""The frozen reference policy as a Ray actor: the trainer's code without the optimiser's step."""

from rlflow.config import Config
from rlflow.runtime.environment import keep_memory, share_cpu
from rlflow.types import EpisodePayload, FloatArray, TrainSample


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
        flat = self._policy.logprobs([[sample for group in groups for sample in group]])
        found: list[list[FloatArray]] = []
        for group in groups:
            found.append(flat[: len(group)])
            flat = flat[len(group) :]
        return (True, *found)
