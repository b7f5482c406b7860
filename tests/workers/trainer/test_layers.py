"""Compiled decoder layers: the same gradients, and as many graphs however many layers a model has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import min_cut_rematerialization_partition
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch.utils._python_dispatch import TorchDispatchMode
from training import save_model, tiny_config, tiny_groups, tiny_llama, tiny_qwen3
from transformers import LlamaConfig, MixtralConfig, PreTrainedConfig

from rlflow.batching.pack import pack
from rlflow.config import Backend, Checkpointing, Config
from rlflow.errors import ConfigError
from rlflow.settings.checks import check
from rlflow.workers.trainer.fsdp import FsdpTrainer
from rlflow.workers.trainer.layers import has_experts, wrap_layers
from rlflow.workers.trainer.policy import load_policy

PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


def gradients(path: str, *, compiled: bool, selective: bool = False) -> tuple[dict[str, Tensor], int, set[int]]:
    """The gradients of the summed log-probabilities, the number of graphs, and their products in the backward pass."""
    graphs: list[torch.fx.GraphModule] = []
    num_products: set[int] = set()

    def count(graph: torch.fx.GraphModule, example: list[Tensor]) -> Any:
        num_products.add(sum(node.target in PRODUCTS for node in graph.graph.nodes))
        return boxed_nop(graph, example)

    def backend(graph: torch.fx.GraphModule, example: list[Tensor]) -> Any:
        graphs.append(graph)
        partition = min_cut_rematerialization_partition  # inductor's
        return aot_autograd(fw_compiler=boxed_nop, bw_compiler=count, partition_fn=partition)(graph, example)

    torch.compiler.reset()  # what was compiled before decides which lengths are dynamic from the start
    policy = load_policy(tiny_config(), path)
    if compiled:
        wrap_layers(policy.model, compiled=True, selective=selective, backend=backend)
    logprobs, _ = policy(pack(tiny_groups(num_groups=1)))
    logprobs.sum().backward()
    return (
        {name: p.grad for name, p in policy.model.named_parameters() if p.grad is not None},
        len(graphs),
        num_products,
    )


@pytest.mark.slow
@pytest.mark.parametrize(("selective", "products"), [(False, 2 * 7), (True, 2 * 7 + 4)])
def test_compiled_layers_have_the_same_gradients_and_share_graphs(
    selective: bool, products: int, tmp_path: Path
) -> None:
    """Selective checkpointing computes keys, values, gate and up again, each one product, within the graphs too."""
    path = save_model(tiny_llama(num_hidden_layers=4, intermediate_size=160, num_key_value_heads=1), tmp_path)
    expected, *_ = gradients(path, compiled=False)
    found, num_graphs, num_products = gradients(path, compiled=True, selective=selective)
    assert num_products == {products}
    assert num_graphs == 2  # the first layer, which takes embeddings, and the other three
    assert len(found) == len(expected)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient)


class Products(TorchDispatchMode):
    """Counts matrix products and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.num_products = self.num_attentions = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_products += func in PRODUCTS
        self.num_attentions += func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "architecture",
    [
        # Queries are as wide as the layer, keys and values a quarter of it, the MLP five times.
        tiny_llama(intermediate_size=160, num_key_value_heads=1),
        tiny_qwen3(intermediate_size=160, num_key_value_heads=1, attention_bias=True),
    ],
    ids=["llama", "qwen3 with biases"],
)
def test_selective_checkpointing_computes_keys_values_and_the_mlp_again(
    architecture: PreTrainedConfig, tmp_path: Path
) -> None:
    path = save_model(architecture, tmp_path)
    found: dict[str, dict[str, Tensor]] = {}
    again: dict[str, tuple[int, int]] = {}
    for checkpointing in Checkpointing:
        config = tiny_config()
        config.trainer.gradient_checkpointing = checkpointing
        trainer = FsdpTrainer(config, path, rank=0, world_size=1, rendezvous="")
        loss = trainer._loss(tiny_groups(num_groups=1))
        with Products() as counted:
            loss.backward()
        found[checkpointing] = {name: p.grad for name, p in trainer._parameters.items() if p.grad is not None}
        again[checkpointing] = counted.num_products, counted.num_attentions
    products, attentions = again["none"]
    assert attentions == 0
    # Of each of 2 layers: keys, values, gate and up; or also queries and the projection after attention.
    assert again["selective"] == (products + 2 * 4, 0)
    num_blocks = again["full"][1]
    assert again["full"] == (products + 2 * 6, num_blocks)
    assert num_blocks >= 2
    for mode in ("selective", "full"):
        assert found[mode].keys() == found["none"].keys()
        assert all(torch.equal(gradient, found["none"][name]) for name, gradient in found[mode].items())


def test_selective_checkpointing_is_refused_with_deepspeed() -> None:
    config = Config()
    config.trainer.backend, config.trainer.zero_stage = Backend.deepspeed, 2
    config.trainer.gradient_checkpointing = Checkpointing.selective
    with pytest.raises(ConfigError, match=r"selective does not go with trainer.backend=deepspeed.*set it to full"):
        check(config)


@pytest.mark.parametrize(
    ("architecture", "wanted"), [(LlamaConfig(), False), (MixtralConfig(num_local_experts=4), True)]
)
def test_layers_that_choose_experts_are_known(architecture: PreTrainedConfig, wanted: bool) -> None:
    class Model:
        config = architecture

    assert has_experts(Model().config) is wanted  # pyright: ignore[reportArgumentType]


def test_compiling_is_refused_where_a_layer_is_not_one_graph() -> None:
    config = tiny_config()
    config.trainer.compile, config.trainer.backend, config.trainer.zero_stage = True, Backend.deepspeed, 1
    with pytest.raises(ConfigError, match=r"trainer.compile has no effect with trainer.backend=deepspeed"):
        check(config)
