"""Several updates a step, of a policy and its critic, against the same loop written out with a plain optimiser."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import ray
import torch
from rounding import allowed_difference
from torch import Tensor
from training import VOCABULARY, largest_relative_difference, save_model, tiny_config, tiny_llama
from transformers import AutoModelForCausalLM

from rlflow.cluster.calls import DISK
from rlflow.cluster.start import ray_cluster
from rlflow.cluster.trainers import RayActorCritic, RayTrainer
from rlflow.config import Backend, Config, Proximal
from rlflow.groups.minibatches import minibatches
from rlflow.runtime.derived import recomputes
from rlflow.types import EpisodeEnd, EpisodePayload, EpisodeSummary, ReadyGroup, Sample, TurnSummary
from rlflow.workers.trainer.actor import TrainerWorker
from rlflow.workers.trainer.shards import read_full

EPOCHS, MINIBATCHES, STEPS = 2, 2, 2
CLIP_LOW, CLIP_HIGH, VALUE_CLIP, TRACE = 0.2, 0.28, 0.05, 0.95


class Episode:
    """One sample and its reward. Engines say of its tokens what no policy here would say."""

    def __init__(self, random: np.random.Generator, prompt: np.ndarray) -> None:
        length = int(random.choice([1, 2, 3, 7, 12]))
        self.mask = random.random(length) < 0.8
        self.mask[0] = True
        self.reward = float(random.normal())
        self.sample = Sample(
            prompt_ids=prompt.astype(np.int32),
            completion_ids=random.integers(0, VOCABULARY, length).astype(np.int32),
            loss_mask=self.mask,
            logprobs=np.where(self.mask, random.normal(-4, 0.5, length), 0).astype(np.float32),
            versions=np.where(self.mask, 0, -1).astype(np.int32),
            cache_versions=np.where(self.mask, 0, -1).astype(np.int32),
        )

    def summary(self) -> EpisodeSummary:
        count = int(self.mask.sum())
        return EpisodeSummary(
            end=EpisodeEnd.COMPLETED,
            reward=self.reward,
            num_prompt_tokens=len(self.sample.prompt_ids),
            num_completion_tokens=len(self.mask),
            num_loss_tokens=count,
            oldest_version=0,
            newest_version=0,
            turns=(TurnSummary(anchor="", num_loss_tokens=count, place=0),),
        )


Groups = dict[int, list[Episode]]


def played_steps() -> list[Groups]:
    random = np.random.default_rng(0)
    prompts = [random.integers(0, VOCABULARY, random.integers(1, 9)) for _ in range(4 * STEPS)]
    groups = {number: [Episode(random, prompt) for _ in range(3)] for number, prompt in enumerate(prompts, 1)}
    return [{number: groups[number] for number in range(4 * step + 1, 4 * step + 5)} for step in range(STEPS)]


def config_of() -> Config:
    config = tiny_config()
    config.algorithm.groups_per_step, config.algorithm.group_size = 4, 3
    config.algorithm.epochs, config.algorithm.minibatches = EPOCHS, MINIBATCHES
    config.algorithm.proximal, config.algorithm.advantage = Proximal.recomputed, "gae"
    config.critic.learning_rate, config.critic.value_clip = 3e-2, VALUE_CLIP
    config.trainer.learning_rate = 3e-3
    return config


class ByHand:
    """Policy and critic by transformers and torch alone, a sequence at a time."""

    def __init__(self, path: str, config: Config, dtype: torch.dtype) -> None:
        self.config = config
        self.policy, self.critic = (
            AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager") for _ in range(2)
        )
        self.head = torch.nn.Linear(self.policy.config.hidden_size, 1, dtype=dtype)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)
        self.of_policy = torch.optim.AdamW(self.policy.parameters(), weight_decay=0.0, betas=self._betas)
        of_critic = [*self.critic.model.parameters(), *self.head.parameters()]
        self.of_critic = torch.optim.AdamW(of_critic, weight_decay=0.0, betas=self._betas)

    @property
    def _betas(self) -> tuple[float, float]:
        return self.config.trainer.beta1, self.config.trainer.beta2

    def logprobs(self, one: Episode) -> Tensor:
        """[L]"""
        ids, start = self._ids(one), len(one.sample.prompt_ids) - 1
        logits = self.policy(input_ids=ids[None]).logits[0, start:-1] / self.config.rollout.temperature
        return logits.log_softmax(-1).gather(1, ids[start + 1 :, None])[:, 0][torch.from_numpy(one.mask)]

    def values(self, one: Episode) -> Tensor:
        states = self.critic.model(input_ids=self._ids(one)[None]).last_hidden_state[0]
        return self.head(states)[:, 0][len(one.sample.prompt_ids) - 1 : -1][torch.from_numpy(one.mask)]

    def _ids(self, one: Episode) -> Tensor:
        return torch.from_numpy(np.concatenate([one.sample.prompt_ids, one.sample.completion_ids]).astype(np.int64))

    def step(self, number: int, groups: Groups, order: np.random.Generator) -> None:
        """All updates of one step; `order` changes the order of sums and nothing else."""
        episodes = [one for group in groups.values() for one in group]
        with torch.no_grad():
            before = {one: (self.logprobs(one), self.values(one)) for one in episodes}
        found = {one: advantages(one.reward, before[one][1].double().numpy()) for one in episodes}
        every = np.concatenate(list(found.values()))
        whitened = {one: (row - every.mean()) / np.sqrt(every.var() + 1e-8) for one, row in found.items()}
        for epoch in range(EPOCHS):
            for part in minibatches(list(groups), MINIBATCHES, seed=0, step=number, epoch=epoch):
                chosen = [one for group_id in part for one in groups[group_id]]
                shuffled = [chosen[index] for index in order.permutation(len(chosen))]
                num_tokens = sum(int(one.mask.sum()) for one in chosen)
                for one in shuffled:
                    old_logprobs, old_values = before[one]
                    advantage = torch.from_numpy(whitened[one]).to(old_logprobs.dtype)
                    ratio = torch.exp(self.logprobs(one) - old_logprobs)
                    clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
                    (torch.maximum(-advantage * ratio, -advantage * clipped).sum() / num_tokens).backward()
                    returns = torch.from_numpy(found[one]).to(old_values.dtype) + old_values
                    values = self.values(one)
                    near = values.clamp(old_values - VALUE_CLIP, old_values + VALUE_CLIP)
                    squares = torch.maximum((values - returns) ** 2, (near - returns) ** 2)
                    (squares.sum() / 2 / num_tokens).backward()
                self._update(self.of_policy, self.config.trainer.learning_rate)
                self._update(self.of_critic, self.config.critic.learning_rate)

    def _update(self, optimizer: torch.optim.Optimizer, rate: float) -> None:
        (options,) = optimizer.param_groups
        torch.nn.utils.clip_grad_norm_(options["params"], self.config.trainer.max_grad_norm)
        options["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()

    def parameters(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        policy = {name: each.detach() for name, each in self.policy.named_parameters()}
        critic = {f"model.{name}": each.detach() for name, each in self.critic.model.named_parameters()}
        return policy, critic | {f"score.{name}": each.detach() for name, each in self.head.named_parameters()}


def advantages(reward: float, values: np.ndarray) -> np.ndarray:
    """GAE without discount, the reward behind the last token."""
    found, following, trailing = np.zeros(len(values)), 0.0, 0.0
    for place in reversed(range(len(values))):
        error = (reward if place == len(values) - 1 else 0.0) + following - values[place]
        found[place] = trailing = error + TRACE * trailing
        following = values[place]
    return found


def by_hand(path: str, config: Config, seed: int, dtype: torch.dtype) -> tuple[Mapping[str, Tensor], ...]:
    loop, order = ByHand(path, config, dtype), np.random.default_rng(seed)
    for number, groups in enumerate(played_steps()):
        loop.step(number, groups, order)
    return loop.parameters()


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with ray_cluster(Config()):
        yield


def ready(number: int, episodes: Sequence[Episode]) -> ReadyGroup:
    return ReadyGroup(
        group_id=number,
        task_id=f"t{number}",
        task_kind="",
        episodes=[one.summary() for one in episodes],
        payloads=[ray.put(EpisodePayload(samples=[one.sample], messages=[])) for one in episodes],
        advantages=[[one.reward] for one in episodes],
        num_bytes=1,
    )


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "num_ranks"), [(Backend.fsdp, 2), (Backend.deepspeed, 1)])
async def test_policy_and_critic_learn_from_what_they_knew_before_the_step(
    cluster: None, backend: Backend, num_ranks: int, tmp_path: Path
) -> None:
    """Log-probabilities, values, advantages and their moments are those of the first weights, in both epochs."""
    path, config = save_model(tiny_llama(), tmp_path / "model"), config_of()
    config.trainer.ranks, config.trainer.backend = num_ranks, backend
    config.trainer.zero_stage = 2 if backend is Backend.deepspeed else None
    actor = cast(Any, ray.remote)(concurrency_groups={DISK: 1})(TrainerWorker).options(num_cpus=0)
    trainers: list[RayTrainer] = []
    for is_critic in (False, True):
        ranks = [actor.remote(config, path, rank, num_ranks, 1, is_critic=is_critic) for rank in range(num_ranks)]
        rendezvous = await ranks[0].rendezvous.remote()
        for started in [rank.start.remote(rendezvous) for rank in ranks]:
            await started
        trainers.append(RayTrainer(ranks, config.trainer, recomputes=recomputes(config.algorithm) and not is_critic))
    trainer = RayActorCritic(*trainers)
    for number, played in enumerate(played_steps()):
        groups = {group_id: ready(group_id, episodes) for group_id, episodes in played.items()}
        await trainer.prepare(list(groups.values()), None)
        parts = [
            part
            for epoch in range(EPOCHS)
            for part in minibatches(list(groups), MINIBATCHES, seed=0, step=number, epoch=epoch)
        ]
        outcomes = []
        for index, part in enumerate(parts, 1):
            await trainer.accumulate([groups[group_id] for group_id in part], None)
            outcomes.append(await trainer.step(is_last=index == len(parts)))
        assert all(each.applied for each in outcomes)
        assert (outcomes[-1].metrics["clip_fraction"].value or 0) > 0
        assert (outcomes[-1].metrics["critic/clip_fraction"].value or 0) > 0
    await trainer.snapshot()
    await trainer.write_snapshot(tmp_path / "saved")
    exact = by_hand(path, config, 0, torch.float64)
    others = [by_hand(path, config, seed, torch.float32) for seed in range(3)]
    for index, folder in enumerate((tmp_path / "saved", tmp_path / "saved" / "critic")):
        found = dict(read_full(folder))
        allowed = allowed_difference(largest_relative_difference(other[index], exact[index]) for other in others)
        difference = largest_relative_difference(found, exact[index])
        print(f"{backend}, {folder.name}: difference {difference:.2e}, allowed {allowed:.2e}")
        assert difference <= allowed
