"""Two ways through a model, packed and in padded rows, give what transformers gives of each sample alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rounding import allowed_difference
from torch import Tensor
from training import largest_relative_difference, random_tree, save_model, shuffled, tiny_config, tiny_groups
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    CohereConfig,
    DogeConfig,
    Gemma2Config,
    GptOssConfig,
    GraniteConfig,
    MistralConfig,
    NemotronConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3_5TextConfig,
)

from rlflow.batching.pack import PackedBatch, pack
from rlflow.batching.plan import runs_of
from rlflow.errors import ConfigError
from rlflow.types import TrainSample
from rlflow.workers.trainer import attention, policy
from rlflow.workers.trainer.attention import attention_layout, packed_attention
from rlflow.workers.trainer.gate import Agreement, settle_way
from rlflow.workers.trainer.policy import Policy, load_policy
from rlflow.workers.trainer.rows import rows_of
from rlflow.workers.trainer.token_logprobs import LogitRule, TokenLogprobs
from rlflow.workers.trainer.way import Way, go_in_rows, is_packed

CPU = torch.device("cpu")
WINDOW = 5

_SIZES: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def sized(kind: Callable[..., PreTrainedConfig], **options: Any) -> PreTrainedConfig:
    return kind(**{**_SIZES, **options})


PACKED = {
    "window": sized(MistralConfig, head_dim=8, sliding_window=WINDOW),
    "sinks and window": sized(
        GptOssConfig, head_dim=8, sliding_window=WINDOW, num_local_experts=4, num_experts_per_tok=2
    ),
    "score caps, window, final cap": sized(
        Gemma2Config,
        head_dim=8,
        query_pre_attn_scalar=8,
        sliding_window=WINDOW,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
    ),
    "logits divided": sized(GraniteConfig, logits_scaling=3.0, attention_multiplier=0.3),
    "logits multiplied": sized(CohereConfig, logit_scale=0.25),
    "head with bias": sized(PhiConfig, num_key_value_heads=4),
}
IN_ROWS = {
    "linear attention": sized(
        Qwen3_5TextConfig,
        head_dim=8,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    ),
    "attention with a mask of its own": sized(DogeConfig),
    "attention that is told nothing": sized(NemotronConfig),
}


def each_alone(
    folder: str, groups: Sequence[Sequence[TrainSample]], temperature: float, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Gradients of the advantage-weighted log-probabilities, one sample at a time, by transformers' eager attention."""
    options = {"attn_implementation": "eager", "experts_implementation": "eager"}  # what float64 can do
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options).eval()
    for one in (one for group in groups for one in group):
        sample = one.sample
        ids = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.completion_ids]).astype(np.int64))
        logprobs = (model(input_ids=ids[None], use_cache=False).logits[0, :-1] / temperature).log_softmax(-1)
        chosen = logprobs.gather(1, ids[1:, None])[len(sample.prompt_ids) - 1 :, 0]
        (one.advantage * chosen[torch.from_numpy(sample.loss_mask)].sum()).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def gradients(found: Policy, groups: Sequence[Sequence[TrainSample]]) -> dict[str, Tensor]:
    found.zero_grad()
    packed = pack(groups)
    logprobs, _ = found(packed)
    (logprobs * torch.from_numpy(packed.advantages)).sum().backward()
    return {name: p.grad for name, p in found.model.named_parameters() if p.grad is not None}


def settled(found: Policy) -> Agreement:
    forward = partial(found, has_plain=True)
    return settle_way(found.model, forward, lambda difference: difference, torch.float32, max_length=64)


@pytest.mark.parametrize(
    ("architecture", "packed"),
    [(each, True) for each in PACKED.values()] + [(each, False) for each in IN_ROWS.values()],
    ids=[*PACKED, *IN_ROWS],
)
def test_the_way_of_each_family_gives_the_gradients_of_every_sample_alone(
    architecture: PreTrainedConfig, packed: bool, tmp_path: Path
) -> None:
    config = tiny_config()
    folder, groups = save_model(architecture, tmp_path), tiny_groups()
    exact = each_alone(folder, groups, config.rollout.temperature, torch.float64)
    others = (
        each_alone(folder, shuffled(groups, seed), config.rollout.temperature, torch.float32) for seed in range(3)
    )
    allowed = allowed_difference(largest_relative_difference(other, exact) for other in others)
    found = load_policy(config, folder)
    assert (settled(found).way is Way.packed) is packed
    difference = largest_relative_difference(gradients(found, groups), exact)
    print(f"{difference:.2g}, allowed {allowed:.2g}")
    assert difference <= allowed


