"""Adapters sent alone, inside each vLLM worker: the base weights stay as they were read, and the adapter is replaced.

arena -> copies of its tensors -> checked -> vLLM's own adapter, under an id that never changes

Requests name that id, so that requests under way go on with the new adapter. The cache must be cleared with each
version, because its key is the adapter's name. vLLM itself cuts an adapter for the ranks of an engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.lora.utils import parse_fine_tuned_lora_name
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear

from rlflow.weights.engine.messages import ADAPTER_ID, Columns, Opening, WeightReport
from rlflow.weights.engine.receiver import Named
from rlflow.weights.shm.arena import map_arena

if TYPE_CHECKING:
    from vllm.lora.model_manager import LoRAModelManager


class AdapterReceiver:
    """A `Receiver` of adapters from an arena."""

    is_beside = True

    def __init__(self, manager: LoRAModelManager, rank: int, alpha: float, *, is_cut: bool) -> None:
        """`is_cut` says that the engine has several workers, each of which holds slices of the adapters."""
        self._manager = manager
        self._rank = rank
        self._alpha = alpha
        self._is_cut = is_cut
        self._tensors: dict[str, Tensor] = {}

    def open(self, opening: Opening) -> int:
        """Adapters are small: they come in one bucket."""
        self._staged = opening.staged
        self._tensors = {}
        return 1

    def receive(self, bucket: int) -> None:
        """Raises ValueError when the arena holds another version."""
        arena = map_arena(self._staged.path, self._staged.num_bytes)
        arena.check(self._staged.version)
        # vLLM multiplies B by its scale in place, and goes on to hold the tensors.
        self._tensors = {name: tensor.clone() for name, tensor in arena.tensors(self._staged.slots)}
        arena.check(self._staged.version)

    def commit(self) -> None:
        """Raises ValueError when the adapters do not fit; then those before stay."""
        replace_adapter(self._manager, self._tensors, self._rank, self._alpha)

    def compare(self, expected: Iterable[Named] | None, columns: Columns | None) -> WeightReport:
        """Compare what this worker adds to its layers to adapters, which are always whole."""
        assert expected is not None, "adapters are always in an arena"
        if self._is_cut:
            return WeightReport(num_equal=0, different=[], unverified=[name for name, _ in expected])
        return compare_adapters(self._manager, dict(expected), self._alpha / self._rank)

    def abort(self) -> None:
        """Hold no adapter, so that nothing can be sampled under an old one by mistake."""
        self._manager.remove_adapter(ADAPTER_ID)

    def shutdown(self) -> None:
        """Nothing is open between two versions."""


def replace_adapter(manager: LoRAModelManager, tensors: Mapping[str, Tensor], rank: int, alpha: float) -> None:
    """Make `tensors`, by PEFT's names, the adapter with the id ADAPTER_ID. Raises ValueError when they do not fit."""
    dtype = manager.lora_config.lora_dtype
    assert isinstance(dtype, torch.dtype), "vLLM resolves it at the start"
    options = {"r": rank, "lora_alpha": alpha, "target_modules": []}
    adapter = LoRAModel.from_lora_tensors(
        ADAPTER_ID,
        dict(tensors),
        PEFTHelper.from_dict(options),
        device="cpu",
        dtype=dtype,
        weights_mapper=_name_mapper(manager),
    )
    _check_fit(manager, adapter, rank)
    if manager.device.type == "cpu":
        add_densely(manager)
    manager.remove_adapter(ADAPTER_ID)
    manager.add_adapter(adapter)
    manager.activate_adapter(ADAPTER_ID)


def _name_mapper(manager: LoRAModelManager) -> Any:
    """From Hugging Face names to vLLM's, for a model that has other ones."""
    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    return None if mapper is None else mapper.get_rename_mapper()


def _check_fit(manager: LoRAModelManager, adapter: LoRAModel, rank: int) -> None:
    """Raise ValueError unless there is exactly one adapter, of the right shape, for each layer that takes one.

    vLLM itself ignores what it has no layer for, and copies what is too small into a corner.
    """
    missing = dict(_expected_shapes(manager, rank))
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


def _expected_shapes(
    manager: LoRAModelManager, rank: int
) -> Iterator[tuple[str, tuple[tuple[int, int], tuple[int, int]]]]:
    """Of A [R, I] and B [O, R] of each layer of the checkpoint that takes an adapter."""
    for name, module in manager.modules.items():
        parts = manager.packed_modules.get(name, [name])
        layer: Any = module.base_layer
        for part, outputs in zip(parts, _outputs_of(layer, len(parts)), strict=True):
            yield part, ((rank, layer.input_size), (outputs, rank))


def _outputs_of(layer: Any, num_parts: int) -> Sequence[int]:
    """Outputs of each part of a vLLM layer, over all ranks; heads that several ranks hold count once."""
    sizes = [layer.output_size]
    if isinstance(layer, QKVParallelLinear):
        keys, values = (layer.total_num_kv_heads * size for size in (layer.head_size, layer.v_head_size))
        sizes = [layer.total_num_heads * layer.head_size, keys, values]
    elif isinstance(layer, MergedColumnParallelLinear):
        sizes = layer.output_sizes
    return sizes if num_parts > 1 else [sum(sizes)]


class DenseAdapter(PunicaWrapperCPU):
    """What an adapter adds, where there is one only and all tokens have it: two products of matrices.

    vLLM's own way on a CPU copies the adapter's matrices once for each token, since tokens could have different ones.
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


def compare_adapters(manager: LoRAModelManager, expected: Mapping[str, Tensor], scaling: float) -> WeightReport:
    """Compare the A, and the scaled B, that the layers multiply with, to tensors by PEFT's names.

    What is beyond the rank of `expected` must be zero.
    """
    report = WeightReport(num_equal=0, different=[], unverified=[])
    held = dict(_held(manager)) if ADAPTER_ID in manager.lora_index_to_id else {}
    for name, tensor in expected.items():
        layer, is_inner = parse_fine_tuned_lora_name(name, _name_mapper(manager))
        found = held.get((layer, is_inner))
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


def _held(manager: LoRAModelManager) -> Iterator[tuple[tuple[str, bool], Tensor]]:
    """(layer, whether it is A) -> what the layer multiplies with, padded to the largest rank."""
    for name, module in manager.modules.items():
        layer: Any = module
        parts = manager.packed_modules.get(name, [name])
        for part, inner, outer in zip(parts, layer.lora_a_stacked, layer.lora_b_stacked, strict=True):
            yield (part, True), inner[0, 0].cpu()
            yield (part, False), outer[0, 0].cpu()
