"""Router replay: the trainer's experts are those of the rollout, and their gates are the family's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from training import largest_relative_difference, save_model, tiny_config, tiny_groups, tiny_llama, with_adapters
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Glm4MoeConfig,
    GptOssConfig,
    MixtralConfig,
    OlmoeConfig,
    PhimoeConfig,
    PreTrainedConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from rlflow.batching.pack import pack
from rlflow.config import Checkpointing, Config, Send
from rlflow.errors import ConfigError, RunError
from rlflow.types import ExpertArray, Sample, TrainSample
from rlflow.workers.trainer.frozen import FrozenPolicy
from rlflow.workers.trainer.fsdp import FsdpTrainer
from rlflow.workers.trainer.layers import wrap_layers
from rlflow.workers.trainer.objective import PolicyObjective
from rlflow.workers.trainer.policy import Policy, load_policy, split_logprobs
from rlflow.workers.trainer.routing import lay_routes, replay_routes

NUM_EXPERTS, CHOSEN, LAYERS = 8, 2, 2
SIZES: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": CHOSEN,
    "max_position_embeddings": 64,
}


def tiny_mixture(std: float = 0.2, **changes: Any) -> PreTrainedConfig:
    options = {**SIZES, "num_experts": NUM_EXPERTS, "norm_topk_prob": True, "initializer_range": std, **changes}
    return Qwen3MoeConfig(**options, tie_word_embeddings=False)


def replaying(config: Config, path: str) -> Policy:
    policy = load_policy(config, path)
    replay_routes(policy.model)
    return policy


def random_routes(random: np.random.Generator, num_tokens: int) -> ExpertArray:
    """[num_tokens, layers, k], different experts for each token and layer."""
    order = random.random((num_tokens, LAYERS, NUM_EXPERTS)).argsort(-1)
    return order[..., :CHOSEN].astype(np.uint8)


def with_routes(groups: list[list[TrainSample]]) -> list[list[TrainSample]]:
    """Random routes, the same for the prompt of a group; the last token has none, nor has the second sample."""
    random = np.random.default_rng(5)
    found = []
    for group in groups:
        prompt = random_routes(random, len(group[0].sample.prompt_ids))
        routed = []
        for index, one in enumerate(group):
            experts = np.concatenate([prompt, random_routes(random, len(one.sample.completion_ids))])
            experts[-1] = 255
            if index == 1:
                experts[len(prompt) :] = 255
            routed.append(replace(one, sample=replace(one.sample, experts=experts)))
        found.append(routed)
    return found


def forced(block: Any, hidden: Tensor, routes: ExpertArray) -> Tensor:
    """A Qwen3 mixture written out token by token; hidden [1, T, H], routes [T, k]."""
    rows = []
    for state, chosen in zip(hidden[0], routes.astype(np.int64), strict=True):
        probabilities = (block.gate.weight @ state).softmax(-1)
        if chosen[0] == 255:
            chosen = probabilities.topk(CHOSEN).indices.numpy()
        gates = probabilities[chosen] / probabilities[chosen].sum()
        outputs = []
        for expert in chosen:
            gate, up = (block.experts.gate_up_proj[expert] @ state).chunk(2)
            outputs.append(block.experts.down_proj[expert] @ (nn.functional.silu(gate) * up))
        rows.append(gates @ torch.stack(outputs))
    return torch.stack(rows)[None]


def forced_gradients(path: str, groups: list[list[TrainSample]], config: Config) -> dict[str, Tensor]:
    """In float64, sample by sample: the gradient sum of the clipped loss."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="eager")
    low, high = config.algorithm.loss_args["clip_low"], config.algorithm.loss_args["clip_high"]
    for one in (one for group in groups for one in group):
        sample = one.sample
        assert sample.experts is not None
        for layer, module in enumerate(model.model.layers):
            routes = sample.experts[:, layer]
            module.mlp.forward = lambda hidden, block=module.mlp, routes=routes: forced(block, hidden, routes)
        ids = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.completion_ids]).astype(np.int64))
        logits = model(input_ids=ids[None]).logits[0] / config.rollout.temperature
        logprobs = logits.log_softmax(-1)[:-1].gather(1, ids[1:, None])[len(sample.prompt_ids) - 1 :, 0]
        ratio = (logprobs - torch.from_numpy(sample.logprobs)).exp()
        loss = torch.maximum(-one.advantage * ratio, -one.advantage * ratio.clamp(1 - low, 1 + high))
        loss[torch.from_numpy(sample.loss_mask)].sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def gradients(policy: Policy, groups: list[list[TrainSample]], config: Config) -> dict[str, Tensor]:
    policy.zero_grad()
    packed = pack(groups)
    PolicyObjective(config)(policy(packed), packed, version=0).loss.backward()
    named = policy.model.named_parameters()
    return {name: each.grad.clone() for name, each in named if each.grad is not None}


