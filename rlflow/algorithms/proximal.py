"""The proximal policy without a forward pass of its own (decoupled PPO, AReaL, arXiv:2505.24298)."""

from torch import Tensor


def interpolate_proximal(logprobs: Tensor, behaviour: Tensor, versions: Tensor, current_version: int) -> Tensor:
    """Log-probabilities [N] of the policy one version before the current one, approximately and without gradient.

    log-linear between the behaviour policy of version v and the current policy of version c: behaviour + a (current -
    behaviour) with a = (c - 1 - v) / (c - v), and a = 0 for tokens of version c - 1 or newer. `versions` [N] is the
    version that sampled each token.
    """
    assert versions.numel() == 0 or int(versions.max()) <= current_version, "a token from the future"
    age = (current_version - versions).clamp(min=1).to(logprobs.dtype)
    share = (age - 1) / age
    behaviour = behaviour.detach()
    return behaviour + share * (logprobs.detach() - behaviour)
