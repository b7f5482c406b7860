"""The whole algorithm on one page: synchronous GRPO in one process, without Ray, packing or streaming.

Read it to learn what rlflow does; the tests use it as the oracle of the distributed path: with the same seed, one
engine and staleness 0, the driver makes the same updates. It shares the types, the engine and the order of tasks and
seeds with the driver; prompts, rewards, advantages, loss and update are written again here, in the plainest way.

    python -m rlflow.recipes.minimal_grpo model.path=tiny run.steps=3
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from rlflow.algorithms.schedules import learning_rate
from rlflow.config import AlgorithmConfig, Config, CurriculumConfig, RewardConfig
from rlflow.environments.find import load_environment
from rlflow.envs.base import EnvironmentSpec, RewardFunction
from rlflow.groups.intake import group_seed
from rlflow.groups.minibatches import minibatches
from rlflow.groups.sampler import TaskSampler
from rlflow.models.opening import open_tokenizer
from rlflow.models.resolve import resolve_model
from rlflow.rewards.choose import choose_rewards, load
from rlflow.rollout.chat import episode_seed
from rlflow.rollout.requests import Completion, GenerateRequest
from rlflow.settings.checks import check
from rlflow.types import Task
from rlflow.weights.shm.arena import Arena
from rlflow.workers.engine.engine import RolloutEngine

CLIP_LOW, CLIP_HIGH = 0.2, 0.28


@dataclass(kw_only=True, slots=True)
class Group:
    """One task, its G sampled replies and what they were worth."""

    group_id: int
    prompt_ids: list[int]
    completions: list[Completion]
    rewards: list[float]


@dataclass(kw_only=True, slots=True)
class Update:
    """What all optimiser steps of one step of the run did."""

    step: int
    reward: float
    """Mean over the episodes of the step."""
    loss: float
    """Mean over the sampled tokens, each as often as there are epochs."""
    grad_norm: float
    """Mean over the updates."""


class MinimalGrpo:
    """The model, the engine and the optimiser of one run."""

    def __init__(self, config: Config) -> None:
        """Raises ConfigError as `rlflow train` would; ValueError for what this page leaves out."""
        check(config)
        algorithm = config.algorithm
        plain = AlgorithmConfig(
            groups_per_step=algorithm.groups_per_step,
            group_size=algorithm.group_size,
            epochs=algorithm.epochs,
            minibatches=algorithm.minibatches,
        )
        if algorithm != plain:
            raise ValueError(
                "the minimal loop is GRPO with the clipped loss; leave the other settings of algorithm alone"
            )
        if config.teacher.models:
            raise ValueError("the minimal loop learns from rewards alone; leave teacher.models empty")
        if config.curriculum != CurriculumConfig():
            raise ValueError("the minimal loop plays each task once a pass; leave the settings of curriculum alone")
        self.config = config
        model_path = resolve_model(config.model.path)
        self.spec: EnvironmentSpec = load_environment(config.env, config.reward)
        chosen, *others = choose_rewards(config.reward, self.spec.reward)
        plain_reward = RewardConfig(function=config.reward.function, timeout_s=config.reward.timeout_s)
        if chosen.function is None or others or config.reward != plain_reward:
            raise ValueError("the minimal loop scores by one function(task, completion); leave the rest alone")
        self.reward: RewardFunction = load(chosen)
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            model_path, trust_remote_code=False, dtype=torch.float32, attn_implementation="eager"
        )
        self.tokenizer: PreTrainedTokenizerBase = open_tokenizer(model_path, trust=False)
        self.engine = RolloutEngine(config, model_path, index=0, threads=1)
        self.arena = Arena([(name, p.dtype, tuple(p.shape)) for name, p in self.model.named_parameters()])
        trainer = config.trainer
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=trainer.learning_rate,
            betas=(trainer.beta1, trainer.beta2),
            weight_decay=trainer.weight_decay,
        )

    async def run(self) -> list[Update]:
        """All steps; one line each on standard output."""
        sampler = TaskSampler(self.spec.tasks(), self.config.run.seed)
        updates: list[Update] = []
        await self.engine.start()
        try:
            for step in range(self.config.run.steps):
                await self.engine.load_weights(self.arena.stage(step, self.model.named_parameters()))
                first_group = 1 + step * self.config.algorithm.groups_per_step
                group_ids = range(first_group, first_group + self.config.algorithm.groups_per_step)
                groups = await asyncio.gather(*(self.play(group_id, sampler.next()[0]) for group_id in group_ids))
                updates.append(self.update(step, groups))
                print(f"step {step + 1}: reward {updates[-1].reward:.3f}, loss {updates[-1].loss:.5f}", flush=True)
        finally:
            await self.engine.shutdown()
            self.arena.close()
        return updates

    async def play(self, group_id: int, task: Task) -> Group:
        """Sample G replies to the same prompt and score each."""
        conversation = [{"role": message["role"], "content": message["content"]} for message in task.prompt]
        text = self.tokenizer.apply_chat_template(
            conversation, add_generation_prompt=True, tokenize=False, **self.config.rollout.template_args
        )
        prompt_ids = self.tokenizer.encode(str(text), add_special_tokens=False)
        seed = group_seed(self.config.run.seed, group_id)
        requests = [
            GenerateRequest(
                prompt_ids=prompt_ids,
                seed=episode_seed(seed, index),
                max_new_tokens=self.config.rollout.max_new_tokens,
                prefix_key=str(group_id),
            )
            for index in range(self.config.algorithm.group_size)
        ]
        completions = await asyncio.gather(*map(self.reply, requests))
        texts = [str(self.tokenizer.decode(each.ids, skip_special_tokens=True)) for each in completions]
        rewards = [cast(float, self.reward(task=task, completion=text)) for text in texts]
        assert all(reward is not None for reward in rewards), "the minimal loop needs a reward for every reply"
        return Group(group_id=group_id, prompt_ids=prompt_ids, completions=completions, rewards=rewards)

    async def reply(self, request: GenerateRequest) -> Completion:
        """A whole reply, which the engine returns in parts."""
        reply = await self.engine.generate(request)
        while reply.reply:
            reply.add(await self.engine.go_on(reply.reply))
        return reply

    def update(self, step: int, groups: Sequence[Group]) -> Update:
        """Train on the groups of a step: in each epoch they are divided anew, with an optimiser step for each part."""
        by_id = {group.group_id: group for group in groups}
        losses: list[tuple[float, int]] = []
        grad_norms: list[float] = []
        algorithm, seed = self.config.algorithm, self.config.run.seed
        for epoch in range(algorithm.epochs):
            for part in minibatches(list(by_id), algorithm.minibatches, seed=seed, step=step, epoch=epoch):
                loss, num_tokens, grad_norm = self.optimise(step, [by_id[group_id] for group_id in part])
                losses.append((loss, num_tokens))
                grad_norms.append(grad_norm)
        rewards = [reward for group in groups for reward in group.rewards]
        return Update(
            step=step + 1,
            reward=sum(rewards) / len(rewards),
            loss=sum(loss * count for loss, count in losses) / sum(count for _, count in losses),
            grad_norm=sum(grad_norms) / len(grad_norms),
        )

    def optimise(self, step: int, groups: Sequence[Group]) -> tuple[float, int, float]:
        """One optimiser step on the mean over all sampled tokens of the clipped policy-gradient loss.

        Returns the loss, the number of tokens and the norm of the gradient.
        """
        num_tokens = sum(len(completion.ids) for group in groups for completion in group.completions)
        loss = torch.zeros(())
        for group in groups:
            rewards = torch.tensor(group.rewards)
            advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
            group_loss = self.group_loss(group, advantages) / num_tokens
            group_loss.backward()
            loss += group_loss.detach()
        trainer = self.config.trainer
        grad_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), trainer.max_grad_norm)
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = learning_rate(trainer, step, self.config.run.steps)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss), num_tokens, float(grad_norm)

    def group_loss(self, group: Group, advantages: torch.Tensor) -> torch.Tensor:
        """Sum over the tokens of a group of max(-A r, -A clip(r)), r = policy / behaviour policy (PPO, 1707.06347)."""
        logprobs, behaviour, mask = self.logprobs(group)
        ratio = torch.exp((logprobs - behaviour).clamp(-20, 20))
        clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
        advantage = advantages[:, None]
        per_token = torch.maximum(-advantage * ratio, -advantage * clipped)
        return (per_token * mask).sum()

    def logprobs(self, group: Group) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Log-probabilities under the model, those that the engine recorded, and the mask of real tokens; each [G,
        L]."""
        longest = max(len(completion.ids) for completion in group.completions)

        def padded(rows: Sequence[Sequence[float]], dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor([[*row, *([0] * (longest - len(row)))] for row in rows], dtype=dtype)

        ids = padded([completion.ids for completion in group.completions], torch.long)
        behaviour = padded([completion.logprobs for completion in group.completions], torch.float32)
        mask = padded([[1.0] * len(completion.ids) for completion in group.completions], torch.float32)
        prompt = torch.tensor(group.prompt_ids).expand(len(ids), -1)
        # Padding stands behind every real token, where causal attention cannot see it.
        logits = self.model(input_ids=torch.cat([prompt, ids], dim=1)).logits
        logits = logits[:, len(group.prompt_ids) - 1 : -1] / self.config.rollout.temperature
        logprobs = torch.log_softmax(logits, dim=-1).gather(-1, ids[..., None]).squeeze(-1)
        return logprobs, behaviour, mask


def main(overrides: Sequence[str]) -> None:
    """Run with defaults changed by `key=value` arguments."""
    merged = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.from_dotlist(list(overrides)))
    config = OmegaConf.to_object(merged)
    assert isinstance(config, Config)
    asyncio.run(MinimalGrpo(config).run())


if __name__ == "__main__":
    main(sys.argv[1:])
