"""Multi-head latent attention. Letters: B batch, S queries, H heads, n and r entries of a head, d = n + r."""

import torch
from torch import Tensor, nn

from moe_zoo.layers.attention import Attend, KeyValueCache
from moe_zoo.ops.attention import attend
from moe_zoo.ops.rope import Places, pair_up, rotate
from moe_zoo.spec.attention import LatentAttentionSpec


class LatentAttention(nn.Module):
    """Keys and values from one narrow vector per token. Source: DeepSeek-V2, arXiv:2405.04434, eqs. 9-19.

    A cache holds the narrow vector and the shared rotated key. ``moe_zoo.parallel`` gives it some of the heads, and
    another ``attend`` where a row is split over ranks.
    """

    attend: Attend

    def __init__(self, d_model: int, spec: LatentAttentionSpec, *, layer: int):
        super().__init__()
        self.layer, self.spec, self.attend = layer, spec, attend
        width = spec.num_heads * spec.head_dim
        self.query_down = nn.Linear(d_model, spec.query_rank, bias=spec.bias) if spec.query_rank else None
        self.query_norm = nn.RMSNorm(spec.query_rank, eps=spec.norm_eps) if spec.query_rank else None
        self.query = nn.Linear(spec.query_rank or d_model, width, bias=False)
        self.latent = nn.Linear(d_model, spec.kv_rank + spec.rope_dim, bias=spec.bias)
        self.latent_norm = nn.RMSNorm(spec.kv_rank, eps=spec.norm_eps)
        self.key_value = nn.Linear(spec.kv_rank, spec.num_heads * (spec.nope_dim + spec.value_dim), bias=False)
        self.out = nn.Linear(spec.num_heads * spec.value_dim, d_model, bias=spec.bias)
        scaling = spec.rope_scaling
        self.query_gain = (d_model / spec.query_rank) ** 0.5 if spec.scales_ranks and spec.query_rank else 1.0
        self.latent_gain = (d_model / spec.kv_rank) ** 0.5 if spec.scales_ranks else 1.0
        self.scale = spec.head_dim**-0.5 * (scaling.score_factor if scaling else 1.0)

    def forward(self, hidden: Tensor, places: Places, mask: Tensor | None, cache: KeyValueCache | None) -> Tensor:
        """``hidden`` (batch, seq, d_model) -> same; ``mask`` broadcasts to (batch, heads, seq, keys), None is causal."""
        spec, angles = self.spec, places.angles
        narrow = hidden if self.query_down is None else self.query_norm(self.query_down(hidden))
        narrow = narrow if self.query_gain == 1.0 else narrow * self.query_gain
        q_BHSn, q_BHSr = self._heads(self.query(narrow), spec.head_dim).split((spec.nope_dim, spec.rope_dim), dim=-1)
        latent, shared_key = self.latent(hidden).split((spec.kv_rank, spec.rope_dim), dim=-1)
        latent, k_B1Sr = self.latent_norm(latent)[:, None], self._rotated(shared_key[:, None], angles)
        latent = latent if self.latent_gain == 1.0 else latent * self.latent_gain
        if cache is not None:
            latent, k_B1Sr = cache.update(latent, k_B1Sr, self.layer)
        key_value = self._heads(self.key_value(latent[:, 0]), spec.nope_dim + spec.value_dim)
        k_BHSn, v_BHSd = key_value.split((spec.nope_dim, spec.value_dim), dim=-1)
        q_BHSd = torch.cat((q_BHSn, self._rotated(q_BHSr, angles)), dim=-1)
        k_BHSd = torch.cat((k_BHSn, k_B1Sr.expand(*k_BHSn.shape[:3], -1)), dim=-1)
        out_BHSd = self.attend(q_BHSd, k_BHSd, v_BHSd, mask, scale=self.scale)
        return self.out(out_BHSd.transpose(1, 2).flatten(2))

    def _rotated(self, x_BHSr: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        return rotate(pair_up(x_BHSr, self.spec.rope_dim) if self.spec.rope_interleaved else x_BHSr, angles)

    @staticmethod
    def _heads(projected: Tensor, width: int) -> Tensor:
        return projected.unflatten(-1, (-1, width)).transpose(1, 2)
