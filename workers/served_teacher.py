"""A teacher behind a URL as a Ray actor: it asks the server what a `FrozenWorker` would compute.

    payloads -> token ids of each sample -> server -> [L], or `Likely`, for each sample -> a handle for each payload

Groups are asked about side by side, each on a thread of the actor; one event loop has all connections.
"""

import asyncio
import threading
import time

import numpy as np
import ray

from rlflow.algorithms.distillation import num_likely, teacher_options
from rlflow.config import Config
from rlflow.errors import TeacherLost
from rlflow.models.opening import num_ids, open_tokenizer
from rlflow.rollout.samples import as_told
from rlflow.runtime.asking import NoAnswer
from rlflow.runtime.concurrency import all_or_none
from rlflow.types import EpisodePayload, FloatArray, Likely, PayloadRef, Sample
from rlflow.workers.served import ServedModel, likely_in, said_of

SHARE_OF_TIME = 0.9
"""The share of deadlines.train_s in which the server is asked; the rest is for saying what went wrong."""


class ServedTeacher:
    """Wrapped by `ray.remote`; called like a `FrozenWorker` that is the only rank.

    It has a thread for each group that is under way, because the driver's deadline for a group begins when it asks.
    """

    def __init__(self, config: Config, policy_path: str, url: str, setting: str) -> None:
        self._config, self._policy_path, self._url, self._setting = config, policy_path, url, setting
        self._num_likely = num_likely(config.teacher)
        self._loop = asyncio.new_event_loop()

    def rendezvous(self) -> str:
        """Nobody is met."""
        return ""

    def start(self, rendezvous: str) -> str:
        """Returns where the teacher is. Raises ConfigError without the key, TeacherLost if the server is away."""
        del rendezvous
        threading.Thread(target=self._loop.run_forever, name="server", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()

    async def _start(self) -> str:
        # A teacher's embedding may be larger than the policy's.
        trust = self._config.model.trust_remote_code
        self._num_ids = num_ids(open_tokenizer(self._policy_path, trust=trust)) if self._num_likely else 0
        self._model = await ServedModel(self._url, teacher_options(self._config.teacher)).__aenter__()
        try:
            return f"{await self._model.find_name(self._config.deadlines.start_s * SHARE_OF_TIME)} at {self._url}"
        except NoAnswer as error:
            raise self._lost(error) from error

    def logprobs(self, handles: list[PayloadRef]) -> tuple[object, ...]:
        """As `FrozenWorker.logprobs`. Raises TeacherLost if the server does not answer before deadlines.train_s."""
        ends_at = time.monotonic() + self._config.deadlines.train_s * SHARE_OF_TIME
        payloads: list[EpisodePayload] = ray.get(handles)  # type: ignore[arg-type]
        rows = asyncio.run_coroutine_threadsafe(self._say(payloads, ends_at), self._loop).result()
        return (True, *rows)

    async def _say(self, payloads: list[EpisodePayload], ends_at: float) -> list[list[FloatArray | Likely]]:
        samples = [sample for payload in payloads for sample in payload.samples]
        try:
            rows = iter(await all_or_none([self._say_one(sample, ends_at) for sample in samples]))
        except NoAnswer as error:
            raise self._lost(error) from error
        return [[next(rows) for _ in payload.samples] for payload in payloads]

    async def _say_one(self, sample: Sample, ends_at: float) -> FloatArray | Likely:
        sample = as_told(sample)
        places, prompt = np.flatnonzero(sample.loss_mask), sample.prompt_ids.tolist()
        tokens = prompt + sample.completion_ids[: places[-1] + 1 if len(places) else 0].tolist()
        said = await self._model.places(tokens, ends_at) if len(places) else []
        if self._num_likely:
            of_loss = [said[len(prompt) + place] for place in places.tolist()]
            return likely_in(of_loss, sample.loss_mask, self._num_likely, self._num_ids)
        found = np.zeros(len(sample.loss_mask), np.float32)
        if len(places):
            found[places] = said_of(tokens, said)[len(prompt) + places]
        return found

    def _lost(self, error: NoAnswer) -> TeacherLost:
        return TeacherLost(
            f"{self._setting}={self._url} is lost: {error}; start its server again, and then the run, which goes on "
            "from its last checkpoint; raise deadlines.train_s if the server only takes long"
        )
