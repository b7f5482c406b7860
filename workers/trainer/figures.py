"""What one rank adds up beside gradients, from one update to the next: the objective's sums, and the work done.

rows with a gradient -> sums
groups without one, of which one in so many is observed -> observed, and all of their tokens -> silent
totals: both over all ranks, in which what was not observed weighs as much as its tokens
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rlflow.types import TrainSample
from rlflow.workers.trainer.flops import ModelSizes, RowSizes, flops
from rlflow.workers.trainer.objective import Row


class Figures:
    """All float64; sums of ranks add up."""

    def __init__(self, num_sums: int, sizes: ModelSizes, device: torch.device) -> None:
        self.largest = torch.zeros((), dtype=torch.float64, device=device)
        """Scalar: the largest value of the figure whose maximum is reported."""
        self.work = torch.zeros(3, dtype=torch.float64)
        """Tokens, operations, and operations of a padded batch."""
        self._sizes = sizes
        self._sums = torch.zeros(num_sums, dtype=torch.float64, device=device)
        # Groups without a gradient: the figures of those that were observed; sequences and tokens of all of them.
        self._observed, self._silent = torch.zeros_like(self._sums), torch.zeros_like(self._sums[-2:])

    def add(self, row: Row, *, is_silent: bool) -> None:
        """A row that went through the model; `is_silent` if it has no gradient."""
        into = self._observed if is_silent else self._sums
        into += row.sums
        self.largest = torch.maximum(self.largest, row.largest)

    def pass_over(self, samples: Sequence[TrainSample]) -> None:
        """Samples without a gradient, observed or not."""
        num_tokens = [int(sample.sample.loss_mask.sum()) for sample in samples]
        self._silent += self._silent.new_tensor([sum(number > 0 for number in num_tokens), sum(num_tokens)])

    def add_work(self, own: RowSizes, padded: RowSizes) -> None:
        """A row as it is, and as it would be padded; forward, and backward where gradients are computed."""
        costs = [flops(self._sizes, sizes, with_backward=torch.is_grad_enabled()) for sizes in (own, padded)]
        self.work += torch.tensor([own.tokens, *costs], dtype=torch.float64)

    def totals(self, add_up: Callable[[Tensor], Tensor]) -> Tensor:
        """The sums [num_sums] of all ranks, over which `add_up` sums a tensor."""
        size = len(self._sums)
        found = add_up(torch.cat([self._sums, self._observed, self._silent]))
        sums, observed, silent = found[:size], found[size:-2], found[-2:]
        if observed[-1] > 0:
            observed *= silent[-1] / observed[-1]
        return sums + torch.cat([observed[:-2], silent])

    def clear(self) -> None:
        for counted in (self._sums, self._observed, self._silent, self.largest, self.work):
            counted.zero_()


def memory_peaks(device: torch.device) -> list[int]:
    """The peak of this process's memory on a GPU since the last call; nothing on a CPU."""
    if device.type != "cuda":
        return []
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return [peak]