@pytest.mark.parametrize("name", ["window", "sinks and window", "score caps, window, final cap"])
def test_windows_and_sinks_look_back_along_the_path_of_a_tree(name: str, tmp_path: Path) -> None:
    config, folder = tiny_config(), save_model(PACKED[name], tmp_path)
    found = load_policy(config, folder)
    for seed in range(12):
        tree = [[one for one in random_tree(seed) if one.sample.loss_mask.any()]]
        exact = each_alone(folder, tree, config.rollout.temperature, torch.float64)
        assert largest_relative_difference(gradients(found, tree), exact) <= 1e-5


def test_a_model_that_looks_ahead_is_refused(tmp_path: Path) -> None:
    architecture = sized(BertConfig, is_decoder=False)
    with pytest.raises(ConfigError, match="model.path names a bert model of which training computes something else"):
        settled(load_policy(tiny_config(), save_model(architecture, tmp_path)))


def test_sinks_that_get_lost_when_packed_send_the_model_into_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_model(PACKED["sinks and window"], tmp_path)

    def forgetful(*states: Any) -> Tensor:
        query, key, value, mask, scale, _, softcap = states
        return by_scores(query, key, value, mask, scale, None, softcap)

    by_scores = attention._by_scores
    monkeypatch.setattr(attention, "_by_scores", forgetful)
    found = load_policy(tiny_config(), folder)
    assert is_packed(found.model)
    agreement = settled(found)
    assert agreement.way is Way.padded
    assert agreement.difference < 1e-5


def test_an_output_layer_that_is_applied_wrongly_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_model(PACKED["logits divided"], tmp_path)
    monkeypatch.setattr(policy, "logit_rule", lambda _, temperature, **__: LogitRule(temperature=temperature))
    with pytest.raises(
        ConfigError, match=r"differ by [\d.]+ nats packed, [\d.]+ nats in padded rows on average, and may by 0.001"
    ):
        settled(load_policy(tiny_config(), folder))


def test_what_attention_cannot_do_is_an_error() -> None:
    packed = pack(tiny_groups())
    query, key, value = (torch.zeros(1, heads, len(packed.input_ids), 8) for heads in (4, 2, 2))
    layout = attention_layout(packed, CPU, use_flex=False)
    with pytest.raises(ConfigError, match="Identity asks attention for alibi, which it cannot do packed"):
        packed_attention(torch.nn.Identity(), query, key, value, None, scaling=1.0, layout=layout, alibi=torch.zeros(1))
    with pytest.raises(ConfigError, match="Identity is not told where samples begin"):
        packed_attention(torch.nn.Identity(), query, key, value, None, scaling=1.0)
    packed_attention(torch.nn.Identity(), query, key, value, None, scaling=1.0, layout=layout, alibi=None)


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"s_aux": torch.arange(4.0)}], ids=["plain", "cap", "sinks"])
@pytest.mark.parametrize("window", [None, 1, WINDOW, 99])
@pytest.mark.parametrize("seed", [None, 0, 1, 2], ids=["groups", "tree 0", "tree 1", "tree 2"])
def test_the_flex_masks_of_windows_equal_the_blocks(
    seed: int | None, window: int | None, options: dict[str, Any]
) -> None:
    packed = pack(tiny_groups() if seed is None else [random_tree(seed)])
    torch.manual_seed(0)
    states = [torch.randn(1, heads, len(packed.input_ids), 16, dtype=torch.float64) for heads in (4, 2, 2)]
    windows = [] if window is None else [window]

    def attended(use_flex: bool) -> Tensor:
        layout = attention_layout(packed, CPU, use_flex, windows)
        query, key, value = (torch.nn.functional.pad(state, (0, 0, 0, layout.num_padding)) for state in states)
        arguments = {"scaling": 0.25, "layout": layout, "sliding_window": window, **options}
        output, _ = packed_attention(torch.nn.Identity(), query, key, value, None, **arguments)
        return output[:, : len(packed.input_ids)]

    torch.testing.assert_close(attended(use_flex=True), attended(use_flex=False))


