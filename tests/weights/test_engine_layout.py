"""The layouts that are learnt from vLLM's loader, against loading random weights with it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from layouts import Model, empty, engine_layout_by_hand, execute, load, whole
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from rlflow.weights.shape.layout import EngineLayout, Layout, Shapes, fsdp_layout
from rlflow.weights.shape.plan import plan

pytestmark = pytest.mark.slow
pytest.importorskip("vllm")

Shape = tuple[int, ...]

SIZES: dict[str, Any] = {
    "vocab_size": 70,  # vLLM pads it to 128, so that some ranks have padding only
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,  # fewer than the 4 ranks
    "head_dim": 32,
    "max_position_embeddings": 64,
}
BY_HAND = partial(Model, layers=2, hidden=128, intermediate=96, heads=4, key_value_heads=2, head_dim=32, vocabulary=70)

CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": partial(LlamaConfig, **SIZES, architectures=["LlamaForCausalLM"]),
    "qwen2": partial(Qwen2Config, **SIZES, tie_word_embeddings=True, architectures=["Qwen2ForCausalLM"]),
    "qwen3": partial(Qwen3Config, **SIZES, architectures=["Qwen3ForCausalLM"]),
    "gemma3": partial(Gemma3TextConfig, **SIZES, architectures=["Gemma3ForCausalLM"]),
    "qwen3_moe": partial(
        Qwen3MoeConfig,
        **SIZES,
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        architectures=["Qwen3MoeForCausalLM"],
    ),
}


@pytest.fixture(autouse=True)
def _inspect_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM looks at a class of models in a process of its own, once a machine, which takes longer than all else."""
    from vllm.model_executor.models import registry

    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    monkeypatch.setattr(registry, "_run_in_subprocess", lambda inspect: inspect())


