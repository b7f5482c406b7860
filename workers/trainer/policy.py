"""A transformers causal language model as a policy: packed row in, log-probabilities of its loss tokens out.

Shape letters: T tokens of the row, N loss tokens.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlflow.batching.pack import IndexArray, PackedBatch
from rlflow.config import Config
from rlflow.errors import ConfigError
from rlflow.models.images import ImageProcessor, open_images
from rlflow.models.opening import open_config
from rlflow.types import FloatArray, TrainSample
from rlflow.weights.shape.layout import chunk_of
from rlflow.workers.trainer.attention import attention_layout, attention_windows
from rlflow.workers.trainer.balance import Balance
from rlflow.workers.trainer.layers import backbone
from rlflow.workers.trainer.plain import plain_logprobs
from rlflow.workers.trainer.pretrained import CPU, FirstValues, empty_model, load_whole
from rlflow.workers.trainer.rank_group import ALONE, RankGroup
from rlflow.workers.trainer.routing import lay_routes, replay_routes
from rlflow.workers.trainer.rows import boundaries, end_to_end, rows_of
from rlflow.workers.trainer.sequence_parallel import RowPart, gather, own_tokens, places_in
from rlflow.workers.trainer.token_logprobs import MAX_LOGITS, TokenLogprobs, among_support, likeliest, logit_rule
from rlflow.workers.trainer.vision import Vision, freeze_tower, policy_class
from rlflow.workers.trainer.way import Way, way_of


class Policy(nn.Module):
    """A policy; the whole computation is inside `forward`, because FSDP's hooks on the root must see it."""

    def __init__(
        self,
        model: PreTrainedModel,
        temperature: float,
        max_logits: int = MAX_LOGITS,
        *,
        float32_head: bool = False,
        images: ImageProcessor | None = None,
    ) -> None:
        """`model` must have been loaded by `load_whole`. Its logits are divided by `temperature`.

        `images` if it takes some; then its decoder alone is trained.
        """
        super().__init__()
        self.model = model
        self.images = images
        self.vision = None if images is None else Vision(images)
        self._rule = logit_rule(model.config, temperature, in_float32=float32_head)
        if images is not None:
            self._rule = replace(self._rule, forbidden=images.token)
            freeze_tower(model)
        self._max_logits = max_logits
        self._head_group = self._row_group = ALONE
        self.balance: Balance | None = None
        head = model.get_output_embeddings()
        if not isinstance(head, nn.Linear):
            raise ConfigError(
                f"model.path names a {model.config.model_type} model whose output layer is not a linear layer; got "
                f"{head}; choose another model"
            )

    def share_head(self, group: RankGroup) -> None:
        """Divide the tokens whose logits are computed among the ranks of `group`, which have the same hidden states."""
        self._head_group = group

    def share_rows(self, group: RankGroup) -> None:
        """Divide the tokens of each row among the ranks of `group`; see `sequence_parallel`."""
        self._row_group = group

    def follow_routers(self, config: Config) -> Balance | None:
        """Let routers take the engine's routes, and tell their loads, as the settings ask; the loads, if they do.

        Before the model is sharded or wrapped. Raises ConfigError if a balance loss is asked for and there is none.
        """
        is_balanced = config.algorithm.balance_coefficient > 0
        if config.rollout.replay_experts or is_balanced:
            self.balance = replay_routes(self.model, with_balance=is_balanced)
        return self.balance

    def forward(
        self, packed: PackedBatch, has_plain: bool = False, likeliest_of: tuple[int, int] | None = None
    ) -> tuple[Tensor, ...]:
        """Log-probabilities [N] and entropies [N] of the loss tokens, float32, both with a gradient.

        If the row has likely tokens, their log-probabilities [K] come next, with a gradient too, and with a balance
        loss its [N], if there is a gradient. With `has_plain`, in place of the entropies what transformers alone says
        of the log-probabilities. With `likeliest_of`, k and a number of ids, what `likeliest` finds instead, [N, k].
        """
        hidden = hidden_states(self.model, packed, self.vision, self._row_group)
        if likeliest_of is not None:
            return self._likeliest(hidden, packed, *likeliest_of)
        found = self.logprobs_of(hidden, packed)
        if has_plain:
            return found[0], plain_logprobs(self.model, packed, self._rule.temperature, self.vision)
        balance = None if self.balance is None else self.balance.take()
        if balance is None:
            return found
        own = places_in(own_tokens(self._row_group, len(hidden)), packed.loss_positions)
        places = torch.from_numpy(own).to(hidden.device)
        return (*found, gather(balance, places, packed.num_loss_tokens, self._row_group))

    def _likeliest(self, hidden: Tensor, packed: PackedBatch, k: int, num_ids: int) -> tuple[Tensor, Tensor]:
        """A frozen policy's, whose rows and head no other rank shares."""
        head = self.model.get_output_embeddings()
        assert head is not None and self._head_group is self._row_group is ALONE, "no frozen policy is shared"
        unique, inverse = (
            torch.from_numpy(each).to(hidden.device) for each in np.unique(packed.loss_positions, return_inverse=True)
        )
        found = likeliest(hidden[unique], head.weight, head.bias, self._rule, self._max_logits, k, num_ids)
        ids, logprobs = (each[inverse] for each in found)
        return ids, logprobs

    def logprobs_of(self, hidden: Tensor, packed: PackedBatch) -> tuple[Tensor, ...]:
        """`forward` from the states [T, hidden size] of the last layer on, or from this rank's part of them."""
        device = hidden.device
        head = self.model.get_output_embeddings()
        assert head is not None, "checked at construction"
        if hidden.shape[1] != head.weight.shape[1]:
            raise ConfigError(
                f"model.path names a {self.model.config.model_type} model whose layers give {hidden.shape[1]} numbers, "
                f"of which its output layer makes {head.weight.shape[1]} first; choose another model"
            )
        # Tokens that one state predicts, such as the first tokens of a group's completions, share its logits.
        unique, inverse = np.unique(packed.loss_positions, return_inverse=True)
        tokens_here = own_tokens(self._row_group, len(hidden))
        first, last = np.searchsorted(unique, (tokens_here.start, tokens_here.stop)).tolist()
        start, stop = (first + bound for bound in chunk_of(last - first, self._head_group.rank, self._head_group.size))
        positions, row_of = (
            torch.from_numpy(part).to(device) for part in (unique[start:stop] - tokens_here.start, inverse)
        )
        targets, support_ids, support_of = (
            torch.from_numpy(part).to(device) for part in (packed.targets, packed.support_ids, packed.support_of)
        )
        # What a token was chosen among are further targets in its row, and so is what a teacher finds likely.
        count, likely = len(targets), packed.likely
        if likely is not None:
            assert not len(support_of), "the settings allow one of the two"
            support_ids, support_of = (torch.from_numpy(part).to(device) for part in (likely.ids, likely.of))
        row_of, targets = torch.cat([row_of, row_of[support_of]]), torch.cat([targets, support_ids])
        tokens = torch.nonzero((row_of >= start) & (row_of < stop))[:, 0]
        # An embedding gathers rows, because its backward is deterministic on the CPU.
        predictive = F.embedding(positions, hidden)
        own: tuple[Tensor, Tensor] = TokenLogprobs.apply(
            predictive, head.weight, head.bias, row_of[tokens] - start, targets[tokens], self._rule, self._max_logits
        )  # pyright: ignore[reportAssignmentType]
        # Only one of the two groups has other ranks.
        group = self._row_group if self._row_group.size > 1 else self._head_group
        logprobs, entropies = (gather(of_own, tokens, len(targets), group) for of_own in own)
        if likely is not None:
            return logprobs[:count], entropies[:count], logprobs[count:]
        return among_support(logprobs, entropies, support_of) if len(support_of) else (logprobs, entropies)


