"""Settings of the engines that sample."""

from dataclasses import dataclass, field
from typing import Any

from rlflow.config.choices import Quantization, Speculative, Update


@dataclass
class RolloutConfig:
    """The engines (vLLM) that sample replies."""

    engines: int = 1
    """Copies of the model that sample side by side, each a vLLM on `tensor_parallel` GPUs. More make rollouts
    faster; utilisation/rollout and utilisation/train say which side waits. 0: the data gives the replies."""
    tensor_parallel: int = 1
    """GPUs of one engine."""
    expert_parallel: bool = False
    """The GPUs of an engine share out whole experts of a mixture, instead of a slice of each expert."""
    max_new_tokens: int = 256
    """Sampled tokens of one reply."""
    oversample: float = 1.0
    """Groups started for each that a step takes. Above 1, such as 1.25, a step does not wait for the slowest: they are
    cancelled, and played together in a later step. Tasks with long episodes are then trained later than others. If
    rollout and training overlap, it needs staleness.order=ready_first."""
    oversample_episodes: float = 1.0
    """Episodes started for each that a group takes; the slowest are cancelled. They are gone for good, so that the
    policy learns from short episodes more often than it plays them."""
    temperature: float = 1.0
    """Divides the logits, in the trainer too. Below 1 replies differ less, and groups teach less."""
    top_k: int | None = None
    """Sample from this many of the likeliest tokens; null: from all. The engines report what each token was chosen
    among, and the trainer computes log-probabilities among the same. Needs GPUs, like top_p and min_p."""
    top_p: float = 1.0
    """Sample from the likeliest tokens that together have this probability. Needs top_k, which bounds the report."""
    min_p: float = 0.0
    """Sample from tokens that have at least this share of the likeliest token's probability. Needs top_k."""
    stop: list[str] = field(default_factory=list)
    """Texts that end a reply, beside the model's own stop tokens; the reply keeps the text that ended it."""
    template_args: dict[str, Any] = field(default_factory=dict)
    """What the model's chat template is told beside the messages, by name, such as `{enable_thinking: false}` for
    Qwen3; a name that the template does not read is refused."""
    max_running: int | None = None
    """Requests that one engine decodes at the same time, if its cache holds them. null: 512 on a GPU, else 64."""
    kv_cache_gb: float | None = None
    """The cache on each GPU of an engine. null: what its GPU has left; without GPUs 0.5."""
    quantization: Quantization | None = None
    """`fp8`: engines round each version of the weights to 8 bits, for about twice the speed where weights are what is
    read. They sample from another policy than the one that is trained, which needs a correction."""
    speculative: Speculative = Speculative.off
    """Guess tokens ahead and check them in one step, on GPUs; distribution and log-probabilities stay those of `off`.
    `ngram`: what followed the last few tokens before, in the prompt and the reply. `suffix`: also in other replies;
    needs the package arctic-inference. It pays when replies repeat themselves or each other, and few requests run."""
    update: Update = Update.rolling
    """`rolling`: a quarter of the engines load new weights while the others sample; `all`: all at once."""
    drain: bool = False
    """An engine gives its replies back at the end of their part before it takes new weights, instead of pausing them
    half-way; they go on elsewhere, or after the update."""
    keep_cache: bool | None = None
    """Replies under way keep the keys and values that older weights computed, instead of computing them again. Their
    tokens count as that old. null: wherever replies are under way when weights are loaded."""
    seeded: bool | None = None
    """Seed each request, so that a synchronous run repeats token for token. null: not on GPUs, where kernels round by
    what else is in a batch, so that seeds repeat nothing and cost speed."""
    replay_experts: bool = True
    """The trainer of a mixture of experts computes each token with the experts that the engine chose for it, if the
    engine is on GPUs. false is for comparison: each chooses for itself, and where they differ, so do probabilities."""
    engine_args: dict[str, Any] = field(default_factory=dict)
    """More arguments of vLLM's AsyncEngineArgs, by name; those that follow from other settings are refused."""