@pytest.fixture
def path(tmp_path: Path) -> str:
    return save_model(tiny_mixture(), tmp_path)


def test_gradients_are_those_of_forced_experts(path: str) -> None:
    config, groups = tiny_config(), with_routes(tiny_groups())
    exact = forced_gradients(path, groups, config)
    found = gradients(replaying(config, path), groups, config)
    difference = largest_relative_difference(found, exact)
    router = found["model.layers.0.mlp.gate.weight"].norm()
    live = largest_relative_difference(gradients(load_policy(config, path), groups, config), exact)
    print(f"largest relative difference {difference:.1e}; without replay {live:.1e}; |router's gradient| {router:.3f}")
    assert difference <= 1e-5
    assert router > 1e-2
    assert live > 0.1


@pytest.mark.parametrize("how", [Checkpointing.full, Checkpointing.selective])
def test_a_layer_that_is_computed_again_takes_the_same_routes(how: Checkpointing, path: str) -> None:
    config, groups = tiny_config(), with_routes(tiny_groups())
    expected = gradients(replaying(config, path), groups, config)
    policy = replaying(config, path)
    if how is Checkpointing.selective:
        wrap_layers(policy.model, compiled=False, selective=True)
    if how is Checkpointing.full:
        policy.model.gradient_checkpointing_enable({"use_reentrant": False})
        policy.train()
    found = gradients(policy, groups, config)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_reference_that_is_another_model_chooses_for_itself(path: str) -> None:
    config, groups = tiny_config(), tiny_groups()
    expected = FrozenPolicy(config, path).logprobs(groups)
    found = FrozenPolicy(config, path).logprobs(with_routes(groups))
    assert are_close(found, expected)


def logprobs_of(policy: Policy, groups: list[list[TrainSample]]) -> list[np.ndarray]:
    with torch.no_grad():
        return split_logprobs(policy(pack(groups))[0], [one for group in groups for one in group])


@pytest.mark.slow
def test_all_compiled_layers_are_one_graph(path: str) -> None:
    config, groups = tiny_config(), with_routes(tiny_groups())
    expected = gradients(replaying(config, path), groups, config)
    policy, graphs = replaying(config, path), CompileCounter()
    wrap_layers(policy.model, compiled=True, selective=False, backend=graphs)
    found = gradients(policy, groups, config)
    assert graphs.frame_count == 1
    assert largest_relative_difference(found, expected) <= 1e-5


