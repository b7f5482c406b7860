"""How far the policy is from its teacher in the place of each token, over the tokens that the teacher finds likeliest.

    log pi and log pi_T of the teacher's k likeliest tokens -> and of all others together -> KL of the two [N]

Without the bucket of the others, probability that the policy moves out of the k tokens would count for nothing. If k is
the vocabulary, this is the whole KL; otherwise it is less, because tokens within the bucket are not told apart. Reverse
is KL(pi || pi_T), and forward KL(pi_T || pi), with the places that are reached taken as they are (Agarwal et al.,
arXiv:2306.13649). Where the policy gives all tokens of the bucket less than 1e-6, forward KL no longer pulls it towards
them; a larger k leaves less to the bucket.

Example: pi (0.5, 0.25, 0.25), pi_T (0.5, 0.4, 0.1) and k 1 -> both say 0.5 and 0.5 -> 0
"""

import torch
from torch import Tensor


def divergence(own: Tensor, its: Tensor, of: Tensor, count: int, *, is_forward: bool) -> Tensor:
    """[N] nats, with the gradient of `own`.

    own, its: log-probabilities [K] of policy and teacher; of: the token [K], of N = `count`, in whose place each is.
    """
    from_, to = (its, own) if is_forward else (own, its)
    listed = own.new_zeros(count).index_add(0, of, from_.exp() * (from_ - to))
    rest_from, rest_to = (_log_rest(each, of, count) for each in (from_, to))
    return listed + rest_from.exp() * (rest_from - rest_to)


def _log_rest(logprobs: Tensor, of: Tensor, count: int) -> Tensor:
    """log [N] of the probability of the tokens that are not listed; where it is lost in rounding (below 1e-6 in
    float32), that of rounding, without a gradient."""
    rest = 1 - logprobs.new_zeros(count).index_add(0, of, logprobs.exp())
    return rest.clamp(min=8 * torch.finfo(rest.dtype).eps).log()
