"""Soft adaptive policy optimisation (SAPO, arXiv:2511.20347): a sigmoid gate in place of the clip."""

from __future__ import annotations

import torch

from rlflow.algorithms.base import require_positive
from rlflow.algorithms.loss.base import TokenLoss, none_clipped
from rlflow.algorithms.tokens import Tokens, clamp_log_ratio


def sapo(tokens: Tokens, *, temperature_positive: float = 1.0, temperature_negative: float = 1.05) -> TokenLoss:
    """-A (4 / t) sigmoid(t (r - 1)) with r = policy / proximal; t by the sign of A.

    At r = 1 the gradient is that of -A log p; it fades on both sides, the faster the higher the temperature t. It is
    taken away nowhere, so `is_clipped` is False throughout.
    """
    require_positive("temperature_positive", temperature_positive)
    require_positive("temperature_negative", temperature_negative)
    ratio = clamp_log_ratio(tokens.logprobs - tokens.proximal).exp()
    positive = torch.full_like(ratio, temperature_positive)
    temperature = torch.where(tokens.advantages > 0, positive, temperature_negative)
    gate = torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature
    return TokenLoss(loss=-tokens.advantages * gate, is_clipped=none_clipped(tokens))