def hidden_states(
    model: PreTrainedModel, packed: PackedBatch, vision: Vision | None = None, group: RankGroup = ALONE
) -> Tensor:
    """The last layer's states [T, hidden size] of a row, from a model that `empty_model` has made.

    `vision` if it takes images. `group`: the ranks that share the row; with others in it, the states are those of this
    rank's `own_tokens`, and of padding at the end of the row. Raises ValueError for a row with images without `vision`.
    """
    if packed.images and vision is None:
        raise ValueError(f"a sample holds images, and the {model.config.model_type} model takes none")
    device = next(model.parameters()).device
    # The decoder alone takes embeddings; what a model without images is called with stays as it was.
    run = backbone(model) if vision is None else model.get_decoder()
    shown = None if vision is None else vision.shown(model, packed)

    def inputs(input_ids: IndexArray, token_of: IndexArray) -> dict[str, Any]:
        """The tokens, or what stands for them; both are [R, L], and `token_of` is -1 for padding."""
        return {"input_ids": torch.from_numpy(input_ids).to(device)} if shown is None else shown.inputs(token_of)

    way = way_of(model)
    assert way is Way.packed or group.size == 1, "checked at construction"
    if way is Way.padded:
        rows = rows_of(packed)
        lay_routes(model, packed.experts, rows.tokens.reshape(-1), rows.cells[packed.loss_positions])
        states: Tensor = run(**inputs(rows.input_ids, rows.tokens), use_cache=False).last_hidden_state
        # An embedding gathers, because its backward is deterministic on the CPU.
        return F.embedding(torch.from_numpy(rows.cells).to(device), states.flatten(0, 1))
    row, place_of = end_to_end(packed) if way is Way.end_to_end else (packed, None)
    layout = attention_layout(row, device, use_flex=device.type == "cuda", windows=attention_windows(model))
    num_tokens = len(row.input_ids)
    part = RowPart(group=group, num_tokens=num_tokens + layout.num_padding)
    input_ids, positions = (part.of(each)[None] for each in (row.input_ids, row.position_ids))
    token_of, here = part.of(np.arange(num_tokens), padding=-1), own_tokens(group, part.size)
    lay_routes(model, row.experts, token_of, row.loss_positions[places_in(here, row.loss_positions)] - here.start)
    told = {"position_ids": torch.from_numpy(positions).to(device)} | inputs(input_ids, token_of[None])
    if group.size > 1:
        return run(**told, use_cache=False, layout=layout, part=part).last_hidden_state[0]
    if place_of is not None:
        told |= boundaries(row.segment_lengths, layout.num_padding, device)
    states = run(**told, use_cache=False, layout=layout).last_hidden_state[0]
    if place_of is None:
        return states[:num_tokens]
    return F.embedding(torch.from_numpy(place_of).to(device), states)