def are_close(found: list[np.ndarray], expected: list[np.ndarray]) -> bool:
    return all(np.allclose(*pair, atol=1e-5) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize("replays", [True, False])
def test_a_policy_replays_with_its_adapters_and_without_them(replays: bool, path: str) -> None:
    config, groups = with_adapters(tiny_config()), with_routes(tiny_groups())
    config.rollout.replay_experts, config.lora.send = replays, Send.merged
    trainer = FsdpTrainer(config, path, 0, 1, "")
    reference = logprobs_of((replaying if replays else load_policy)(config, path), groups)
    other = logprobs_of((load_policy if replays else replaying)(config, path), groups)
    assert are_close(trainer.reference_logprobs([groups])[0], reference)
    assert are_close(trainer.per_token([groups])[0], reference)  # adapters change nothing at first
    assert not are_close(reference, other)


def test_a_critic_chooses_for_itself(path: str) -> None:
    config, groups = tiny_config(), tiny_groups()
    critic = FsdpTrainer(config, path, 0, 1, "", is_critic=True)
    nn.init.ones_(critic._policy.model.get_parameter("score.weight"))
    expected = critic.per_token([groups])[0]
    assert any(values.any() for values in expected)
    assert are_close(critic.per_token([with_routes(groups)])[0], expected)


def test_a_dense_model_takes_no_routes(tmp_path: Path) -> None:
    config, groups = tiny_config(), with_routes(tiny_groups())
    path = save_model(tiny_llama(), tmp_path)
    expected = gradients(load_policy(config, path), groups, config)
    found = gradients(replaying(config, path), groups, config)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def softmax_of_chosen(logits: Tensor, ids: Tensor) -> Tensor:
    return logits.gather(1, ids).softmax(-1)


def share_of_all(logits: Tensor, ids: Tensor) -> Tensor:
    return logits.softmax(-1).gather(1, ids)


def share_of_sigmoids(logits: Tensor, ids: Tensor) -> Tensor:
    gates = logits.sigmoid().gather(1, ids)
    return 2.5 * gates / gates.sum(-1, keepdim=True)


GROUPED: dict[str, Any] = {**SIZES, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "n_shared_experts": 1}
LATENT: dict[str, Any] = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4}
FAMILIES = [
    (tiny_mixture(), softmax_of_chosen),
    (MixtralConfig(**SIZES, num_local_experts=NUM_EXPERTS), softmax_of_chosen),
    (GptOssConfig(**SIZES, num_local_experts=NUM_EXPERTS), softmax_of_chosen),
    (OlmoeConfig(**SIZES, num_experts=NUM_EXPERTS, norm_topk_prob=False), share_of_all),
    (
        DeepseekV3Config(**GROUPED, **LATENT, v_head_dim=8, n_routed_experts=NUM_EXPERTS, first_k_dense_replace=1),
        share_of_sigmoids,
    ),
    (Glm4MoeConfig(**GROUPED, n_routed_experts=NUM_EXPERTS, first_k_dense_replace=1), share_of_sigmoids),
]


@pytest.mark.parametrize(("family", "gates_of"), FAMILIES, ids=[family.model_type for family, _ in FAMILIES])
def test_each_family_computes_its_own_gates(
    family: PreTrainedConfig, gates_of: Callable[[Tensor, Tensor], Tensor]
) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(family, dtype=torch.float32)
    block = model.model.layers[1].mlp  # of the first two layers, those of some families are dense
    router = block.router if family.model_type == "gpt_oss" else block.gate
    torch.nn.init.normal_(router.weight)
    states = torch.randn(5, 32)
    logits, live_gates, live_ids = router(states)
    routes = random_routes(np.random.default_rng(1), 5)
    routes[3] = 255
    replay_routes(model)
    lay_routes(model, routes, np.arange(5), np.arange(5))
    _, gates, ids = router(states)
    asked = torch.from_numpy(routes[:, 1].astype(np.int64))
    has_route = torch.arange(5) != 3
    assert torch.equal(ids[has_route], asked[has_route])
    assert torch.allclose(gates[has_route], gates_of(logits, asked.clamp(max=7))[has_route], atol=1e-6)
    assert torch.equal(ids[3], live_ids[3])
    assert torch.equal(gates[3], live_gates[3])
    lay_routes(model, None, np.arange(5), np.arange(5))
    assert torch.equal(router(states)[1], live_gates)


def test_a_family_that_chooses_otherwise_is_refused() -> None:
    model = AutoModelForCausalLM.from_config(PhimoeConfig(**SIZES, num_local_experts=NUM_EXPERTS), dtype=torch.float32)
    replay_routes(model)
    lay_routes(model, random_routes(np.random.default_rng(1), 5), np.arange(5), np.arange(5))
    with pytest.raises(ConfigError, match=r"routers of PhimoeTopKRouter do not .*; set rollout.replay_experts=false"):
        model(input_ids=torch.arange(5)[None])


