"""Adapters sent alone, inside each vLLM worker: the base weights stay as they were read, and the adapter is replaced.

arena -> copies of its tensors -> checked -> vLLM's own adapter, under an id that never changes

Requests name that id, so that requests under way go on with the new adapter. The cache must be cleared with each
version, because its key is the adapter's name. vLLM itself cuts an adapter for the ranks of an engine.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from vllm.lora.lora_model import LoRAModel
from vllm.lora.model_manager import LoRAModelManager
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.lora.utils import parse_fine_tuned_lora_name
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear

from rlflow.weights.engine.messages import ADAPTER_ID, Columns, WeightReport
from rlflow.weights.engine.receiver import Named
from rlflow.weights.shape.landings import Landings
from rlflow.weights.shape.layout import Shapes


class AdapterLayers:
    """A `Destination`: the layers to which vLLM adds an adapter. Adapters come through shared memory only."""

    is_beside = False
    """They come during the pause, because `abort` leaves no adapter to sample with."""

    def __init__(self, manager: LoRAModelManager, rank: int, alpha: float, *, is_cut: bool) -> None:
        """`is_cut` says that the engine has several workers, each of which holds slices of the adapters."""
        self.shapes: Shapes = {}
        self.landings: Landings = {}
        self.targets: Mapping[str, Tensor] = {}
        self._manager = manager
        self._rank = rank
        self._alpha = alpha
        self._is_cut = is_cut
        self._given: dict[str, Tensor] = {}

    @property
    def missing(self) -> list[str]:
        """`commit` finds what is missing: it depends on vLLM's layers."""
        return []

    def begin(self) -> None:
        self._given = {}

    def land(self, name: str, whole: Tensor) -> None:
        # vLLM multiplies B by its scale in place, and goes on to hold the tensors.
        self._given[name] = whole.clone()

    def landed(self, name: str) -> None:
        raise AssertionError("adapters come whole")

    def commit(self) -> None:
        """Make what was given the adapter with the id ADAPTER_ID. Raises ValueError when it does not fit: those before
        stay.
        """
        manager = self._manager
        dtype = manager.lora_config.lora_dtype
        assert isinstance(dtype, torch.dtype), "vLLM resolves it at the start"
        options = {"r": self._rank, "lora_alpha": self._alpha, "target_modules": []}
        adapter = LoRAModel.from_lora_tensors(
            ADAPTER_ID,
            dict(self._given),
            PEFTHelper.from_dict(options),
            device="cpu",
            dtype=dtype,
            weights_mapper=_name_mapper(manager),
        )
        _check_fit(manager, adapter, self._rank)
        if manager.device.type == "cpu":
            add_densely(manager)
        manager.remove_adapter(ADAPTER_ID)
        manager.add_adapter(adapter)
        manager.activate_adapter(ADAPTER_ID)

    def compare(self, expected: Iterable[Named] | None, columns: Columns | None) -> WeightReport:
        """Compare the A, and the scaled B, that the layers multiply with to adapters, which are always whole.

        What is beyond the rank of `expected` must be zero.
        """
        assert expected is not None, "adapters are always in an arena"
        if self._is_cut:
            return WeightReport(num_equal=0, different=[], unverified=[name for name, _ in expected])
        report = WeightReport(num_equal=0, different=[], unverified=[])
        manager, scaling = self._manager, self._alpha / self._rank
        held: dict[tuple[str, bool], Tensor] = {}
        """(layer, whether it is A) -> what the layer multiplies with, padded to the largest rank."""
        for name, module in manager.modules.items() if ADAPTER_ID in manager.lora_index_to_id else ():
            layer: Any = module
            parts = manager.packed_modules.get(name, [name])
            for part, inner, outer in zip(parts, layer.lora_a_stacked, layer.lora_b_stacked, strict=True):
                held[part, True], held[part, False] = inner[0, 0].cpu(), outer[0, 0].cpu()
        for name, tensor in expected:
            target, is_inner = parse_fine_tuned_lora_name(name, _name_mapper(manager))
            found = held.get((target, is_inner))
            if found is None:
                report["unverified"].append(name)
                continue
            wanted = torch.zeros_like(found)
            wanted[: tensor.shape[0], : tensor.shape[1]] = tensor if is_inner else tensor * scaling
            if torch.equal(found, wanted):
                report["num_equal"] += 1
            else:
                report["different"].append(name)
        return report

    def abort(self) -> None:
        """Hold no adapter, so that nothing can be sampled under an old one by mistake."""
        self._manager.remove_adapter(ADAPTER_ID)


