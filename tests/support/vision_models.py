"""Tiny random models that take images, with their processors, and pictures for them."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3Processor,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from rlflow.models.images import ImageProcessor, expanded, key_of, open_image
from rlflow.types import ImageSpan

QWENS = ("qwen2_5_vl", "qwen3_vl")
NEEDS_NUM2WORDS = pytest.mark.skipif(find_spec("num2words") is None, reason="SmolVLM's processor needs num2words")
END, IMAGE_TOKEN, SIDE = 2, 3, 32
_TILES = [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
_CHAT = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_SPECIAL = [*_CHAT, "<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *_TILES]
_QWEN_SPECIAL = [*_CHAT, "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_QWEN_TEMPLATE = TEMPLATE.replace("<image>", "<|vision_start|><|image_pad|><|vision_end|>")
_IDS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": END, "pad_token_id": 0}


def save_vision_model(
    folder: Path, seed: int = 0, *, family: str = "idefics3", tiles: bool = False, spread: float = 0.2
) -> str:
    """With `tiles`, which are of Idefics3 and SmolVLM, an image is cut into four and shown whole beside."""
    torch.manual_seed(seed)
    if family in QWENS:
        model = _qwen(folder, family, spread)
    else:
        model = _idefics3(folder, tiles, spread) if family == "idefics3" else _smolvlm(folder, tiles, spread)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:  # norms and biases begin as ones and zeros, which many mistakes leave alone
                parameter += 0.1 * torch.randn_like(parameter)
            elif "text_model" not in name and "language_model" not in name:
                parameter.normal_(0, 0.2)
    model.save_pretrained(folder)
    return str(folder)


def _tokenizer(special: Sequence[str], template: str) -> PreTrainedTokenizerFast:
    words = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(BPE(vocab={word: index for index, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in special])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=words[1], eos_token=words[END], pad_token=words[0], unk_token=words[0]
    )
    fast.chat_template = template
    return fast


def _idefics3(folder: Path, tiles: bool, spread: float) -> PreTrainedModel:
    tokenizer = _tokenizer(_SPECIAL, TEMPLATE)
    pixels = Idefics3ImageProcessorPil(
        size={"longest_edge": 2 * SIDE if tiles else SIDE},
        max_image_size={"longest_edge": SIDE},
        do_image_splitting=tiles,
    )
    Idefics3Processor(pixels, tokenizer, image_seq_len=4, chat_template=TEMPLATE).save_pretrained(folder)
    text: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "initializer_range": spread,
        "tie_word_embeddings": True,
        **_IDS,
    }
    tower = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": SIDE,
        "patch_size": 8,
    }
    config = Idefics3Config(
        text_config=text,
        vision_config=tower,
        image_token_id=IMAGE_TOKEN,
        scale_factor=2,
        tie_word_embeddings=True,
        **_IDS,
    )
    return Idefics3ForConditionalGeneration(config).float()


def _smolvlm(folder: Path, tiles: bool, spread: float) -> PreTrainedModel:
    """The sizes of `_idefics3`, and the files that the family's models came with."""
    same = _idefics3(folder, tiles, spread).config.to_dict()
    text, tower = ({**same[part], "architectures": None} for part in ("text_config", "vision_config"))
    (folder / "processor_config.json").write_text(
        json.dumps({"processor_class": "SmolVLMProcessor", "image_seq_len": 4})
    )
    shown = {"size": {"longest_edge": 2 * SIDE if tiles else SIDE}, "max_image_size": {"longest_edge": SIDE}}
    steps = dict.fromkeys(("do_convert_rgb", "do_resize", "do_rescale", "do_normalize", "do_pad"), True)
    classes = {
        "image_processor_type": "SmolVLMImageProcessor",
        "processor_class": "SmolVLMProcessor",
        "video_sampling": {"fps": 1, "max_frames": 64, "video_size": {"longest_edge": SIDE}},
    }
    pixels = {"do_image_splitting": tiles, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 1}
    (folder / "preprocessor_config.json").write_text(json.dumps({**classes, **shown, **steps, **pixels}))
    config = SmolVLMConfig(
        text_config=text,
        vision_config={**tower, "model_type": "smolvlm_vision"},
        image_token_id=IMAGE_TOKEN,
        scale_factor=2,
        tie_word_embeddings=True,
        **_IDS,
    )
    return SmolVLMForConditionalGeneration(config).float()


def _qwen(folder: Path, family: str, spread: float) -> PreTrainedModel:
    """Its files are those that the family's models came with. A piece of an image is a square of 16 x 16 pixels."""
    is_third = family == "qwen3_vl"
    tokenizer = _tokenizer(_QWEN_SPECIAL, _QWEN_TEMPLATE)
    tokenizer.save_pretrained(folder)
    sizes = {"size": {"shortest_edge": 16 * 16, "longest_edge": 64 * 64}}
    pixels = {
        "patch_size": 8,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        **(sizes if is_third else {"min_pixels": 16 * 16, "max_pixels": 64 * 64}),
        "image_processor_type": "Qwen2VLImageProcessorFast" if is_third else "Qwen2VLImageProcessor",
        "processor_class": "Qwen3VLProcessor" if is_third else "Qwen2_5_VLProcessor",
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(pixels))
    rotary = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
    text: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 1024,
        "initializer_range": spread,
        "tie_word_embeddings": True,
        "rope_parameters": rotary | ({"mrope_interleaved": True} if is_third else {}),
        **({"head_dim": 32} if is_third else {}),
        **_IDS,
    }
    tower = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "depth": 3,
        "num_heads": 1,
        "patch_size": 8,
        "out_hidden_size": 64,
        **(
            {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
            if is_third
            else {"window_size": 32, "fullatt_block_indexes": [1]}
        ),
    }
    own = {
        "text_config": text,
        "vision_config": tower,
        "image_token_id": IMAGE_TOKEN,
        "video_token_id": 4,
        "vision_start_token_id": 5,
        "vision_end_token_id": 6,
        "tie_word_embeddings": True,
        **_IDS,
    }
    if is_third:
        return Qwen3VLForConditionalGeneration(Qwen3VLConfig(**own)).float()
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(**own)).float()


def picture(seed: int, width: int = SIDE, height: int = SIDE) -> bytes:
    """Noise, as a PNG."""
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)).save(file, "PNG")
    return file.getvalue()


def album(*files: bytes) -> dict[str, bytes]:
    return {key_of(file): file for file in files}


def written(
    processor: ImageProcessor, parts: Sequence[str | bytes], random: np.random.Generator, start: int = 0
) -> tuple[list[int], tuple[ImageSpan, ...]]:
    """Files of images, and as many random tokens as each text has letters; `start` tokens come before."""
    ids, keys, tokens_of = list[int](), list[str](), dict[str, list[int]]()
    for part in parts:
        if isinstance(part, bytes):
            keys.append(key_of(part))
            tokens_of[keys[-1]] = processor.tokens(open_image(part))
            ids.append(IMAGE_TOKEN)
        else:
            ids += random.integers(20, 200, len(part)).tolist()
    return expanded(ids, IMAGE_TOKEN, keys, tokens_of, start)
