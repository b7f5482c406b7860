"""The balance loss of a mixture of experts, with the loads of a whole step (arXiv:2501.11873).

    routers of a pass -> loss of each token, from the shares of the step before -> Objective
                      -> counts, over passes and ranks -> the shares of the next step

Of a router with E experts, f_i is the share of the choices of the step before that fell on expert i, and p_i(t) the
probability that the router gives it for token t. The loss of a token is E * sum_i f_i p_i(t), averaged over the
routers: 1 if the load is even. Only p has a gradient, which is therefore a sum over loss tokens as every other, however
a step is cut up. The first step of a run has even shares, and with them no gradient.
Shape letters: N loss tokens, R rows that the model computes, E experts, k of which a token goes to.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


class Balance:
    """The loads of all routers of a model, and the losses of one pass."""

    def __init__(self, num_routers: int, num_experts: int) -> None:
        self.counts = torch.zeros(num_routers, num_experts, dtype=torch.float64)
        """How often this rank's loss tokens went to each expert since the last step."""
        self.before = torch.zeros_like(self.counts)
        """How often those of all ranks did in the last step; zeros before the first one."""
        self.rows: Tensor | None = None
        """The row [N] of each loss token of the pass; None if it has no gradient."""
        self._losses: list[Tensor] | None = None

    def begin(self, rows: Tensor | None) -> None:
        """Before a forward pass."""
        self.rows, self._losses = rows, None if rows is None else []

    def add(self, router: int, probabilities: Tensor, chosen: Tensor) -> None:
        """What a router has computed: probabilities [R, E], and the experts [R, k] that the tokens go to.

        A layer that the backward pass computes again comes here again, and must compute the same.
        """
        assert self.rows is not None, "begin is called before"
        shares = self._shares()[router].to(probabilities) * self.counts.shape[1]
        # An embedding gathers rows, because its backward is deterministic on the CPU.
        loss = F.embedding(self.rows, probabilities) @ shares
        if self._losses is not None:
            self._losses.append(loss)
            own = torch.bincount(chosen[self.rows].flatten(), minlength=len(shares))
            self.counts = self.counts.to(own.device).index_add(0, own.new_tensor([router]), own[None].double())

    def take(self) -> Tensor | None:
        """The loss [N] of each token of the pass, float32; None if it has no gradient."""
        losses, self._losses = self._losses, None
        return None if losses is None else torch.stack(losses).float().mean(0)

    def end_step(self, counts: Tensor) -> float:
        """Take the counts of all ranks for those of the step; the load of the fullest expert over the even one."""
        self.before, self.counts = counts, torch.zeros_like(counts)
        return float(self._shares().max()) * counts.shape[1]

    def _shares(self) -> Tensor:
        totals = self.before.sum(1, keepdim=True)
        return torch.where(totals > 0, self.before / totals.clamp(min=1), 1 / self.before.shape[1])
