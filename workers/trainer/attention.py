"""Attention over packed rows: a segment attends to itself and to those that it continues, which others may too.

    PackedBatch -> attention_layout (once a row) -> packed_attention (once a layer; sequence_parallel.py registers it)

On the CPU the segments are gathered into a few padded blocks, with one SDPA call each. On CUDA one flex_attention call
skips the tiles that are masked out.
Shape letters: T tokens of the row, B segments of a block with up to Q queries and K keys, H heads, D head dimension.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import torch
import torch.fx.experimental._config as fx_config
import torch.nn.functional as F
from numpy.typing import NDArray
from packaging.version import Version
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from transformers import PreTrainedModel

from rlflow.batching.pack import IndexArray, PackedBatch
from rlflow.errors import ConfigError

ATTENTION = "rlflow_packed"
"""The `attn_implementation` to load a transformers model with."""
TILE = 128
"""Queries and keys of a tile of flex_attention's mask."""


Reach = int | None
"""How many tokens a query looks back, itself included; None if it looks back to the start."""


@dataclass(kw_only=True, slots=True, frozen=True)
class PaddedBlock:
    """Segments of similar length, padded to the longest. Padded queries give finite values that nothing reads."""

    query_rows: Tensor  # [B, Q], rows of the packed batch
    key_rows: Tensor  # [B, K]
    masks: Mapping[Reach, Tensor | None]
    """[B, 1, Q, K], True where the query sees the key; None for causal queries and keys."""


@dataclass(kw_only=True, slots=True, frozen=True)
class AttentionLayout:
    """How the tokens of one row attend: blocks for SDPA, or masks for flex_attention."""

    blocks: tuple[PaddedBlock, ...] = ()
    slots: Tensor | None = None  # [T], index of each token among the blocks' queries, end to end
    block_masks: Mapping[Reach, BlockMask] | None = None
    num_padding: int = 0
    """Tokens to append to the row, for `block_masks`. Nothing reads what they become."""
    has_flash: bool = False
    """True if flex_attention may take FlashAttention-4."""


def attention_windows(model: PreTrainedModel) -> list[int]:
    """The windows that layers of this model may have, in tokens; a token counts in its own."""
    text = model.config.get_text_config()
    found = {getattr(module, "sliding_window", None) for module in (text, *model.modules())}
    return sorted(window for window in found if isinstance(window, int) and window > 0)


def attention_layout(
    packed: PackedBatch, device: torch.device, use_flex: bool, windows: Sequence[int] = ()
) -> AttentionLayout:
    """The layout for the CUDA kernel if `use_flex`, otherwise for SDPA, which runs everywhere.

    `windows`: of the layers that do not look back to the start.
    """
    longest = int(packed.position_ids.max(initial=0)) + 1
    shorter = [window for window in windows if window < longest]
    if use_flex:
        masks: dict[Reach, BlockMask] = {reach: block_mask_of(packed, device, reach) for reach in (None, *shorter)}
        return AttentionLayout(
            block_masks=masks | {window: masks[None] for window in windows if window >= longest},
            num_padding=masks[None].shape[-1] - len(packed.input_ids),
            has_flash=device.type == "cuda" and has_flash(torch.cuda.get_device_capability(device), _flash_release()),
        )
    depths, lengths = packed.position_ids[packed.segment_starts], packed.segment_lengths
    tables = [_table(packed, chosen) for chosen in _buckets(depths == 0, lengths)]
    tables += [_table(packed, chosen) for chosen in _buckets(depths > 0, lengths, depths + lengths)]
    slots = np.full(len(packed.input_ids), -1)
    offset = 0
    for query_rows, query_lengths, _, _ in tables:
        is_real = np.arange(query_rows.shape[1]) < query_lengths[:, None]
        slots[query_rows[is_real]] = offset + np.flatnonzero(is_real)
        offset += query_rows.size
    assert slots.min() >= 0, "every token belongs to a segment"
    blocks = tuple(
        PaddedBlock(
            query_rows=torch.from_numpy(queries).to(device),
            key_rows=torch.from_numpy(keys).to(device),
            masks=_masks((queries, keys, mask), packed.position_ids, windows, longest, device),
        )
        for queries, _, keys, mask in tables
    )
    return AttentionLayout(blocks=blocks, slots=torch.from_numpy(slots).to(device))


