"""The actor that scores with a reward model; conversations that wait at the same time share a forward pass.

score -> tokens -> queue -> at most trainer.micro_batch_tokens tokens at once -> model, in a thread -> Verdict
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from rlflow.batching.pack import Conversation
from rlflow.config import Config
from rlflow.rewards.call import WHAT_REWARDS_ARE, invalid, is_usable
from rlflow.rewards.scaled import scaling_of
from rlflow.runtime.environment import keep_memory, share_cpu
from rlflow.types import EpisodeEnd, Transcript, Verdict

if TYPE_CHECKING:
    from rlflow.workers.trainer.reward_model import RewardModel

MAX_WAITING = 1024
"""Queue size, in conversations. Further callers block until there is room."""
END_AFTER_S = 1.0
"""After a row overran its time, so that its verdicts are sent before the process ends."""


class RewardModelWorker:
    """Wrapped by `ray.remote`. An actor that was restarted loads its model at the first request."""

    def __init__(self, config: Config, folder: str, threads: int, args: Mapping[str, object]) -> None:
        """`args` are the options of `scaled`."""
        share_cpu(threads)
        keep_memory()
        self._config = config
        self._folder = folder
        self._is_scaled = bool(args)
        self._scaling = scaling_of(args)
        self._waiting: asyncio.Queue[tuple[Conversation, asyncio.Future[Verdict]]] = asyncio.Queue(MAX_WAITING)
        self._starting = asyncio.Lock()
        self._model: RewardModel | None = None
        self._serving: asyncio.Task[None] | None = None
        # A tokenizer is not safe to use from two threads at once, and neither has to wait for the other.
        self._tokens = ThreadPoolExecutor(1, "tokens")
        self._rows = ThreadPoolExecutor(1, "rows")

    async def start(self) -> None:
        """Load the model, unless it is loaded. Raises ConfigError if it cannot be used."""
        await self._started()

    async def score(self, transcript: Transcript) -> Verdict:
        """Score one episode. Only the time in the model counts towards the deadline."""
        loop = asyncio.get_running_loop()
        model = await self._started()
        conversation = await loop.run_in_executor(self._tokens, model.encode, transcript)
        if isinstance(conversation, Verdict):
            return conversation
        verdict = loop.create_future()
        await self._waiting.put((conversation, verdict))
        return await verdict

    async def close(self) -> None:
        """Stop scoring; the row in the model is given up."""
        if self._serving is not None:
            self._serving.cancel()

    async def _started(self) -> RewardModel:
        async with self._starting:
            if self._model is None:
                loaded: RewardModel = await asyncio.get_running_loop().run_in_executor(self._rows, self._load)
                self._model, self._serving = loaded, asyncio.create_task(self._serve(loaded))
            return self._model

    def _load(self) -> RewardModel:
        from rlflow.workers.trainer.reward_model import load_reward_model

        return load_reward_model(self._config, self._folder)

    async def _serve(self, model: RewardModel) -> None:
        """Score rows one after the other, until one overruns its time."""
        taken = None
        while True:
            row = [taken or await self._waiting.get()]
            taken = None
            while taken is None and not self._waiting.empty():
                taken = self._waiting.get_nowait()
                if model.num_tokens([each for each, _ in (*row, taken)]) <= self._config.trainer.micro_batch_tokens:
                    row.append(taken)
                    taken = None
            verdicts = await self._score_row(model, [each for each, _ in row])
            for (_, waiting), verdict in zip(row, verdicts, strict=True):
                if not waiting.done():  # the caller may have been cancelled
                    waiting.set_result(verdict)
            if verdicts[0].end is EpisodeEnd.REWARD_TIMEOUT:
                asyncio.get_running_loop().call_later(END_AFTER_S, self._end)
                return

    async def _score_row(self, model: RewardModel, row: Sequence[Conversation]) -> list[Verdict]:
        timeout_s = self._config.reward.timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                scores = await asyncio.get_running_loop().run_in_executor(self._rows, model.scores, row)
        except TimeoutError:
            detail = f"the reward model took longer than {timeout_s:g} s (reward.timeout_s)"
            return [Verdict(reward=None, end=EpisodeEnd.REWARD_TIMEOUT, detail=detail)] * len(row)
        except Exception as error:
            detail = f"the reward model failed: {type(error).__name__}: {error}"
            return [Verdict(reward=None, end=EpisodeEnd.REWARD_ERROR, detail=detail)] * len(row)
        problem = f"{WHAT_REWARDS_ARE}; the reward model gave"
        return [
            self._verdict(each, reward) if is_usable(reward := self._scaling(each)) else invalid(f"{problem} {each}")
            for each in scores
        ]

    def _verdict(self, score: float, reward: float) -> Verdict:
        return Verdict(reward=reward, metrics={"score": score} if self._is_scaled else {})

    def _end(self) -> None:
        """A thread cannot be ended, so the process is; Ray starts another."""
        os._exit(1)
