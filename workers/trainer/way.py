"""Which way tokens go through a model: packed, with shared prefixes; samples end to end; or padded, which all allow."""

import inspect
import sys
from enum import StrEnum
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from rlflow.errors import ConfigError
from rlflow.workers.trainer.attention import ATTENTION
from rlflow.workers.trainer.layers import ATTENTION_LAYERS, decoder_layers, layer_types

PLAIN = "eager"
"""The attention that each family of transformers is written in; the others are faster forms of it."""
_CONVOLUTION = ("causal_conv1d", "causal_conv1d_fn", "seq_idx")
_KERNELS = {
    "GatedDeltaNet": (_CONVOLUTION, ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule", "cu_seqlens")),
    "ShortConv": (_CONVOLUTION,),
}
"""How the classes of linear layers end that transformers tells where samples begin -> module, name and argument of each
kernel that heeds it."""


class Way(StrEnum):
    """How the samples of a row go through a model."""

    packed = "packed"
    """One row; shared prefixes once."""
    end_to_end = "end to end"
    """One row; each sample with its own copy of what it shares, for layers with a state."""
    padded = "padded"
    """A row a sample."""

    @property
    def in_words(self) -> str:
        """How samples go."""
        return "in padded rows" if self is Way.padded else self.value


def choose_way(model: PreTrainedModel) -> None:
    """Choose by what the configuration says of the layers, and, for those with a state, by the kernels at hand.

    What a configuration does not say is measured when the model has its weights; see `gate`.
    """
    others = set(layer_types(model)) - ATTENTION_LAYERS
    has_convolution = any("conv" in type(module).__name__.lower() for module in decoder_layers(model).modules())
    is_packed = model._supports_attention_backend and not others and not has_convolution
    if is_packed or (others and _heeds_boundaries(model)):
        set_attention(model, ATTENTION)
    else:
        go_in_rows(model)


def check_packed(model: PreTrainedModel, sequence_parallel: int) -> None:
    """Raise ConfigError for a model that does not go packed, whose tokens ranks cannot share."""
    if sequence_parallel > 1 and (way := way_of(model)) is not Way.packed:
        others = set(layer_types(model)) - ATTENTION_LAYERS
        found = f" because of its layers of {', '.join(sorted(others))}" if others else ""
        raise ConfigError(
            f"trainer.sequence_parallel={sequence_parallel} shares the tokens of packed rows, and model.path names a "
            f"{model.config.model_type} model, which goes {way.in_words}{found}; set it to 1"
        )


def _heeds_boundaries(model: PreTrainedModel) -> bool:
    """True if no layer carries a state from one sample of a row into the next.

    Where a kernel is missing, transformers takes the boundaries and drops them without a word.
    """
    layers, kinds = decoder_layers(model), layer_types(model)
    linear = [layer for layer, kind in zip(layers, kinds, strict=False) if kind not in ATTENTION_LAYERS]
    return len(layers) == len(kinds) and all(_has_kernels(layer) for layer in linear)


def _has_kernels(layer: nn.Module) -> bool:
    kinds = [type(module) for module in layer.modules()]
    names = [kind.__name__ for kind in kinds if kind.__module__.startswith("transformers.")]
    kernels = [each for ending, found in _KERNELS.items() if any(n.endswith(ending) for n in names) for each in found]
    return bool(kernels) and all(_is_imported(*kernel) for kernel in kernels)


def _is_imported(module: str, name: str, argument: str) -> bool:
    """True if transformers, which imports kernels as it imports a family, has found one with this argument."""
    kernel = getattr(sys.modules.get(module), name, None)
    return kernel is not None and argument in inspect.signature(kernel).parameters


def go_in_rows(model: PreTrainedModel) -> None:
    """Use the attention that transformers has for padded rows."""
    has_caps = getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None
    # transformers' SDPA leaves caps of scores out, without a word.
    set_attention(model, "sdpa" if model._supports_sdpa and not has_caps else PLAIN)


def way_of(model: PreTrainedModel) -> Way:
    """The way that was chosen."""
    if attention_of(model) != ATTENTION:
        return Way.padded
    return Way.end_to_end if set(layer_types(model)) - ATTENTION_LAYERS else Way.packed


def is_packed(model: PreTrainedModel) -> bool:
    """True if the model takes rows in which prefixes are shared."""
    return way_of(model) is Way.packed


def attention_of(model: PreTrainedModel) -> str:
    """The name of the attention that layers use."""
    return str(model.config.get_text_config()._attn_implementation)


def set_attention(model: PreTrainedModel, name: str) -> None:
    """Let every layer use this attention from the next call on."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.config._attn_implementation = name
    model.config.get_text_config()._attn_implementation = name
    if (tower := getattr(model.config, "vision_config", None)) is not None:
        tower._attn_implementation = "sdpa"  # an image's pieces all see each other


def pin_rotary(config: PreTrainedConfig, max_length: int) -> None:
    """Let every sample have the same rotary frequencies, whatever goes through the model beside it.

    With `longrope` transformers chooses by the longest sample at hand. Engines choose by the longest that there may be,
    `max_length` tokens, and so does this.
    """
    parameters: dict[str, Any] = getattr(config.get_text_config(), "rope_parameters", None) or {}
    for rotary in (parameters, *(each for each in parameters.values() if isinstance(each, dict))):
        if rotary.get("rope_type") == "longrope":
            is_long = max_length > rotary["original_max_position_embeddings"]
            chosen = rotary["long_factor" if is_long else "short_factor"]
            rotary["short_factor"] = rotary["long_factor"] = chosen
