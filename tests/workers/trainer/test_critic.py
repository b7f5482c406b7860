"""The critic: its values, its targets, and that it learns."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from families import tiny_model
from training import save_model, tiny_config, tiny_groups, tiny_llama
from transformers import AutoModelForCausalLM

from rlflow.algorithms.token_advantage.gae import Moments, gae
from rlflow.batching.pack import pack
from rlflow.types import CriticTargets, Sample, TrainSample, TurnSummary
from rlflow.workers.trainer.fetch import moments_of, rewards_of_tokens, token_level, whiten_all
from rlflow.workers.trainer.fsdp import FsdpTrainer
from rlflow.workers.trainer.policy import split_logprobs
from rlflow.workers.trainer.pretrained import fill
from rlflow.workers.trainer.value import empty_value_model


def sample_of(mask: list[int]) -> Sample:
    length = len(mask)
    return Sample(
        prompt_ids=np.array([1], np.int32),
        completion_ids=np.arange(length, dtype=np.int32),
        loss_mask=np.array(mask, np.bool_),
        logprobs=np.zeros(length, np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        cache_versions=np.where(mask, 0, -1).astype(np.int32),
    )


def turns_of(*places: int, rewards: Sequence[float] = ()) -> list[TurnSummary]:
    """Turns of one token each."""
    given = rewards or [0.0] * len(places)
    return [
        TurnSummary(anchor="", num_loss_tokens=1, place=place, reward=reward)
        for place, reward in zip(places, given, strict=True)
    ]


@pytest.mark.parametrize("family", ["Gemma 3", "Gemma 4", "GLM-4.5", "Granite", "OLMo 3", "Qwen3.5"])
def test_values_of_a_packed_row_are_those_of_each_sequence_alone(family: str, tmp_path: Path) -> None:
    """Transformers has no token classifier of most of these."""
    tiny_model(family, seed=1).save_pretrained(tmp_path)
    path = str(tmp_path)
    model, values = empty_value_model(tiny_config(), path)
    fill(model.model, values)
    groups = tiny_groups()
    (found,) = model(pack(groups))
    assert found.count_nonzero() == 0  # a fresh head knows nothing
    torch.manual_seed(0)
    weight = torch.nn.init.normal_(model.model.get_parameter("score.weight"))
    plain = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval().base_model
    )
    samples = [sample for group in groups for sample in group]
    for sample, row in zip(samples, split_logprobs(model(pack(groups))[0].detach(), samples), strict=True):
        ids = np.concatenate([sample.sample.prompt_ids, sample.sample.completion_ids]).astype(np.int64)
        with torch.no_grad():
            states = (plain(torch.from_numpy(ids)[None]).last_hidden_state[0] @ weight[0]).numpy()
        expected = states[len(sample.sample.prompt_ids) - 1 : -1]
        np.testing.assert_allclose(row, np.where(sample.sample.loss_mask, expected, 0), atol=1e-4)


def test_an_episode_that_forked_is_one_sequence_with_its_reward_at_the_end() -> None:
    samples = [sample_of([1, 0, 1]), sample_of([1])]
    values = [np.array([0.5, 9.0, 0.25], np.float32), np.array([0.75], np.float32)]
    rewards = rewards_of_tokens(samples, turns_of(0, 1, 2), 1.0, None, 0.0)
    assert rewards.tolist() == [0.0, 0.0, 0.0, 1.0]
    advantages, targets = token_level(samples, turns_of(0, 1, 2), rewards, values, partial(gae, trace=0.0))
    # Errors of one step: 0.25 - 0.5, 0.75 - 0.25, 1 - 0.75; the observation is skipped.
    assert [row.tolist() for row in advantages] == [[-0.25, 0.0, 0.5], [0.25]]
    assert [target.returns.tolist() for target in targets] == [[0.25, 0.0, 0.75], [1.0]]
    assert targets[1].values.tolist() == [0.75]


def test_turns_are_in_the_order_of_time_with_rewards_of_their_own() -> None:
    """The turns of two conversations take turns: 0 and 2 are one sample, 1 is the other."""
    samples = [sample_of([1, 0, 1]), sample_of([1])]
    values = [np.array([0.5, 9.0, 0.25], np.float32), np.array([0.75], np.float32)]
    turns = turns_of(0, 2, 1, rewards=(0.0, 0.5, 0.25))
    rewards = rewards_of_tokens(samples, turns, 1.0, None, 0.0)
    assert rewards.tolist() == [0.0, 0.0, 0.75, 0.25]  # the last turn has what is left of 1
    advantages, _ = token_level(samples, turns, rewards, values, partial(gae, trace=0.0, discount=0.5))
    # 0.5 * 0.75 - 0.5, then 0.25 + 0.5 * 0.25 - 0.75, then 0.75 - 0.25.
    assert [row.tolist() for row in advantages] == [[-0.125, 0.0, 0.5], [-0.375]]


def test_the_distance_to_the_reference_is_taken_off_each_reward() -> None:
    one = sample_of([1, 0, 1])
    one.logprobs[:] = [-1.0, 0.0, -2.0]
    rewards = rewards_of_tokens([one], turns_of(0, 1), 1.0, [np.array([-1.5, 9.0, -1.0], np.float32)], 0.1)
    assert rewards.tolist() == pytest.approx([-0.05, 0.0, 1.1])


def test_advantages_are_whitened_over_the_loss_tokens_of_the_step() -> None:
    rows = [[1.0, 50.0, 3.0], [5.0]]
    samples = [
        TrainSample(sample=sample_of(mask), advantage=np.array(row, np.float32))
        for mask, row in zip([[1, 0, 1], [1]], rows, strict=True)
    ]
    moments = moments_of(samples)
    assert moments == Moments(weight=3.0, total=9.0, squares=35.0)
    whiten_all(samples, moments)
    deviation = (8 / 3) ** 0.5
    assert np.asarray(samples[0].advantage).tolist() == pytest.approx([-2 / deviation, 0.0, 0.0])
    assert np.asarray(samples[1].advantage).tolist() == pytest.approx([2 / deviation])


def with_targets(groups: list[list[TrainSample]]) -> list[list[TrainSample]]:
    """Returns that can be read off the prompt: 1 for some groups, -1 for others."""
    for number, group in enumerate(groups):
        for one in group:
            length = len(one.sample.loss_mask)
            returns = np.full(length, 1.0 if number % 2 else -1.0, np.float32)
            one.critic = CriticTargets(values=np.zeros(length, np.float32), returns=returns)
    return groups


def test_the_policy_waits_for_the_critic(tmp_path: Path) -> None:
    config = tiny_config()
    config.critic.warmup_steps = 2
    path = save_model(tiny_llama(), tmp_path)
    policy = FsdpTrainer(config, path, 0, 1, "")
    first = {name: each.clone() for name, each in policy.full_parameters()}
    rates = []
    for _ in range(3):
        policy.accumulate([tiny_groups()])
        is_same = all(torch.equal(each, first[name]) for name, each in policy.full_parameters())
        rates.append((is_same, policy.step().learning_rate))
    assert rates == [(True, 0.0), (True, 0.0), (True, config.trainer.learning_rate)]
    assert any(not torch.equal(each, first[name]) for name, each in policy.full_parameters())
    critic = FsdpTrainer(config, path, 0, 1, "", is_critic=True)
    critic.accumulate([with_targets(tiny_groups())])
    assert critic.step().learning_rate == config.trainer.learning_rate


def test_the_critic_learns_what_to_expect(tmp_path: Path) -> None:
    config = tiny_config()
    config.critic.value_clip = None
    path = save_model(tiny_llama(), tmp_path / "model")
    critic = FsdpTrainer(config, path, 0, 1, "", is_critic=True)
    explained: list[float] = []
    for _ in range(12):
        critic.accumulate([with_targets(tiny_groups(num_groups=4))])
        outcome = critic.step()
        assert outcome.applied
        explained.append(outcome.metrics["critic/explained"].value or 0.0)
    assert explained[0] <= 0.0
    assert explained[-1] > 0.9
    (rows,) = critic.per_token([tiny_groups(num_groups=4)])
    assert rows[0][0] < -0.5
    critic.snapshot().write(tmp_path / "saved")
    again = FsdpTrainer(config, path, 0, 1, "", is_critic=True)
    again.load(tmp_path / "saved")
    (found,) = again.per_token([tiny_groups(num_groups=4)])
    assert all(np.array_equal(one, other) for one, other in zip(found, rows, strict=True))


def test_the_clip_holds_values_near_the_old_ones(tmp_path: Path) -> None:
    config = tiny_config()
    config.critic.value_clip = 0.1
    path = save_model(tiny_llama(), tmp_path / "model")
    critic = FsdpTrainer(config, path, 0, 1, "", is_critic=True)
    clipped: list[float] = []
    for _ in range(12):
        critic.accumulate([with_targets(tiny_groups(num_groups=4))])
        clipped.append(critic.step().metrics["critic/clip_fraction"].value or 0.0)
    assert clipped[-1] > 0.5
