"""Grouped-query attention with rotary positions. Letters: B batch, S queries, H heads, d head width."""

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_zoo.layers.norm import AllHeadsNorm
from moe_zoo.ops.attention import attend
from moe_zoo.ops.rope import Places, pair_up, rotate
from moe_zoo.spec.attention import AttentionSpec

Attend = Callable[..., Tensor]  # (queries, keys, values, mask, **how) as ops.attention.attend


class KeyValueCache(Protocol):
    """What attention asks of a cache; transformers' caches satisfy it."""

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]: ...


class GroupedQueryAttention(nn.Module):
    """``num_heads / num_kv_heads`` query heads share a key and value head. Source: arXiv:2305.13245.

    ``moe_zoo.parallel`` gives it some of the heads, and another ``attend`` where a row is split over ranks.
    """

    attend: Attend

    def __init__(self, d_model: int, spec: AttentionSpec, *, norm_eps: float, layer: int = 0):
        super().__init__()
        self.layer, self.spec, self.norm_eps, self.attend = layer, spec, norm_eps, attend
        q, v = spec.head_dim, spec.value_width
        self.query = nn.Linear(d_model, spec.num_heads * q, bias=spec.bias)
        self.key = nn.Linear(d_model, spec.num_kv_heads * q, bias=spec.bias)
        self.value = nn.Linear(d_model, spec.num_kv_heads * v, bias=spec.bias)
        self.out = nn.Linear(spec.num_heads * v, d_model, bias=spec.out_bias)
        self.sinks = nn.Parameter(torch.empty(spec.num_heads)) if spec.sinks else None
        self.norms_all_heads = spec.qk_norm and spec.qk_norm_over == "all"
        self.query_norm, self.key_norm = (
            _make_qk_norm(heads, q, norm_eps if spec.qk_norm else None, spec.qk_norm_over)
            for heads in (spec.num_heads, spec.num_kv_heads)
        )

    def forward(self, hidden: Tensor, places: Places, mask: Tensor | None, cache: KeyValueCache | None) -> Tensor:
        """``hidden`` (batch, seq, d_model) -> same; ``mask`` broadcasts to (batch, heads, seq, keys), None is causal."""
        spec = self.spec
        q_BHSd = self._rotated(self._normed(self.query(hidden), self.query_norm), places)
        k_BHSd = self._rotated(self._normed(self.key(hidden), self.key_norm), places)
        v_BHSd = _heads(self.value(hidden), spec.value_width)
        if places.temperature is not None:
            q_BHSd = q_BHSd * places.temperature.to(q_BHSd.dtype)
        if cache is not None:
            k_BHSd, v_BHSd = cache.update(k_BHSd, v_BHSd, self.layer)
        how = {"scale": spec.scale, "window": spec.window, "sinks_H": self.sinks, "reach_BS": places.reach}
        out_BHSd = self.attend(q_BHSd, k_BHSd, v_BHSd, mask, **how)
        if spec.value_scale != 1.0:
            out_BHSd = out_BHSd * spec.value_scale
        return self.out(out_BHSd.transpose(1, 2).flatten(2))

    def _normed(self, projected: Tensor, norm: nn.Module) -> Tensor:
        width = self.spec.head_dim
        return _heads(norm(projected), width) if self.norms_all_heads else norm(_heads(projected, width))

    def _rotated(self, x_BHSd: Tensor, places: Places) -> Tensor:
        spec = self.spec
        if spec.rope_interleaved:
            x_BHSd = pair_up(x_BHSd, spec.rotary_width)
        if spec.rotary_width:
            x_BHSd = rotate(x_BHSd, places.angles)
        return F.rms_norm(x_BHSd, x_BHSd.shape[-1:], eps=self.norm_eps) if spec.qk_unit_norm else x_BHSd


def _heads(projected: Tensor, width: int) -> Tensor:
    return projected.unflatten(-1, (-1, width)).transpose(1, 2)


def _make_qk_norm(num_heads: int, head_dim: int, eps: float | None, over: str) -> nn.Module:
    if eps is None:
        return nn.Identity()
    return nn.RMSNorm(head_dim, eps=eps) if over == "head" else AllHeadsNorm(num_heads * head_dim, eps)