def empty_policy(config: Config, model_path: str) -> tuple[Policy, FirstValues]:
    """The model at `model_path`, float32, with its parameters on the meta device, and the values they begin with.

    Raises ConfigError for a model that cannot be trained.
    """
    trust = config.model.trust_remote_code
    model, values = empty_model(policy_class(open_config(model_path, trust=trust)), config, model_path)
    return _policy(model, config, model_path), values


def load_policy(
    config: Config, model_path: str, device: torch.device = CPU, dtype: torch.dtype = torch.float32
) -> Policy:
    """`empty_policy`, whole in this process with its first values."""
    auto_class = policy_class(open_config(model_path, trust=config.model.trust_remote_code))
    return _policy(load_whole(auto_class, config, model_path, device=device, dtype=dtype), config, model_path)


def _policy(model: PreTrainedModel, config: Config, model_path: str) -> Policy:
    images = open_images(model_path, trust=config.model.trust_remote_code)
    return Policy(model, config.rollout.temperature, float32_head=config.model.float32_head, images=images)


def split_logprobs(logprobs: Tensor, samples: Sequence[TrainSample]) -> list[FloatArray]:
    """[N] of a packed row -> [L] for each of its samples, 0 where there is no loss."""
    values = logprobs.float().cpu().numpy()
    found: list[FloatArray] = []
    start = 0
    for sample in samples:
        mask = sample.sample.loss_mask
        row = np.zeros(len(mask), np.float32)
        end = start + int(mask.sum())
        row[mask] = values[start:end]
        found.append(row)
        start = end
    return found


def torch_dtype(config: Config) -> torch.dtype:
    """The dtype in which the model computes and the engines hold the weights."""
    return torch.bfloat16 if config.model.dtype == "bfloat16" else torch.float32
