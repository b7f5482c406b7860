"""Tiny random models of current families, each with what is special about its family switched on."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    Glm4MoeConfig,
    GptOssConfig,
    GraniteConfig,
    MistralConfig,
    Olmo3Config,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3_5TextConfig,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.06,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
WINDOWED: dict[str, Any] = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
"""A layer looks back fewer tokens than the prompts of the tests have."""
LINEAR: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_conv_kernel_dim": 4,
    # The only size of vLLM's kernel on a CPU.
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
NO_HEAD_DIM = {name: value for name, value in SIZES.items() if name != "head_dim"}

FAMILIES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "Qwen3.5": (Qwen3_5TextConfig, SIZES | LINEAR),
    "Qwen3-Next": (Qwen3NextConfig, SIZES | LINEAR | EXPERTS | {"shared_expert_intermediate_size": 64}),
    "Qwen3-MoE": (Qwen3MoeConfig, SIZES | EXPERTS),
    "Gemma 2": (Gemma2Config, SIZES | WINDOWED | {"query_pre_attn_scalar": 32, "tie_word_embeddings": True}),
    "Gemma 3": (Gemma3TextConfig, SIZES | WINDOWED | {"query_pre_attn_scalar": 32, "tie_word_embeddings": True}),
    "Gemma 4": (
        Gemma4TextConfig,
        SIZES
        | WINDOWED
        | {"global_head_dim": 64, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}
        | {"tie_word_embeddings": True},
    ),
    "gpt-oss": (GptOssConfig, SIZES | WINDOWED | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "GLM-4.5": (
        Glm4MoeConfig,
        SIZES
        | {"moe_intermediate_size": 64, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2}
        | {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    ),
    "OLMo 3": (Olmo3Config, SIZES | WINDOWED),
    "Mistral with a window": (MistralConfig, SIZES | {"sliding_window": 16}),
    "Phi-3 longrope": (
        Phi3Config,
        NO_HEAD_DIM
        | {
            "original_max_position_embeddings": 256,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0 + 0.05 * index for index in range(16)],
                "long_factor": [1.0 + 0.5 * index for index in range(16)],
            },
        },
    ),
    "Granite": (
        GraniteConfig,
        SIZES
        | {"embedding_multiplier": 2.0, "logits_scaling": 0.5}
        | {"residual_multiplier": 0.5, "attention_multiplier": 0.1},
    ),
    "DeepSeek-V3": (
        DeepseekV3Config,
        NO_HEAD_DIM
        | {"num_key_value_heads": 2, "moe_intermediate_size": 64, "n_routed_experts": 4, "n_shared_experts": 1}
        # vLLM reads the first, which transformers drops as its own default.
        | {"topk_method": "noaux_tc", "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
        | {"first_k_dense_replace": 1, "q_lora_rank": 32, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
        | {"qk_nope_head_dim": 128, "v_head_dim": 128},
    ),
}
"""Name -> class of its configuration, and what to build it with; without special tokens, so that replies run to their
end."""


def tiny_model(family: str, seed: int) -> PreTrainedModel:
    """In float32, with random weights."""
    config_class, options = FAMILIES[family]
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config_class(**options), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms and biases begin as ones and zeros, which many mistakes leave alone
                parameter += 0.1 * torch.randn_like(parameter)
        kept = model.state_dict()
        for name, buffer in model.named_buffers():
            if name in kept:
                buffer += 0.1 * torch.randn_like(buffer)
    return model.eval()
