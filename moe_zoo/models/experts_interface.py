"""Our experts under transformers' models: ``experts_implementation="moe_zoo"``.

Letters: T tokens, K choices per token, N = T*K slots, E experts.
"""

import torch
from torch import Tensor, nn
from transformers.integrations.moe import _default_apply_gate

from moe_zoo.ops.experts import Stacks, Unit, expert_ffn, host_counts, inverse_permutation, sort_slots

NAMES = {"SiLUActivation": "silu", "SiLU": "silu", "GELUActivation": "gelu", "ReLU": "relu"}


def moe_zoo_experts(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """(T, hidden) -> same: what transformers calls in place of an experts module's forward.

    An expert index of E or more belongs to another rank: it is left out, as a slot that was dropped.
    """
    choices = top_k_index.clamp(max=self.num_experts)
    activation = _plain_activation(self)
    if activation is None:
        return _any_experts(self, hidden_states, choices, top_k_weights)
    up = self.gate_up_proj if self.has_gate else self.up_proj
    pair = (up, self.down_proj) if self.is_transposed else (up.transpose(1, 2), self.down_proj.transpose(1, 2))
    return expert_ffn(hidden_states, choices, top_k_weights, Stacks(*pair), Unit(activation, self.has_gate))


def _plain_activation(self: nn.Module) -> str | None:
    """Its name, if these are experts as ours are; None if there is more to them."""
    is_usual = self.is_concatenated and type(self)._apply_gate is _default_apply_gate
    if not is_usual or self.has_bias or self.has_post_expert_norm:
        return None
    return NAMES.get(type(self.act_fn).__name__)


def _any_experts(self: nn.Module, x_TD: Tensor, choices_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Biases, gates and norms of the module's own, on slots sorted by expert."""
    order_N, counts_E = sort_slots(choices_TK, self.num_experts)
    counts = host_counts(counts_E)
    kept = order_N[: sum(counts)]
    experts_N = choices_TK.flatten()[kept]
    up_name = "gate_up_proj" if self.has_gate else "up_proj"
    pre = _linear(self, up_name, x_TD.index_select(0, kept // choices_TK.shape[1]), counts, experts_N)
    act = self._apply_gate(pre) if self.has_gate else self.act_fn(pre)
    out = _linear(self, "down_proj", act, counts, experts_N)
    if self.has_post_expert_norm:
        out = self.post_expert_norm(out)
    out = (out * weights_TK.flatten()[kept, None]).to(x_TD.dtype)
    dropped = out.new_zeros(len(order_N) - len(kept), out.shape[1])
    slots = torch.cat((out, dropped)).index_select(0, inverse_permutation(order_N))
    return slots.view(*choices_TK.shape, -1).sum(1)


def _linear(self: nn.Module, name: str, rows: Tensor, counts: list[int], experts_N: Tensor) -> Tensor:
    """Each expert's rows through its matrix (and bias) called ``name``."""
    matrices = getattr(self, name).unbind(0)
    parts = [
        part @ (matrix if self.is_transposed else matrix.t())
        for part, matrix in zip(rows.split(counts), matrices, strict=True)
    ]
    made = torch.cat(parts)
    return made + getattr(self, f"{name}_bias")[experts_N] if self.has_bias else made