def save_config(name: str, folder: Path) -> tuple[str, Shapes]:
    """A folder with a model's config.json, and the model's parameters."""
    config = CONFIGS[name]()
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return str(folder), {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def expert_by_expert(shapes: Shapes) -> Shapes:
    """As checkpoints on the hub name the experts: one matrix each."""
    split: dict[str, Shape] = {}
    for name, shape in shapes.items():
        path, _, leaf = name.rpartition(".")
        if leaf == "gate_up_proj":
            halves = {f"{path}.{expert}.{half}_proj.weight" for expert in range(shape[0]) for half in ("gate", "up")}
            split |= dict.fromkeys(sorted(halves), (shape[1] // 2, shape[2]))
        elif leaf == "down_proj":
            split |= {f"{path}.{expert}.down_proj.weight": shape[1:] for expert in range(shape[0])}
        else:
            split[name] = shape
    return split


def check_against_loading(model_path: str, layout: Layout) -> None:
    """Load random weights into vLLM's model, and compare every element of every tensor of every rank."""
    from engine_layout import as_rank, build_model
    from vllm.config import set_current_vllm_config

    random = np.random.default_rng(0)
    values = {
        name: random.random(place.shape, np.float32).astype(np.float64) for name, place in layout.placements.items()
    }
    expected = load(layout, values)
    for rank, tensors in enumerate(expected):
        with as_rank(rank, layout.num_ranks), torch.no_grad():
            config, model = build_model(model_path, "float32", layout.num_ranks)
            for parameter in model.parameters():
                parameter.fill_(torch.nan)
            with set_current_vllm_config(config):
                model.load_weights((name, torch.from_numpy(value).float()) for name, value in values.items())
        found = {name: parameter.detach().numpy().ravel() for name, parameter in model.named_parameters()}
        assert set(tensors) <= set(found)
        for name, array in found.items():
            wanted = tensors.get(name, np.zeros(0))
            # vLLM fills the padding with zeros.
            np.testing.assert_array_equal(array, np.pad(wanted, (0, len(array) - len(wanted))), err_msg=name)


@pytest.mark.parametrize("tensor_parallel", [1, 2, 4])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_element_lands_where_the_loader_puts_it(name: str, tensor_parallel: int, tmp_path: Path) -> None:
    from engine_layout import engine_layout

    path, shapes = save_config(name, tmp_path)
    check_against_loading(path, engine_layout(path, "float32", tensor_parallel, shapes))


def test_experts_one_by_one(tmp_path: Path) -> None:
    from engine_layout import engine_layout

    path, shapes = save_config("qwen3_moe", tmp_path)
    check_against_loading(path, engine_layout(path, "float32", 2, expert_by_expert(shapes)))


@pytest.mark.parametrize("tensor_parallel", [1, 2, 4])
@pytest.mark.parametrize(
    ("name", "by_hand"), [("llama", BY_HAND()), ("qwen2", BY_HAND(has_bias=True, is_tied=True))], ids=["llama", "qwen2"]
)
def test_layouts_by_hand_are_those_that_vllm_has(
    name: str, by_hand: Model, tensor_parallel: int, tmp_path: Path
) -> None:
    from engine_layout import engine_layout

    path, shapes = save_config(name, tmp_path)
    learnt, written = (
        engine_layout(path, "float32", tensor_parallel, shapes),
        engine_layout_by_hand(by_hand, tensor_parallel),
    )
    assert learnt.placements.keys() == written.placements.keys()
    for parameter, place in written.placements.items():
        assert learnt.placements[parameter].tensors == place.tensors
        assert _boxes(learnt, parameter) == _boxes(written, parameter)


def _boxes(layout: Layout, name: str) -> list[list[tuple[Shape, Shape, int]]]:
    """Strides along dimensions of one element mean nothing, and these layouts differ in them."""
    return [[(each.start, each.stop, each.offset) for each in regions] for regions in layout.placements[name].ranks]


@pytest.mark.parametrize("name", ["qwen2", "qwen3_moe"])
def test_a_plan_to_such_an_engine_loads_it(name: str, tmp_path: Path) -> None:
    from engine_layout import engine_layout

    path, shapes = save_config(name, tmp_path)
    layout = engine_layout(path, "float32", 4, shapes)
    source = fsdp_layout(shapes, "float32", num_ranks=3)
    values = whole(source)
    found = [empty(layout, rank) for rank in range(layout.num_ranks)]
    execute(plan(source, [EngineLayout(layout=layout)]).moves(), load(source, values), [found])
    for tensors, expected in zip(found, load(layout, values), strict=True):
        assert tensors.keys() == expected.keys()
        for tensor, array in expected.items():
            np.testing.assert_array_equal(tensors[tensor], array)


def test_experts_that_the_kernel_takes_as_they_are_loaded_are_filled(tmp_path: Path) -> None:
    """As on a GPU with Triton's kernel, which here is only named."""
    from engine_layout import as_rank, build_model
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    from rlflow.errors import NotACopy
    from rlflow.weights.engine.tensors import EngineTensors, learn_landings

    path, shapes = save_config("qwen3_moe", tmp_path)
    random = np.random.default_rng(0)
    values = {name: torch.from_numpy(random.random(shape, np.float32)) for name, shape in shapes.items()}
    with as_rank(0, 1), torch.no_grad():
        config, model = build_model(path, "float32", 1)
        with set_current_vllm_config(config):
            blank, landings = learn_landings(config, shapes)
            methods = [getattr(module, "quant_method", None) for module in model.modules()]
            experts = [each for each in methods if isinstance(each, UnquantizedFusedMoEMethod)]
            assert len(experts) == 2
            with pytest.raises(NotACopy, match="derives what it computes with from its weights"):
                EngineTensors(model, blank, shapes, landings)
            for backend in (UnquantizedMoeBackend.FLASHINFER_CUTLASS, UnquantizedMoeBackend.FLASHINFER_TRTLLM):
                for each in experts:
                    each.unquantized_backend = backend
                with pytest.raises(NotACopy):
                    EngineTensors(model, blank, shapes, landings)
            for each in experts:
                each.unquantized_backend = UnquantizedMoeBackend.TRITON
            for parameter in model.parameters():
                parameter.fill_(torch.nan)
            tensors = EngineTensors(model, blank, shapes, landings)
            for name, value in values.items():
                tensors.land(name, value)
            assert tensors.missing == []
            tensors.commit()
            found = {name: parameter.clone() for name, parameter in model.named_parameters()}
            assert tensors.compare(values.items(), None)["different"] == []
            experts[0].moe.moe_parallel_config.enable_eplb = True
            with pytest.raises(NotACopy):
                EngineTensors(model, blank, shapes, landings)
            model.load_weights(values.items())
    for name, parameter in model.named_parameters():
        assert torch.equal(found[name], parameter), name


def test_a_quantised_engine_is_reloaded(tmp_path: Path) -> None:
    """Whatever its method does with weights, nothing of it has to be known."""
    from types import SimpleNamespace

    from engine_layout import as_rank, build_model

    from rlflow.weights.engine.reload import ReloadedModel
    from rlflow.weights.extension import WorkerExtension

    path, shapes = save_config("llama", tmp_path)
    with as_rank(0, 1), torch.device("meta"):
        config, model = build_model(path, "float32", 1)
    worker: Any = WorkerExtension()
    worker.model_runner = SimpleNamespace(get_model=lambda: model)
    worker.vllm_config = SimpleNamespace(quant_config=object(), model_config=config.model_config)
    destination = worker._rlflow_destination(shapes, dict.fromkeys(shapes, "float32"))
    assert isinstance(destination, ReloadedModel)
    assert destination.landings.keys() == shapes.keys()


def test_vllm_s_groups_are_as_they_were(tmp_path: Path) -> None:
    from engine_layout import engine_layout
    from vllm.distributed import parallel_state

    before = {name: value for name, value in vars(parallel_state).items() if name.startswith("_") and name.isupper()}
    path, shapes = save_config("llama", tmp_path)
    engine_layout(path, "float32", 2, shapes)
    assert {name: getattr(parallel_state, name) for name in before} == before
