"""What a teacher finds likely in the place of each token: how it is computed, packed, and learnt from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from fakes import make_episode
from torch import Tensor
from training import (
    VOCABULARY,
    largest_relative_difference,
    plain_model,
    save_model,
    tiny_config,
    tiny_groups,
    tiny_llama,
)

from rlflow.batching.pack import pack
from rlflow.config import Config, TeacherConfig
from rlflow.errors import ConfigError
from rlflow.groups.grading import Grader
from rlflow.settings.checks import check
from rlflow.types import Likely, PlayedGroup, Support, Task, TrainSample
from rlflow.workers.trainer.frozen import FrozenPolicy
from rlflow.workers.trainer.fsdp import FsdpTrainer
from rlflow.workers.trainer.objective import PolicyObjective
from rlflow.workers.trainer.policy import load_policy


def settings(kl: str, top_k: int) -> Config:
    config = tiny_config()
    config.teacher = TeacherConfig(
        models={"default": "a"}, weight=0.5, reward_weight=0.0, args={"kl": kl, "top_k": top_k}
    )
    return config


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A policy, and a teacher of the same vocabulary with more layers."""
    made = [save_model(tiny_llama(num_hidden_layers=n), tmp_path_factory.mktemp(f"layers_{n}")) for n in (1, 3)]
    return made[0], made[1]


def plain_rows(model: torch.nn.Module, sample: TrainSample, temperature: float) -> Tensor:
    """log softmax [N, V] in the place of each loss token of one sample, by transformers alone."""
    one = sample.sample
    ids = np.concatenate([one.prompt_ids, one.completion_ids]).astype(np.int64)
    logits = model(torch.from_numpy(ids)[None]).logits[0] / temperature
    places = len(one.prompt_ids) - 1 + np.flatnonzero(one.loss_mask)
    return logits.log_softmax(-1)[torch.from_numpy(places)]


def with_likely(folder: str, samples: Sequence[TrainSample], config: Config, k: int) -> list[TrainSample]:
    found = FrozenPolicy(config, folder).likeliest([samples], k, VOCABULARY)
    return [replace(one, likely=likely) for one, likely in zip(samples, found, strict=True)]


@pytest.mark.parametrize("max_logits", [2**26, 3 * VOCABULARY])
def test_a_teacher_names_its_likeliest_tokens(folders: tuple[str, str], max_logits: int) -> None:
    """All logits at once, and three rows at a time."""
    config, samples = settings("reverse", 4), [one for group in tiny_groups() for one in group]
    frozen = FrozenPolicy(config, folders[1])
    frozen._policy._max_logits = max_logits
    found = frozen.likeliest([samples], 4, VOCABULARY)
    few = frozen.likeliest([samples], 4, 10)
    model = plain_model(folders[1])
    for one, likely, of_ten in zip(samples, found, few, strict=True):
        values, ids = plain_rows(model, one, config.rollout.temperature).topk(4, dim=-1)
        assert likely.tokens.counts.tolist() == [4 * int(each) for each in one.sample.loss_mask]
        assert likely.tokens.ids.tolist() == ids.flatten().tolist()
        assert np.abs(likely.logprobs - values.flatten().detach().numpy()).max() < 1e-4
        assert of_ten.tokens.ids.max() < 10