def _masks(
    table: tuple[IndexArray, IndexArray, NDArray[np.bool_] | None],
    positions: IndexArray,
    windows: Sequence[int],
    longest: int,
    device: torch.device,
) -> dict[Reach, Tensor | None]:
    """The block's mask for each reach; a window of `longest` tokens or more is none."""
    query_rows, key_rows, mask = table
    whole = None if mask is None else torch.from_numpy(mask[:, None]).to(device)
    masks: dict[Reach, Tensor | None] = dict.fromkeys((None, *windows), whole)
    if shorter := [window for window in windows if window < longest]:
        distance = positions[query_rows][:, :, None] - positions[key_rows][:, None]
        for window in shorter:
            seen = (distance < window) & (np.tri(distance.shape[1], dtype=np.bool_) if mask is None else mask)
            masks[window] = torch.from_numpy(seen[:, None]).to(device)
    return masks


_Table = tuple[IndexArray, IndexArray, IndexArray, "NDArray[np.bool_] | None"]
"""Query rows [B, Q], query lengths [B], key rows [B, K], mask [B, Q, K]."""


def _buckets(is_chosen: NDArray[np.bool_], *lengths: IndexArray) -> list[IndexArray]:
    """Indices of chosen segments that agree in all lengths up to a factor of two, so that padding at most doubles a
    side."""
    chosen = np.flatnonzero(is_chosen)
    if not len(chosen):
        return []
    powers = np.stack([np.ceil(np.log2(length[chosen])) for length in lengths], axis=1)
    kinds, kind_of = np.unique(powers, axis=0, return_inverse=True)
    return [chosen[kind_of.reshape(-1) == kind] for kind in range(len(kinds))]


def _table(packed: PackedBatch, chosen: IndexArray) -> _Table:
    """Of segments that continue others; or of some that do not, which need no mask."""
    starts, lengths, parents = packed.segment_starts[chosen], packed.segment_lengths[chosen], packed.segment_parents
    num_queries, depths = int(lengths.max()), packed.position_ids[starts]
    # A shorter one repeats its last token.
    queries = starts[:, None] + np.minimum(np.arange(num_queries), lengths[:, None] - 1)
    if not depths.any():
        return queries, lengths, queries, None
    before = {parent: packed.path(parent) for parent in set(parents[chosen].tolist())}
    places = np.minimum(np.arange(int((depths + lengths).max())), (depths + lengths)[:, None] - 1) - depths[:, None]
    keys = starts[:, None] + places
    for row, segment in enumerate(chosen):
        keys[row, : depths[row]] = before[int(parents[segment])]
    return queries, lengths, keys, np.arange(keys.shape[1]) <= (depths[:, None] + np.arange(num_queries))[:, :, None]


