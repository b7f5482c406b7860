"""What transformers alone says of a batch: each sample by itself, without padding, with the family's own attention."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlflow.batching.pack import PackedBatch
from rlflow.workers.trainer.layers import backbone
from rlflow.workers.trainer.rows import rows_of
from rlflow.workers.trainer.vision import Vision
from rlflow.workers.trainer.way import PLAIN, attention_of, set_attention


def plain_logprobs(
    model: PreTrainedModel, packed: PackedBatch, temperature: float, vision: Vision | None = None
) -> Tensor:
    """[N], float32, the log-probabilities of the loss tokens by the model's own head; `vision` if it takes images."""

    def run(input_ids: Tensor, keys: Sequence[str]) -> Tensor:
        pixels = {} if vision is None else vision.inputs(model, input_ids, keys, packed.pictures)
        return model(input_ids=input_ids, use_cache=False, **pixels).logits

    logits = _where_predicted(model, packed, run)
    if vision is not None:
        logits[:, vision.processor.token] = -torch.inf
    targets = torch.from_numpy(packed.targets).to(logits.device)
    return (logits / temperature).log_softmax(-1).gather(1, targets[:, None])[:, 0]


def plain_states(model: PreTrainedModel, packed: PackedBatch) -> Tensor:
    """[N, hidden size], float32, the last layer's states that predict the loss tokens."""
    run = backbone(model)
    return _where_predicted(
        model, packed, lambda input_ids, _: run(input_ids=input_ids, use_cache=False).last_hidden_state
    )


def _where_predicted(
    model: PreTrainedModel, packed: PackedBatch, run: Callable[[Tensor, Sequence[str]], Tensor]
) -> Tensor:
    """[N, ...], float32: what `run` gives of [1, L] tokens and the keys of their images, where loss tokens are
    predicted."""
    # A prefix by itself shows if a model looks ahead: in the row of what continues it, it would see that.
    rows = rows_of(packed, prefixes_alone=True)
    row_of, column_of = np.divmod(rows.cells[packed.loss_positions], rows.input_ids.shape[1])
    device = next(model.parameters()).device
    found: list[Tensor] = []
    with _as_written(model):
        for row, length in enumerate(rows.lengths):
            columns = torch.from_numpy(column_of[row_of == row]).to(device)
            input_ids = torch.from_numpy(rows.input_ids[row : row + 1, :length]).to(device)
            shown = {
                place: image.key for image in packed.images for place in np.flatnonzero(rows.tokens[row] == image.start)
            }
            found.append(run(input_ids, [shown[place] for place in sorted(shown)])[0, columns].float())
    order = np.argsort(np.argsort(row_of, kind="stable"), kind="stable")
    return torch.cat(found)[torch.from_numpy(order).to(device)]


@contextmanager
def _as_written(model: PreTrainedModel) -> Iterator[None]:
    """Layers run as transformers writes them: not compiled, and with plain attention."""
    chosen = attention_of(model)
    set_attention(model, PLAIN)
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        set_attention(model, chosen)
