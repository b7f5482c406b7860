"""Which of the two ways tokens go through a model: packed, which shares prompts, or as padded rows, which all allow."""

from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from rlflow.errors import ConfigError
from rlflow.workers.trainer.attention import ATTENTION
from rlflow.workers.trainer.layers import decoder_layers

PLAIN = "eager"
"""The attention that each family of transformers is written in; the others are faster forms of it."""
_PACKED_LAYERS = {"full_attention", "sliding_attention"}


def choose_way(model: PreTrainedModel) -> None:
    """Let the model go packed if its configuration says that only attention looks at other tokens; otherwise in rows.

    What a configuration does not say is measured when the model has its weights; see `gate`.
    """
    text = model.config.get_text_config()
    others = set(getattr(text, "layer_types", None) or ()) - _PACKED_LAYERS
    has_convolution = any("conv" in type(module).__name__.lower() for module in decoder_layers(model).modules())
    if model._supports_attention_backend and not others and not has_convolution:
        set_attention(model, ATTENTION)
    else:
        go_in_rows(model)


def check_packed(model: PreTrainedModel, sequence_parallel: int) -> None:
    """Raise ConfigError for a model in padded rows, whose tokens ranks cannot share."""
    if sequence_parallel > 1 and not is_packed(model):
        others = set(getattr(model.config.get_text_config(), "layer_types", None) or ()) - _PACKED_LAYERS
        found = f" because of its layers of {', '.join(sorted(others))}" if others else ""
        raise ConfigError(
            f"trainer.sequence_parallel={sequence_parallel} shares the tokens of packed rows, and model.path names a "
            f"{model.config.model_type} model, which goes in padded rows{found}; set it to 1"
        )


def go_in_rows(model: PreTrainedModel) -> None:
    """Use the attention that transformers has for padded rows."""
    has_caps = getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None
    # transformers' SDPA leaves caps of scores out, without a word.
    set_attention(model, "sdpa" if model._supports_sdpa and not has_caps else PLAIN)


def is_packed(model: PreTrainedModel) -> bool:
    """True if the model takes packed rows."""
    return attention_of(model) == ATTENTION


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