@pytest.mark.parametrize("kl", ["reverse", "forward"])
@pytest.mark.parametrize(("top_k", "max_logits"), [(VOCABULARY, 2**26), (3, 2**26), (3, 7 * VOCABULARY)])
def test_the_gradient_is_that_of_the_divergence_of_whole_logits(
    folders: tuple[str, str], kl: str, top_k: int, max_logits: int
) -> None:
    """Against transformers, whose logits of a whole sample exist at once; packed, in several micro-batches."""
    config = settings(kl, top_k)
    groups = [with_likely(folders[1], group, config, top_k) for group in tiny_groups()]
    policy = load_policy(config, folders[0])
    policy._max_logits = max_logits
    for group in groups:
        packed = pack([group])
        PolicyObjective(config)(policy(packed), packed, version=0).loss.backward()
    found = {name: each.grad for name, each in policy.model.named_parameters() if each.grad is not None}
    trainer = FsdpTrainer(config, folders[0], 0, 1, "")
    trainer.accumulate([[group] for group in groups])
    outcome = trainer.step()
    student, teacher = plain_model(folders[0], torch.float64), plain_model(folders[1], torch.float64)
    count, total = 0, torch.zeros((), dtype=torch.float64)
    for sample in (one for group in groups for one in group):
        own, its = (plain_rows(model, sample, config.rollout.temperature) for model in (student, teacher))
        ids = its.topk(top_k, dim=-1).indices
        p, q = (each.exp() for each in ((own, its.detach()) if kl == "reverse" else (its.detach(), own)))
        p, q = (_bucketed(each, ids, top_k) for each in (p, q))
        total, count = total + (p * (p.log() - q.log())).sum(), count + len(own)
    (0.5 * total).backward()
    expected = {name: each.grad for name, each in student.named_parameters() if each.grad is not None}
    assert largest_relative_difference(found, expected) < 2e-5
    norm = torch.stack([each.norm() for each in expected.values()]).norm() / count
    assert outcome.grad_norm == pytest.approx(float(norm), rel=1e-5)
    assert outcome.metrics["distil/kl"].value == pytest.approx(float(total.detach()) / count, rel=1e-4)
    assert "distil/clamped" not in outcome.metrics


def _bucketed(probabilities: Tensor, ids: Tensor, k: int) -> Tensor:
    listed = probabilities.gather(-1, ids)
    return listed if k == VOCABULARY else torch.cat([listed, 1 - listed.sum(-1, keepdim=True)], -1)


def test_a_row_has_what_is_likely_in_the_places_of_its_loss_tokens() -> None:
    """The second token of the first sample has grown too old, and the third was observed."""
    (first, second, *_), *_ = tiny_groups(group_size=3)
    ids, zeros = np.array([4, 5, 6], np.int32), np.zeros(3, np.int32)
    mask = np.array([True, False, False])
    sample = replace(
        first.sample,
        completion_ids=ids,
        loss_mask=mask,
        logprobs=zeros.astype(np.float32),
        versions=zeros,
        cache_versions=zeros,
    )
    old = Likely(
        Support(ids=np.array([1, 2, 3, 4], np.int32), counts=np.array([2, 2, 0], np.int32)),
        np.array([-1, -2, -3, -4], np.float32),
    )
    other = replace(
        second,
        sample=replace(sample, loss_mask=np.array([False, True, True])),
        likely=Likely(
            Support(ids=np.array([7, 8, 9], np.int32), counts=np.array([0, 1, 2], np.int32)),
            np.array([-5, -6, -7], np.float32),
        ),
    )
    packed = pack([[replace(first, sample=sample, likely=old), other]]).likely
    assert packed is not None
    assert packed.ids.tolist() == [1, 2, 7, 8, 9]
    assert packed.of.tolist() == [0, 0, 1, 2, 2]
    assert packed.logprobs.tolist() == [-1, -2, -5, -6, -7]
    with pytest.raises(ValueError, match="all samples of a batch have a teacher's likeliest tokens, or none"):
        pack([[replace(first, sample=sample, likely=old), second]])
    assert pack([[first, second]]).likely is None


def test_samples_without_likely_tokens_are_an_error(folders: tuple[str, str]) -> None:
    trainer = FsdpTrainer(settings("reverse", 3), folders[0], 0, 1, "")
    with pytest.raises(ValueError, match="the settings ask for a teacher's likeliest tokens; pass them in TrainSample"):
        trainer.accumulate([tiny_groups()[:1]])
    trainer.accumulate([[]])  # an idle rank


def test_likely_tokens_count_in_the_bytes_of_a_group() -> None:
    task = Task(id="t", prompt=())
    episodes = [replace(make_episode(reward, 0), num_loss_tokens=number) for reward, number in ((1.0, 2), (0.0, 5))]
    played = PlayedGroup(group_id=1, episodes=episodes, payloads=["a", "b"], num_bytes=10)
    sizes = []
    for config in (Config(), settings("forward", 16)):
        ready = Grader(config).ready(task, played)
        assert ready is not None
        sizes.append(ready.num_bytes)
    assert sizes == [10, 10 + 8 * 16 * 7]


def test_a_divergence_needs_all_tokens() -> None:
    config = Config()
    config.teacher, config.rollout.top_k = settings("reverse", 3).teacher, 8
    with pytest.raises(ConfigError, match="rollout.top_k must be null with teacher.args.kl, which compares"):
        check(config)
