"""Do the kernels that the trainer calls compute what a float64 oracle says? Forward and backward, on small shapes.

The oracle is dense and naive: a mask of every query and key, and the logits of every row at once. Each figure is the
largest difference as a share of the oracle's largest value.
"""

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from rlflow.batching.pack import PackedBatch, pack
from rlflow.errors import RunError
from rlflow.tools.bench.gpu.plan import Figure, Plan, Report
from rlflow.tools.bench.training_sides import Workload, groups_of
from rlflow.workers.trainer.attention import attention_layout, packed_attention
from rlflow.workers.trainer.policy import Policy

ALLOWED = {torch.float32: 2e-3, torch.bfloat16: 4e-2}
"""Differences above these are no rounding. float32: matrix products on a GPU may round their factors to 10 bits."""
HEADS, KEY_HEADS, HEAD_DIM = 8, 2, 64
HIDDEN, VOCABULARY, MAX_LOGITS = 64, 1000, 20_000
TEMPERATURE = 0.7
ROW = Workload(groups=3, group_size=4, prompt=150, shortest=1, longest=90)
"""Segments that begin and end within the tiles of 128 tokens that flex attention works on."""


def kernels(plan: Plan, report: Report) -> None:
    """Raises RunError if a kernel is off by more than rounding."""
    device = torch.device("cuda" if plan.on_gpu else "cpu")
    packed = pack(groups_of(ROW.arrays(VOCABULARY)))
    for dtype, name in ((torch.float32, "float32"), (torch.bfloat16, "bfloat16")):
        report.tell(attention_difference(packed, device, dtype, name))
        report.tell(output_difference(packed, device, dtype, name))
    for figure, value in report.figures.items():
        allowed = ALLOWED[torch.bfloat16 if "bfloat16" in figure else torch.float32]
        if float(value) > allowed:
            raise RunError(f"{figure} is {float(value):.2g}, more than rounding explains ({allowed:g})")


def attention_difference(packed: PackedBatch, device: torch.device, dtype: torch.dtype, name: str) -> dict[str, Figure]:
    """`packed_attention` with the layout that the trainer takes on this device."""
    torch.manual_seed(0)
    length = len(packed.input_ids)
    shapes = [(1, heads, length, HEAD_DIM) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    exact = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    toward = torch.randn(1, length, HEADS, HEAD_DIM, dtype=torch.float64)
    given = [each.to(device, dtype).requires_grad_() for each in exact]
    of_query, of_key, of_value = given
    layout = attention_layout(packed, device, use_flex=device.type == "cuda")
    output, _ = packed_attention(nn.Module(), of_query, of_key, of_value, None, scaling=HEAD_DIM**-0.5, layout=layout)
    output.backward(toward.to(device, dtype))
    # The oracle starts from what the kernel was given, rounding included.
    query, key, value = (each.detach().cpu().double().requires_grad_() for each in given)
    repeated = [each.repeat_interleave(HEADS // KEY_HEADS, 1) for each in (key, value)]
    scores = query @ repeated[0].transpose(2, 3) * HEAD_DIM**-0.5
    wanted = (scores.masked_fill(~sees(packed), -torch.inf).softmax(-1) @ repeated[1]).transpose(1, 2)
    wanted.backward(toward.to(dtype).double())
    pairs = zip(given, (query, key, value), strict=True)
    gradients = [_share(found.grad, oracle.grad) for found, oracle in pairs]
    return {f"attention_{name}": _share(output, wanted), f"attention_gradient_{name}": max(gradients)}


def sees(packed: PackedBatch) -> Tensor:
    """Which key [T] each query [T] sees, pair by pair."""
    length = len(packed.input_ids)
    mask = np.zeros((length, length), np.bool_)
    for segment, size in enumerate(packed.segment_lengths):
        path = packed.path(segment)
        mask[path[-size:, None], path] = np.tri(size, len(path), len(path) - size, dtype=np.bool_)
    return torch.from_numpy(mask)


class _States(nn.Module):
    """A model whose last hidden states are given, so that nothing but the policy's output layer is measured."""

    def __init__(self, states: Tensor, weight: Tensor) -> None:
        super().__init__()
        self.states, self.head = nn.Parameter(states), nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.head.weight = nn.Parameter(weight)
        self.config = PreTrainedConfig()

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def output_difference(packed: PackedBatch, device: torch.device, dtype: torch.dtype, name: str) -> dict[str, Figure]:
    """Log-probabilities of the policy's output layer, in chunks, and their gradients by states and weights."""
    torch.manual_seed(1)
    states = torch.randn(len(packed.input_ids), HIDDEN, dtype=torch.float64).to(device, dtype)
    weight = torch.randn(VOCABULARY, HIDDEN, dtype=torch.float64).to(device, dtype) * HIDDEN**-0.5
    model = _States(states, weight)
    logprobs, _ = Policy(model, TEMPERATURE, MAX_LOGITS).logprobs_of(model.states, packed)  # pyright: ignore[reportArgumentType]
    toward = torch.randn(len(logprobs))
    logprobs.backward(toward.to(device))
    exact, exact_weight = (each.detach().cpu().double().requires_grad_() for each in (states, weight))
    logits = exact[torch.from_numpy(packed.loss_positions)] @ exact_weight.T / TEMPERATURE
    wanted = logits.log_softmax(-1).gather(1, torch.from_numpy(packed.targets)[:, None])[:, 0]
    wanted.backward(toward.double())
    gradients = [_share(model.states.grad, exact.grad), _share(model.head.weight.grad, exact_weight.grad)]
    return {f"logprob_{name}": _share(logprobs, wanted), f"logprob_gradient_{name}": max(gradients)}


def _share(found: Tensor | None, wanted: Tensor | None) -> float:
    assert found is not None and wanted is not None, "both were differentiated"
    exact = wanted.detach()
    return float((found.detach().cpu().double() - exact).abs().max() / exact.abs().max())
