"""What a teacher says of tokens as an advantage: the expected gradient, mixing with rewards, options."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from enumeration import LENGTH, SEQUENCES, exact_gradient, logprobs_of, random_logits

from rlflow.algorithms.distillation import distillation_of, distilled
from rlflow.algorithms.registry import objective_of
from rlflow.algorithms.tokens import Tokens
from rlflow.config import AlgorithmConfig, TeacherConfig
from rlflow.errors import ConfigError

KNOWN = "kl, top_k, prompt, clamp, model, key_variable, concurrency"


@pytest.mark.parametrize("loss", ["reinforce", "ppo_clip", "cispo", "aipo"])
def test_the_expected_gradient_is_that_of_the_reverse_kl(loss: str) -> None:
    """Over all 125 sequences, each with its probability, as if it had been sampled so often."""
    policy, teacher = random_logits(1).requires_grad_(), random_logits(2)
    logprobs = logprobs_of(policy).flatten()
    behaviour, said = logprobs.detach(), logprobs_of(teacher).flatten()
    found = distilled(np.zeros(len(behaviour)), behaviour.numpy(), said.numpy(), 1.0, 0.0)
    tokens = Tokens(
        logprobs=logprobs,
        proximal=behaviour,
        behaviour=behaviour,
        advantages=torch.from_numpy(found.advantages).double(),
        entropies=torch.zeros_like(behaviour),
        sequence_of=torch.arange(len(SEQUENCES)).repeat_interleave(LENGTH),
        num_sequences=len(SEQUENCES),
    )
    each = objective_of(AlgorithmConfig(loss=loss)).loss(tokens).loss
    sampled = behaviour.reshape(-1, LENGTH).sum(1).exp().repeat_interleave(LENGTH)
    (sampled * each).sum().backward()
    expected = exact_gradient(policy.detach(), teacher)
    assert policy.grad is not None and expected.abs().max() > 0.1
    assert (policy.grad - expected).abs().max() < 1e-6


def test_rewards_and_teacher_are_weighed_and_added() -> None:
    found = distilled(
        np.array([1.0, 1.0, -2.0, 0.0]),
        np.array([-0.5, -2.0, -0.25, -1.0]),
        np.array([-2.0, -0.5, -30.0, -1.0]),
        0.5,
        2.0,
        clamp=3.0,
    )
    assert found.advantages.tolist() == [1.25, 2.75, -5.5, 0.0]
    assert found.is_clamped.tolist() == [False, False, True, False]
    assert found.advantages.dtype == np.float32


def test_by_default_a_token_counts_ten_nats_at_most() -> None:
    chosen = distillation_of(TeacherConfig(weight=2.0, reward_weight=0.0))
    nats = np.array([-11.0, 9.0], np.float32)
    assert chosen(np.ones(2, np.float32), np.zeros(2, np.float32), nats).advantages.tolist() == [-20.0, 18.0]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"kl": "jensen"}, "kl must be sampled, reverse or forward; got 'jensen'"),
        ({"kl": "reverse", "top_k": 0}, "top_k must be from 1 to 1024; got 0"),
        ({"kl": "reverse", "top_k": 1025}, "top_k must be from 1 to 1024; got 1025"),
        (
            {"kl": "forward", "clamp": 5.0},
            "teacher.args.clamp has no effect with teacher.args.kl=forward; leave it out",
        ),
        ({"top_k": 8}, "teacher.args.top_k has no effect with teacher.args.kl=sampled; leave it out"),
        ({"clamp": 0.0}, "clamp must be above 0 and finite; got 0.0"),
        ({"clap": 3.0}, f"teacher.args.clap is not an argument of a teacher, which takes {KNOWN}; did you mean clamp?"),
        ({"weight": 3.0}, f"teacher.args.weight is not an argument of a teacher, which takes {KNOWN}"),
    ],
)
def test_a_wrong_option_is_refused(args: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        distillation_of(TeacherConfig(args=args))
    assert str(refused.value) == message
