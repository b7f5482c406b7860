"""Sampling among a part of the vocabulary: the trainer normalises among the tokens that the engine chose from.

The masks are made by hand here, because vLLM reports them on GPUs only.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import load_episodes
from training import VOCABULARY, tiny_config, tiny_groups
from transformers import AutoModelForCausalLM

from rlflow.batching.pack import pack
from rlflow.cluster.gpus import check_gpus
from rlflow.config import Config
from rlflow.errors import ConfigError
from rlflow.models.resolve import resolve_config, resolve_model
from rlflow.rollout.payloads import payload_bytes, save_payloads
from rlflow.rollout.samples import sample_of
from rlflow.settings.checks import check
from rlflow.types import EpisodePayload, Support, TrainSample, Turn
from rlflow.workers.engine.setup import engine_arguments, sampling_arguments
from rlflow.workers.trainer.policy import load_policy
from rlflow.workers.trainer.token_logprobs import among_support


def turn(prompt: list[int], output: list[int], support: list[list[int]] | None, continues: int | None = None) -> Turn:
    return Turn(
        prompt_ids=prompt,
        output_ids=output,
        logprobs=[-1.0] * len(output),
        versions=[0] * len(output),
        cache_versions=[0] * len(output),
        finish_reason="stop",
        support=support,
        continues=continues,
    )


def test_a_sample_keeps_what_each_token_was_chosen_among() -> None:
    chain = [turn([1], [5, 6], [[5, 7], [6]]), turn([1, 5, 6, 9], [4], [[4, 2, 3]], continues=0)]
    found = sample_of(chain).support
    assert found is not None
    assert found.ids.tolist() == [5, 7, 6, 4, 2, 3]
    assert found.counts.tolist() == [2, 1, 0, 3]
    assert sample_of([turn([1], [5, 6], None)]).support is None


def test_payloads_with_and_without_support_survive_the_disk(tmp_path: Path) -> None:
    among, all_tokens = sample_of([turn([1], [5, 6], [[5, 7], [6]])]), sample_of([turn([2], [8], None)])
    payloads = [EpisodePayload(samples=[among, all_tokens], messages=[]), EpisodePayload(samples=[], messages=[])]
    save_payloads(tmp_path / "payloads", payloads)
    first, second = load_episodes(tmp_path / "payloads")
    assert first.samples[0].support is not None
    assert first.samples[0].support.ids.tolist() == [5, 7, 6]
    assert first.samples[0].support.counts.tolist() == [2, 1]
    assert first.samples[1].support is None
    assert second.samples == []
    assert payload_bytes(payloads[0]) == payload_bytes(first) == 3 * 4 + 2 * 4 + (4 + 2 * 17) + (4 + 17)


def test_a_packed_row_counts_supports_by_loss_token() -> None:
    first = sample_of([turn([1], [5, 6], [[5, 7], [6]]), turn([1, 5, 6, 9], [4], [[4, 2, 3]], continues=0)])
    second = sample_of([turn([1], [8], None)])
    third = sample_of([turn([1], [5, 3], [[5], [3, 4]])])
    # The first token of the third sample is left out of the loss, for example because it is too old.
    third = replace(third, loss_mask=np.array([False, True]))
    packed = pack([[TrainSample(sample=sample, advantage=1.0) for sample in (first, second, third)]])
    assert packed.targets.tolist() == [5, 6, 4, 8, 3]
    assert packed.support_ids.tolist() == [5, 7, 6, 4, 2, 3, 3, 4]
    assert packed.support_of.tolist() == [0, 0, 1, 2, 2, 2, 4, 4]


def with_supports(groups: list[list[TrainSample]]) -> list[list[TrainSample]]:
    """Every second sample was chosen among parts of the vocabulary, of 1 to 20 tokens."""
    random = np.random.default_rng(1)
    found = []
    for group in groups:
        changed = []
        for index, one in enumerate(group):
            sample = one.sample
            if index % 2 == 0:
                places = [
                    [int(token), *random.choice(VOCABULARY, random.integers(0, 20), replace=False).tolist()]
                    if is_sampled
                    else []
                    for token, is_sampled in zip(sample.completion_ids, sample.loss_mask, strict=True)
                ]
                places = [list(dict.fromkeys(place)) for place in places]
                counts = np.array([len(place) for place in places], np.int32)
                ids = np.array([token for place in places for token in place], np.int32)
                sample = replace(sample, support=Support(ids=ids, counts=counts))
            changed.append(replace(one, sample=sample))
        found.append(changed)
    return found


def expected_of(config: Config, groups: list[list[TrainSample]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """By transformers in float64, sample by sample: log-probabilities, entropies, gradient of the first norm."""
    model = AutoModelForCausalLM.from_pretrained(
        resolve_model("tiny"), dtype=torch.float64, attn_implementation="eager"
    )
    logprobs, entropies = [], []
    for sample in (one.sample for group in groups for one in group):
        ids = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.completion_ids]).astype(np.int64))
        logits = model(input_ids=ids[None]).logits[0] / config.rollout.temperature
        start = 0
        for place, token in enumerate(sample.completion_ids.tolist()):
            row = logits[len(sample.prompt_ids) + place - 1]
            count = 0 if sample.support is None else int(sample.support.counts[place])
            if not sample.loss_mask[place]:
                continue
            if count:
                assert sample.support is not None
                among = sample.support.ids[start : start + count].tolist()
                start += count
                row, token = row[among], among.index(token)
            of_row = row.log_softmax(0)
            logprobs.append(of_row[token])
            entropies.append(-(of_row.exp() * of_row).sum().detach())
    found = torch.stack(logprobs)
    (found * torch.linspace(-1, 1, len(found))).sum().backward()
    gradient = model.model.layers[0].input_layernorm.weight.grad
    assert gradient is not None
    return found.detach(), torch.stack(entropies), gradient


@pytest.mark.parametrize("max_logits", [2**26, 2000])
def test_logprobs_and_gradients_are_those_among_the_support(max_logits: int) -> None:
    config, groups = tiny_config(), with_supports(tiny_groups())
    logprobs, entropies, gradient = expected_of(config, groups)
    policy = load_policy(config, resolve_model("tiny"))
    policy._max_logits = max_logits
    found, found_entropies = policy(pack(groups))
    torch.testing.assert_close(found.double(), logprobs, rtol=0, atol=1e-4)
    torch.testing.assert_close(found_entropies.double(), entropies, rtol=0, atol=1e-4)
    (found * torch.linspace(-1, 1, len(found))).sum().backward()
    own = policy.model.model.layers[0].input_layernorm.weight.grad
    assert own is not None
    assert float((own.double() - gradient).norm() / gradient.norm()) < 1e-4
    whole, _ = load_policy(config, resolve_model("tiny"))(pack(tiny_groups()))
    assert float((whole.detach() - found.detach()).abs().max()) > 1, "the support matters"


def test_a_token_that_was_the_only_choice_has_probability_one() -> None:
    # Loss token 0 had no choice, 1 was one of two that are equally unlikely, 2 was chosen among all.
    logprobs = torch.tensor([-200.0, -200.0, -1.0, -200.0, -200.0, -200.0], requires_grad=True)
    found, entropies = among_support(logprobs, torch.full((6,), 7.0), torch.tensor([0, 1, 1]))
    found.sum().backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([1.0, 1.0, 1.0, -1.0, -0.5, -0.5]))
    torch.testing.assert_close(found.detach(), torch.tensor([0.0, -0.6931472, -1.0]))
    torch.testing.assert_close(entropies, torch.tensor([0.0, 0.6931472, 7.0]))


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("top_k", 0, "rollout.top_k must be at least 1, or null for all tokens; got 0"),
        ("top_p", 1.5, "rollout.top_p must be in (0, 1]; got 1.5"),
        ("top_p", 0.9, "needs a rollout.top_k"),
        ("min_p", 0.1, "needs a rollout.top_k"),
        ("min_p", 1.0, "rollout.min_p must be in [0, 1); got 1.0"),
    ],
)
def test_a_part_of_the_vocabulary_that_cannot_be_is_refused(setting: str, value: float, message: str) -> None:
    config = Config()
    setattr(config.rollout, setting, value)
    with pytest.raises(ConfigError) as error:
        check(config)
    assert message in str(error.value)


def test_an_engine_is_asked_for_what_it_chose_among() -> None:
    config = Config()
    assert sampling_arguments(config, is_greedy=False) == {"temperature": 1.0}
    assert sampling_arguments(config, is_greedy=True) == {"temperature": 0.0}
    config.rollout.top_k, config.rollout.top_p, config.rollout.min_p = 50, 0.9, 0.05
    assert sampling_arguments(config, is_greedy=False) == {"temperature": 1.0, "top_k": 50, "top_p": 0.9, "min_p": 0.05}
    assert sampling_arguments(config, is_greedy=True)["top_k"] == 1
    assert engine_arguments(config, resolve_config("tiny"), 0, on_gpu=True)["return_sampling_mask"] is True


def test_a_cpu_cannot_say_what_it_chose_among() -> None:
    config = Config()
    config.rollout.top_k = 50
    with pytest.raises(ConfigError, match="rollout.top_k=50 needs GPUs"):
        check_gpus(config, 0)
