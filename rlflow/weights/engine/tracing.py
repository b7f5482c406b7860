"""Watching a loader: which elements of which parameter it copies where.

The loader is given parameters without storage (torch's meta device), and every operation that it does is seen. Taking
a view is followed; a copy from a view of a parameter into a view of one of the model's tensors is what is asked for; it
is not carried out. Anything else that is done with a parameter is refused, because then a tensor of the model would not
hold the parameter's elements.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlflow.errors import ConfigError, NotACopy
from rlflow.weights.shape.boxes import Box, intersection
from rlflow.weights.shape.landings import Axis, Landing, merged, regions_of
from rlflow.weights.shape.layout import Region, Shapes

_copy = torch.ops.aten.copy_.default
_CLEARING = (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)


def trace_loading(
    model: nn.Module, load: Callable[[Iterable[tuple[str, Tensor]]], object], shapes: Shapes, dtype: torch.dtype
) -> dict[str, list[Landing]]:
    """What `load` copies from each parameter into the model's tensors; those that it ignores are left out.

    Nothing is written: the model may hold weights that are in use.

    Raises NotACopy when it does anything but copy elements, or writes one twice; ConfigError when it refuses a
    parameter, or fills a tensor from none.
    """
    given = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    before = {name: _storage(tensor) for name, tensor in tensors.items()}
    with torch.no_grad(), _Watch(given, tensors) as watch:
        try:
            load(given.items())
        except (KeyError, ValueError) as error:
            raise ConfigError(f"{type(model).__name__} does not take these parameters: {error}") from error
    for name, tensor in {**dict(model.named_parameters()), **dict(model.named_buffers())}.items():
        if before.get(name) != _storage(tensor):
            raise NotACopy(f"the loader of {type(model).__name__} puts another tensor in the place of {name!r}")
    found = watch.landings()
    filled = {landing.tensor for landings in found.values() for landing in landings}
    if empty := [name for name, _ in model.named_parameters() if name not in filled]:
        raise ConfigError(
            f"{len(empty)} tensors of {type(model).__name__} are filled from no parameter, such as {empty[0]!r}; "
            "all parameters of the model must be given"
        )
    return found


class _Watch(TorchDispatchMode):
    def __init__(self, given: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._given = given
        self._tensors = tensors
        self._name_of_given = {_storage(tensor): name for name, tensor in given.items()}
        # The first name counts if several share a storage.
        self._name_of_tensor = {_storage(tensor): name for name, tensor in reversed(list(tensors.items()))}
        # Tensor -> parameter -> what was copied.
        self._copied: dict[str, dict[str, list[Region]]] = defaultdict(lambda: defaultdict(list))

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        used = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        names = [self._name_of_given[_storage(tensor)] for tensor in used if _storage(tensor) in self._name_of_given]
        if func._schema.is_mutable and _storage(args[0]) in self._name_of_tensor:
            self._write(func, *args)
            return args[0]
        if names and not func.is_view:
            raise NotACopy(f"the loader computes with {names[0]!r} ({func}) before it copies it")
        return func(*args, **(kwargs or {}))

    def _write(self, func: Any, target: Tensor, *sources: Any) -> None:
        tensor = self._name_of_tensor[_storage(target)]
        whole = self._tensors[tensor]
        if not whole.is_contiguous() or whole.storage_offset():
            raise NotACopy(f"tensor {tensor!r} does not lie in one piece, so that there is no place to send to")
        if func in _CLEARING:
            self._clear(tensor, target)
            return
        if func is not _copy or _storage(sources[0]) not in self._name_of_given:
            raise NotACopy(f"the loader writes something else than a parameter to {tensor!r} ({func})")
        name, source = self._name_of_given[_storage(sources[0])], sources[0].expand(target.shape)
        if source.dtype != self._given[name].dtype or source.is_neg() or source.is_conj():
            raise NotACopy(f"the loader takes {name!r} for something else before it copies it")
        axes = list(map(Axis, target.shape, source.stride(), target.stride()))
        shape = tuple(self._given[name].shape)
        self._copied[tensor][name] += regions_of(
            shape, int(source.storage_offset()), axes, int(target.storage_offset())
        )

    def _clear(self, tensor: str, target: Tensor) -> None:
        """Padding may be filled with a constant, before or after; what was copied may not be overwritten."""
        axes = list(map(Axis, target.shape, target.stride(), repeat(0)))
        cleared = regions_of(tuple(self._tensors[tensor].shape), int(target.storage_offset()), axes, 0)
        boxes = [(region.start, region.stop) for region in cleared]
        if any(intersection(box, written) for box in boxes for _, written in self._written(tensor)):
            raise NotACopy(f"the loader clears a part of {tensor!r} that it has copied a parameter to")

    def _written(self, tensor: str) -> list[tuple[str, Box]]:
        """The boxes of a tensor that were copied to, and from which parameter."""
        shape = tuple(self._tensors[tensor].shape)
        return [
            (name, (box.start, box.stop))
            for name, regions in self._copied[tensor].items()
            for region in regions
            for box in regions_of(shape, region.offset, list(map(Axis, region.shape, region.strides, repeat(0))), 0)
        ]

    def landings(self) -> dict[str, list[Landing]]:
        """All copies, by parameter. Raises NotACopy if two write to the same element."""
        found: dict[str, list[Landing]] = defaultdict(list)
        for tensor, copied in self._copied.items():
            dtype = str(self._tensors[tensor].dtype).removeprefix("torch.")
            for name, regions in copied.items():
                copied[name] = list(merged(regions))
                found[name].append(Landing(tensor=tensor, dtype=dtype, regions=tuple(copied[name])))
            _check_disjoint(tensor, self._written(tensor))
        return dict(found)


def _check_disjoint(tensor: str, written: list[tuple[str, Box]]) -> None:
    open_: list[tuple[str, Box]] = []
    for name, (start, stop) in sorted(written, key=lambda each: each[1]):
        # In ascending order, a box that ends before this one begins meets none of those to come.
        open_ = [each for each in open_ if each[1][1][:1] > start[:1]]
        for other, box in open_:
            if intersection(box, (start, stop)):
                raise NotACopy(f"the loader copies both {other!r} and {name!r} to the same elements of {tensor!r}")
        open_.append((name, (start, stop)))


def _storage(tensor: Tensor) -> int:
    """Names the memory that a tensor is a view of, even on the meta device."""
    return tensor.untyped_storage()._cdata