_IN_LAYOUT = frozenset({"position_ids", "cu_seq_lens_q", "seq_idx"})
_SAYS_NOTHING = _IN_LAYOUT | {"dropout", "use_cache", "output_attentions", "output_hidden_states"}
"""What transformers passes beside and that changes no score."""


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    layout: AttentionLayout | None = None,
    sliding_window: Reach = None,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """query [1, H, T, D], key and value [1, fewer heads, T, D] -> [1, T, H, D], as transformers calls it.

    s_aux: [H], a score a head that takes its share of the softmax and attends to nothing, an attention sink.
    softcap: scores become softcap * tanh(score / softcap).
    Dropout is ignored, because the policy that is trained must be the one that sampled.

    Raises ConfigError for anything else that a model asks of attention.
    """
    if layout is None:
        raise ConfigError(f"{type(module).__name__} is not told where samples begin, so it cannot go packed")
    asked = {name for name, found in others.items() if found is not None} - _SAYS_NOTHING
    if attention_mask is not None:
        asked.add("attention_mask")
    if others.get("is_causal"):
        asked.discard("is_causal")
    if asked:
        raise ConfigError(
            f"{type(module).__name__} asks attention for {', '.join(sorted(asked))}, which it cannot do packed"
        )
    if layout.block_masks is not None:
        output = _flex(query, key, value, layout, scaling, sliding_window or None, s_aux, softcap)
        return output.transpose(1, 2), None
    assert layout.slots is not None
    outputs: list[Tensor] = []  # [B * Q, H * D] of each block
    for block in layout.blocks:
        mask = block.masks[sliding_window or None]
        states = (
            _gather(query, block.query_rows),
            _gather(key, block.key_rows),
            _gather(value, block.key_rows),
        )
        if s_aux is not None or softcap is not None:
            output = _by_scores(*states, mask, scaling, s_aux, softcap)
        else:
            output = F.scaled_dot_product_attention(
                *states,
                attn_mask=mask,
                is_causal=mask is None,
                scale=scaling,
                enable_gqa=query.shape[1] != key.shape[1],
            )
        outputs.append(output.transpose(1, 2).flatten(0, 1).flatten(1, 2))
    return F.embedding(layout.slots, torch.cat(outputs)).view(1, len(layout.slots), query.shape[1], -1), None


def _by_scores(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    sinks: Tensor | None,
    softcap: float | None,
) -> Tensor:
    """What SDPA has no arguments for, with all scores of a block in memory: [B, H, Q, D]."""
    heads = query.shape[1] // key.shape[1]
    key, value = (state.repeat_interleave(heads, dim=1) for state in (key, value))
    scores = query @ key.transpose(2, 3) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is None:
        mask = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).tril()
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        column = sinks[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column.to(scores.dtype)], dim=-1)
    shares = scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(query.dtype)
    return shares[..., : key.shape[2]] @ value


