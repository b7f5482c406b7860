"""Reference kernels of linear layers that heed where samples begin, put where transformers finds the real ones."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback

FAMILIES = ("qwen3_5", "qwen3_next", "olmo_hybrid", "lfm2")


def causal_conv1d_fn(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, seq_idx: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """x [B, D, T], weight [D, width], seq_idx [B, T]: each channel's last `width` numbers of its own sample."""
    sample_of = torch.zeros(x.shape[0], x.shape[2]) if seq_idx is None else seq_idx
    total = torch.zeros_like(x) if bias is None else bias[:, None].expand_as(x)
    for back in range(weight.shape[1]):
        earlier = F.pad(x, (back, 0))[:, :, : x.shape[2]]
        is_own = F.pad(sample_of, (back, 0), value=-1)[:, : x.shape[2]] == sample_of
        total = total + earlier * is_own[:, None] * weight[:, -1 - back, None]
    return F.silu(total) if activation == "silu" else total


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, None]:
    """q, k, v [B, T, H, D], g, beta [B, T, H]: token by token, each sample from a state of zeros (arXiv:2412.06464)."""
    assert initial_state is None and not output_final_state and use_qk_l2norm_in_kernel
    starts = {0} if cu_seqlens is None else set(cu_seqlens.tolist())
    q, k = (each * torch.rsqrt(each.square().sum(-1, keepdim=True) + 1e-6) for each in (q, k))
    outputs, state = [], q.new_zeros(())
    for at in range(q.shape[1]):
        if at in starts:
            state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
        state = state * g[:, at].to(q.dtype).exp()[..., None, None]
        known = torch.einsum("bhk,bhkv->bhv", k[:, at], state)
        new = (v[:, at] - known) * beta[:, at, :, None]
        state = state + k[:, at, ..., None] * new[..., None, :]
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, at], state) * q.shape[3] ** -0.5)
    return torch.stack(outputs, 1), None


def install(patch: pytest.MonkeyPatch, convolution: Callable[..., Any] | None, rule: Callable[..., Any] | None) -> None:
    """As if these packages had been there when transformers was imported; None for one that is not."""
    families = [import_module(f"transformers.models.{family}.modeling_{family}") for family in FAMILIES]
    fla, parts = ModuleType("fla"), ("ops", "gated_delta_rule")
    module = fla
    for depth, part in enumerate(parts):
        child = ModuleType(".".join(("fla", *parts[: depth + 1])))
        setattr(module, part, child)
        module = child
        patch.setitem(sys.modules, child.__name__, child)
    patch.setitem(sys.modules, "fla", fla)
    other = ModuleType("causal_conv1d")
    patch.setitem(sys.modules, "causal_conv1d", other)
    for where, name, found in ((module, "chunk_gated_delta_rule", rule), (other, "causal_conv1d_fn", convolution)):
        if found is not None:
            setattr(where, name, found)
    for code in families:
        for attribute, name, package in (
            ("torch_chunk_gated_delta_rule", "chunk_gated_delta_rule", "fla"),
            ("causal_conv1d_fn", "causal_conv1d_fn", "causal_conv1d"),
        ):
            if hasattr(code, attribute):
                own = getattr(code, attribute).__wrapped__
                patch.setattr(code, attribute, use_kernel_func_from_hub_with_fallback(name, package)(own))
