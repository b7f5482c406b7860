"""Compiled decoder layers: the same gradients, and as many graphs however many layers a model has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager
from training import save_model, tiny_config, tiny_groups, tiny_llama
from transformers import LlamaConfig, MixtralConfig, PreTrainedConfig

from rlflow.batching import pack
from rlflow.config import Backend
from rlflow.errors import ConfigError
from rlflow.settings.checks import check
from rlflow.workers.trainer.layers import compile_layers, has_experts
from rlflow.workers.trainer.policy import load_policy


def gradients(path: str, *, compiled: bool) -> tuple[dict[str, Tensor], int]:
    """The gradients of the summed log-probabilities, and the number of graphs."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, example: list[Tensor]) -> object:
        graphs.append(graph)
        return aot_eager(graph, example)

    policy = load_policy(tiny_config(), path)
    if compiled:
        compile_layers(policy.model, backend)
    logprobs, _ = policy(pack(tiny_groups(num_groups=1)))
    logprobs.sum().backward()
    return {name: p.grad for name, p in policy.model.named_parameters() if p.grad is not None}, len(graphs)


@pytest.mark.slow
def test_compiled_layers_have_the_same_gradients_and_share_graphs(tmp_path: Path) -> None:
    path = save_model(tiny_llama(num_hidden_layers=4), tmp_path)
    expected, _ = gradients(path, compiled=False)
    found, num_graphs = gradients(path, compiled=True)
    assert num_graphs == 2  # the first layer, which takes embeddings, and the other three
    assert len(found) == len(expected)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient)


@pytest.mark.parametrize(
    ("architecture", "wanted"), [(LlamaConfig(), False), (MixtralConfig(num_local_experts=4), True)]
)
def test_layers_that_choose_experts_are_known(architecture: PreTrainedConfig, wanted: bool) -> None:
    class Model:
        config = architecture

    assert has_experts(Model()) is wanted  # pyright: ignore[reportArgumentType]


def test_compiling_is_refused_where_a_layer_is_not_one_graph() -> None:
    config = tiny_config()
    config.trainer.compile, config.trainer.backend, config.trainer.zero_stage = True, Backend.deepspeed, 1
    with pytest.raises(ConfigError, match=r"trainer.compile has no effect with trainer.backend=deepspeed"):
        check(config)
