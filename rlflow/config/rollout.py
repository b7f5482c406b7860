"""Settings of the engines that sample."""

from dataclasses import dataclass

from rlflow.config.choices import Update


@dataclass
class RolloutConfig:
    engines: int = 1
    tensor_parallel: int = 1
    max_new_tokens: int = 256
    """Sampled tokens of one reply."""
    temperature: float = 1.0
    top_k: int | None = None
    """Sample from this many of the likeliest tokens; null: from all. The engines report what each token was chosen
    among, and the trainer computes log-probabilities among the same. Needs GPUs, like top_p and min_p."""
    top_p: float = 1.0
    """Sample from the likeliest tokens that together have this probability. Needs top_k, which bounds the report."""
    min_p: float = 0.0
    """Sample from tokens that have at least this share of the likeliest token's probability. Needs top_k."""
    max_running: int = 64
    """Requests that one engine decodes at the same time."""
    kv_cache_gb: float = 0.5
    update: Update = Update.rolling
    """`rolling`: a quarter of the engines load new weights while the others sample; `all`: all at once."""
    drain: bool = False
    """An engine finishes its requests before it takes new weights, instead of pausing them half-way."""
    keep_cache: bool | None = None
    """Replies under way keep the keys and values that older weights computed, instead of computing them again. Their
    tokens count as that old. null: wherever replies are under way when weights are loaded."""
    seeded: bool = True
    """Seed each request, so that a synchronous run repeats token for token. Costs decode speed on a GPU."""