def _flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: AttentionLayout,
    scale: float,
    reach: Reach,
    sinks: Tensor | None,
    softcap: float | None,
) -> Tensor:
    assert layout.block_masks is not None, "the caller has chosen flex attention"
    options: Any = None
    if query.is_cuda:
        # FlashAttention-4 has tiles of 128 keys, as the mask has them, with heads of these sizes.
        takes_flash = layout.has_flash and query.dtype == torch.bfloat16 and query.shape[-1] in (64, 96, 128)
        is_plain = sinks is None and softcap is None and query.shape[-1] == value.shape[-1]
        options = {"BACKEND": "FLASH" if takes_flash and is_plain else "TRITON"}
    # In a layer that is compiled, this becomes part of the layer's graph.
    is_alone = query.is_cuda and not torch.compiler.is_compiling()
    kernel = _compiled_flex() if is_alone else flex_attention

    cap = softcap or 1.0

    def capped(score: Tensor, batch: Tensor, head: Tensor, query_at: Tensor, key_at: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    found: Any = kernel(
        query,
        key,
        value,
        score_mod=None if softcap is None else capped,
        block_mask=layout.block_masks[reach],
        scale=scale,
        enable_gqa=True,
        kernel_options=options,
        return_aux=None if sinks is None else AuxRequest(lse=True),
    )
    if sinks is None:
        return found
    # The sink is one more term of the denominator: exp(lse) / (exp(lse) + exp(sink)) of the shares is left.
    output, asked = found
    left = torch.sigmoid(asked.lse - sinks[None, :, None].float())
    return output * left[..., None].to(output.dtype)


def _gather(states: Tensor, rows: Tensor) -> Tensor:
    """[1, H, T, D] at rows [B, K] -> [B, H, K, D]. An embedding's backward is fast and deterministic on CPU."""
    table = states[0].transpose(0, 1).flatten(1)
    return F.embedding(rows, table).unflatten(2, (states.shape[1], states.shape[3])).transpose(1, 2)


def block_mask_of(packed: PackedBatch, device: torch.device, window: Reach = None) -> BlockMask:
    """The mask for flex_attention, from the segments: nothing here has T x T entries.

    A query sees the last `window` tokens of its sample, itself included, or all of them.

    A tile of queries and keys is left out if no query sees a key, and needs no mask if every query sees every key. The
    row is padded to two whole tiles or more, because torch compiles lengths of 1 on their own; padding attends to
    padding.
    """
    num_tokens = len(packed.input_ids)
    num_tiles = max(2, -(-num_tokens // TILE))
    length = num_tiles * TILE
    # What continues a segment follows it without a gap, so the queries that see a key are a run that begins with it.
    end_of = np.full(length, length, np.int32)
    end_of[:num_tokens] = np.repeat(_ends(packed), packed.segment_lengths)
    position_of = np.pad(packed.position_ids.astype(np.int32), (0, length - num_tokens))
    ends, positions = (torch.from_numpy(each).to(device) for each in (end_of, position_of))

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < ends[key])

    def sees_near(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return sees(batch, head, query, key) & (positions[query] - positions[key] < reach)

    reach = num_tokens if window is None else window
    # [queries' tile, keys' tile]; a tile of the diagonal has keys that come after queries.
    tiles, first_of = end_of.reshape(num_tiles, TILE), np.arange(0, length, TILE)[:, None]
    below = np.tri(num_tiles, k=-1, dtype=np.bool_)
    seen, full = below & (tiles.max(1) > first_of), below & (tiles.min(1) >= first_of + TILE)
    np.fill_diagonal(seen, True)
    if window is not None:
        tiles = position_of.reshape(num_tiles, TILE)
        first, last = tiles.min(1), tiles.max(1)
        seen &= first[:, None] - last < window
        full &= last[:, None] - first < window
    is_seen, is_full = (torch.from_numpy(each).to(device)[None, None] for each in (seen, full))
    return BlockMask.from_kv_blocks(
        *_ordered(is_seen & ~is_full),
        *_ordered(is_full),
        BLOCK_SIZE=TILE,
        mask_mod=sees if window is None else sees_near,
        seq_lengths=(num_tiles * TILE, num_tiles * TILE),
    )


def _ends(packed: PackedBatch) -> IndexArray:
    """[S], where the last segment ends that continues each."""
    ends = packed.segment_starts + packed.segment_lengths
    for segment, parent in reversed(list(enumerate(packed.segment_parents))):
        if parent >= 0:
            ends[parent] = max(ends[parent], ends[segment])
    return ends


def _ordered(is_chosen: Tensor) -> tuple[Tensor, Tensor]:
    """How many keys' tiles are chosen for each queries' tile, and all tiles, the chosen ones first."""
    order = torch.argsort(is_chosen.to(torch.uint8), dim=-1, descending=True, stable=True)
    return is_chosen.sum(-1, dtype=torch.int32), order.to(torch.int32)


def compile_for_any_length(function: Callable[..., Any], backend: Any = "inductor") -> Callable[..., Any]:
    """One graph for rows of any length. Past dynamo's limit of graphs it raises; eager flex attention would take T x T
    scores a head."""
    # Otherwise a length that happens to equal another size is compiled as that size.
    fx_config.use_duck_shape = False
    return torch.compile(function, dynamic=True, fullgraph=True, backend=backend)


@cache
def _compiled_flex() -> Callable[..., Tensor]:
    return compile_for_any_length(flex_attention)


def has_flash(capability: tuple[int, int], release: str | None) -> bool:
    """True if flex attention can run FlashAttention-4 on a GPU of this compute capability, with this release of it.

    Read in torch 2.13 and flash-attn-4 4.0.0b19 to b36: Hopper takes the tiles of this mask, Blackwell only tiles of
    256 queries. Before b27 the backward pass of a sparse mask read what was not written yet (flash-attention, pull
    request 2756).
    """
    return capability == (9, 0) and release is not None and Version(release) >= Version("4.0.0b27")


@cache
def _flash_release() -> str | None:
    try:
        return version("flash-attn-4")
    except PackageNotFoundError:
        return None