def longrope(folder: Path) -> Callable[[int], PreTrainedModel]:
    rotary = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [9.0] * 4,
    }
    architecture = sized(Phi3Config, rope_parameters=rotary, original_max_position_embeddings=16)
    path = save_model(architecture, folder)

    def load(max_length: int) -> PreTrainedModel:
        config = tiny_config()
        config.model.max_length = max_length
        model = load_policy(config, path).model
        go_in_rows(model)  # without a layout, a packed model says that it lacks one
        return model

    return load


def test_rotary_frequencies_depend_on_the_longest_sample_that_there_may_be(tmp_path: Path) -> None:
    load = longrope(tmp_path)
    ids = torch.arange(8)[None]
    short, long = load(16)(input_ids=ids).logits, load(17)(input_ids=ids).logits
    assert (short - long).abs().max() > 1e-3
    ours = load(64)
    torch.testing.assert_close(ours(input_ids=ids).logits, long)
    beside = ours(input_ids=torch.cat([ids, torch.arange(24)[None]], dim=1)).logits[:, :8]
    torch.testing.assert_close(beside, long)


def test_rows_hold_a_segment_and_all_that_it_continues_each() -> None:
    packed = PackedBatch(
        input_ids=np.array([5, 6, 7, 8, 9]),
        position_ids=np.array([0, 1, 2, 3, 0]),
        segment_starts=np.array([0, 2, 4]),
        segment_lengths=np.array([2, 2, 1]),
        segment_parents=np.array([-1, 0, -1]),
        **dict.fromkeys(("loss_positions", "targets", "versions", "sequence_of"), np.zeros(0, np.int64)),
        **dict.fromkeys(("behaviour_logprobs", "advantages"), np.zeros(0, np.float32)),
        **dict.fromkeys(("support_ids", "support_of"), np.zeros(0, np.int64)),
        is_on_older_cache=np.zeros(0, np.bool_),
        frozen_logprobs={},
        values=None,
        returns=None,
        num_sequences=0,
    )
    rows = rows_of(packed)
    assert rows.input_ids.tolist() == [[5, 6, 7, 8], [9, 0, 0, 0]]
    assert rows.lengths.tolist() == [4, 1]
    assert rows.cells.tolist() == [0, 1, 2, 3, 4]
    alone = rows_of(packed, prefixes_alone=True)
    assert alone.input_ids.tolist() == [[5, 6, 0, 0], [5, 6, 7, 8], [9, 0, 0, 0]]
    assert alone.cells.tolist() == [0, 1, 6, 7, 8]


def test_runs_count_padding() -> None:
    samples = [one for group in tiny_groups() for one in group]
    runs = runs_of(samples, 40, padded=True)
    assert [one for run in runs for one in run] == samples
    sizes = [len(run) * max(one.sample.num_tokens for one in run) for run in runs]
    assert max(sizes) <= 40
    # No run could have taken the first sample of the next one.
    for run, following in pairwise(runs):
        joined = [*run, following[0]]
        assert len(joined) * max(one.sample.num_tokens for one in joined) > 40
    assert [len(run) for run in runs_of(samples, 1, padded=True)] == [1] * len(samples)
    assert runs_of([], 40, padded=True) == []


@pytest.mark.parametrize("max_logits", [2**20, 300], ids=["whole", "in chunks"])
def test_caps_scales_and_biases_of_logits_have_the_gradients_of_autograd(max_logits: int) -> None:
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(7, 16), torch.randn(67, 16), torch.randn(67)
    row_of, targets = torch.tensor([0, 0, 3, 6, 5]), torch.tensor([1, 66, 0, 30, 2])
    weights = torch.randn(5)
    cap = 2.0
    rule = LogitRule(temperature=0.7, scale=0.5, cap=cap)
    expected, found = [], []
    for kind in (torch.float64, torch.float32):
        leaves = [each.to(kind).requires_grad_() for each in (hidden, weight, bias)]
        logits = cap * torch.tanh((leaves[0] @ leaves[1].T * rule.scale + leaves[2]) / cap) / rule.temperature
        logprobs = logits.log_softmax(-1)[row_of, targets]
        expected.append([logprobs, *torch.autograd.grad((logprobs * weights).sum(), leaves)])
    leaves = [each.clone().requires_grad_() for each in (hidden, weight, bias)]
    logprobs, _ = TokenLogprobs.apply(*leaves, row_of, targets, rule, max_logits)
    found = [logprobs, *torch.autograd.grad((logprobs * weights).sum(), leaves)]
    for one, exact, single in zip(found, *expected, strict=True):
        allowed = 8 * (single - exact).abs().max() + 1e-6
        assert (one - exact).abs().max() <= allowed