def test_routes_that_nobody_can_have_chosen_are_refused() -> None:
    model = AutoModelForCausalLM.from_config(tiny_mixture(), dtype=torch.float32)
    replay_routes(model)
    with pytest.raises(RunError, match=r"went to an expert twice, or to one .*moe_backend=triton, or set rollout.rep"):
        lay_routes(model, np.zeros((3, LAYERS, CHOSEN), np.uint8), np.arange(3), np.arange(3))
    with pytest.raises(RunError, match="or to one that the qwen3_moe model lacks"):
        lay_routes(model, np.full((3, LAYERS, CHOSEN), [1, 8], np.uint8), np.arange(3), np.arange(3))


class Rollout:
    """Samples with a mixture in which near ties go the other way, as another kernel's rounding makes some go."""

    def __init__(self, path: str) -> None:
        model = Qwen3MoeForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
        self.model: Any = model.eval()
        self._margins: list[Tensor] = []
        self._least_margin = 0.0
        self._routes: list[Tensor] = []
        for layer in self.model.model.layers:
            layer.mlp.gate.forward = lambda states, gate=layer.mlp.gate: self._route(gate, states)

    def _route(self, gate: nn.Module, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = states @ gate.get_parameter("weight").T
        best, ids = logits.topk(CHOSEN + 1)
        margins = best[:, CHOSEN - 1] - best[:, CHOSEN]
        is_near = margins < self._least_margin
        chosen = torch.cat([ids[:, : CHOSEN - 1], torch.where(is_near, ids[:, CHOSEN], ids[:, CHOSEN - 1])[:, None]], 1)
        self._margins.append(margins)
        self._routes.append(chosen)
        return logits, logits.gather(1, chosen).softmax(-1), chosen

    @torch.no_grad()
    def play(self, num_samples: int, num_tokens: int, flipped: float) -> list[Sample]:
        """Samples of which this share of all choices, those with the smallest margins, are flipped."""
        generator = torch.Generator().manual_seed(3)
        prompts = torch.randint(0, 67, (num_samples, 6), generator=generator)
        self.model(input_ids=torch.randint(0, 67, (num_samples, 40), generator=generator))
        self._least_margin = float(torch.cat(self._margins).quantile(flipped))
        ids = prompts
        while ids.shape[1] < 6 + num_tokens:
            logits = self.model(input_ids=ids).logits[:, -1]
            ids = torch.cat([ids, torch.multinomial(logits.softmax(-1), 1, generator=generator)], 1)
        self._routes.clear()
        logprobs = self.model(input_ids=ids).logits.log_softmax(-1)[:, 5:-1].gather(2, ids[:, 6:, None])[..., 0]
        routes = torch.stack(self._routes, 1).view(*ids.shape, LAYERS, CHOSEN).numpy().astype(np.uint8)
        routes[:, -1] = 255
        return [
            Sample(
                prompt_ids=row[:6].numpy().astype(np.int32),
                completion_ids=row[6:].numpy().astype(np.int32),
                loss_mask=np.ones(num_tokens, np.bool_),
                logprobs=own.numpy(),
                versions=np.zeros(num_tokens, np.int32),
                cache_versions=np.zeros(num_tokens, np.int32),
                experts=experts,
            )
            for row, own, experts in zip(ids, logprobs, routes, strict=True)
        ]


def test_replay_undoes_near_ties_that_went_the_other_way(tmp_path: Path) -> None:
    path = save_model(tiny_mixture(std=0.6), tmp_path)
    samples = Rollout(path).play(num_samples=16, num_tokens=32, flipped=0.1)
    config = tiny_config()
    config.rollout.temperature = 1.0
    packed = pack([[TrainSample(sample=sample, advantage=1.0) for sample in samples]])
    differences = {}
    for name, policy in (("live", load_policy(config, path)), ("replayed", replaying(config, path))):
        with torch.no_grad():
            logprobs, _ = policy(packed)
        differences[name] = np.abs(logprobs.numpy() - packed.behaviour_logprobs)
    shares = {name: float((difference > 0.1).mean()) for name, difference in differences.items()}
    means = {name: float(difference.mean()) for name, difference in differences.items()}
    print(f"tokens with |log pi - log mu| > 0.1: {shares}; mean: {means}")
    assert shares["live"] > 0.2
    assert shares["replayed"] <= shares["live"] / 10
    assert means["replayed"] < 1e-5