def _name_mapper(manager: LoRAModelManager) -> Any:
    """Translates Hugging Face names to vLLM's; None if they are the same."""
    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    return None if mapper is None else mapper.get_rename_mapper()


def _check_fit(manager: LoRAModelManager, adapter: LoRAModel, rank: int) -> None:
    """Raise ValueError unless there is exactly one adapter, of the right shape, for each layer that takes one.

    vLLM itself ignores what it has no layer for, and copies what is too small into a corner.
    """
    missing = _expected_shapes(manager, rank)
    for name, weights in adapter.loras.items():
        shapes = missing.pop(name, None)
        if shapes is None:
            raise ValueError(f"the engine has no layer {name!r} to put an adapter on")
        for kind, tensor, shape in zip("AB", (weights.lora_a, weights.lora_b), shapes, strict=True):
            found = None if tensor is None else tuple(tensor.shape)
            if found != shape:
                raise ValueError(f"{kind} of the adapter of layer {name!r} must have shape {shape}; got {found}")
    if missing:
        raise ValueError(f"{len(missing)} layers were sent no adapter, such as {next(iter(missing))!r}")


def _expected_shapes(manager: LoRAModelManager, rank: int) -> dict[str, tuple[tuple[int, int], tuple[int, int]]]:
    """The shapes of A [R, I] and B [O, R] of each layer of the checkpoint that takes an adapter, over all ranks."""
    found: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {}
    for name, module in manager.modules.items():
        parts = manager.packed_modules.get(name, [name])
        layer: Any = module.base_layer
        outputs = [layer.output_size]
        if isinstance(layer, QKVParallelLinear):  # heads that several ranks hold count once
            keys, values = (layer.total_num_kv_heads * size for size in (layer.head_size, layer.v_head_size))
            outputs = [layer.total_num_heads * layer.head_size, keys, values]
        elif isinstance(layer, MergedColumnParallelLinear):
            outputs = layer.output_sizes
        if len(parts) == 1:
            outputs = [sum(outputs)]
        found |= {part: ((rank, layer.input_size), (size, rank)) for part, size in zip(parts, outputs, strict=True)}
    return found


class DenseAdapter(PunicaWrapperCPU):
    """What an adapter adds when it is the only one and all tokens have it: two products of matrices.

    vLLM's own way on a CPU copies the adapter's matrices once for each token, because tokens could have different ones.
    """

    def add_lora_linear(
        self,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: tuple[Tensor, ...],
        lora_b_stacked: tuple[Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        *,
        buffer: tuple[Tensor, ...] | None = None,
        **kwargs: Any,
    ) -> None:
        """y [N, all O] += x [N, I] A^T B^T for each part of the layer; A is [1, 1, R, I], B is [1, 1, O, R]."""
        parts = y.split(list(output_slices), dim=1)
        for part, inner, outer in zip(parts, lora_a_stacked, lora_b_stacked, strict=True):
            part.addmm_(x @ inner[0, 0].t(), outer[0, 0].t(), alpha=scale)


def add_densely(manager: LoRAModelManager) -> None:
    """Let all layers compute with `DenseAdapter`. Does nothing the second time."""
    assert manager.lora_slots == 1, "the adapter is the only one"
    for key, wrapper in manager.punica_wrapper_mapping.items():
        if isinstance(wrapper, DenseAdapter):
            continue
        dense = DenseAdapter(manager.max_num_batched_tokens, max_batches=manager.max_num_seqs, device=manager.device)
        manager.punica_wrapper_mapping[key] = dense
        for module in manager.modules.values():
            if module.punica_wrapper is wrapper:
                module.set_mapping(dense)
