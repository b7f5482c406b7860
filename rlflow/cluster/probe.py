"""Do the engines sample from the model that is trained? Asked once, before the first episode."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlflow.cluster.calls import answer
from rlflow.cluster.trainers import RayTrainer
from rlflow.errors import WorkerError
from rlflow.models.images import probe_picture
from rlflow.rollout.requests import Completion, GenerateRequest, ProbePrompt
from rlflow.rollout.samples import sample_of_reply
from rlflow.types import Sample

NUM_TOKENS = 16
"""Tokens of a reply, so that both kinds of pass through an engine are compared: of prompts, and token by token."""


class EngineProbe:
    """Implements `roles.Probe`."""

    def __init__(self, trainer: RayTrainer, engines: Sequence[Any]) -> None:
        self._trainer = trainer
        self._engines = engines

    async def replies(self) -> list[Sample]:
        prompts = await self._trainer.probe_prompts()
        asked = [(engine, prompt) for engine in range(len(self._engines)) for prompt in prompts]
        replies = await asyncio.gather(*(self._reply(*each) for each in asked), return_exceptions=True)
        errors = [reply for reply in replies if isinstance(reply, BaseException)]
        for error in errors:  # the fleet sees to engines that were lost, and loads them again
            if len(errors) == len(replies) or not isinstance(error, WorkerError):
                raise error
        return [reply for reply in replies if isinstance(reply, Sample)]

    async def difference(self, replies: Sequence[Sample]) -> float:
        found = await self._trainer.score(replies)
        pairs = zip(found, replies, strict=True)
        return float(np.concatenate([np.abs(own - reply.logprobs) for own, reply in pairs]).mean())

    async def _reply(self, engine: int, prompt: ProbePrompt) -> Sample:
        request = GenerateRequest(
            prompt_ids=prompt.ids,
            seed=0,
            max_new_tokens=NUM_TOKENS,
            prefix_key=None,
            images=prompt.images,
            pictures={image.key: probe_picture() for image in prompt.images},
        )
        call = self._engines[engine].generate.remote(request)
        reply: Completion = await answer(f"rollout engine {engine}", call, "generate")
        return sample_of_reply(request, reply)
