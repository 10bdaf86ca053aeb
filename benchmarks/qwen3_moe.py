"""The model of the benchmarks, shaped like Qwen3-MoE: its recipe, its weights for transformers and for us."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_zoo.spec.recipe import Recipe

LR, CLIP, AUX = 1e-3, 1.0, 0.01


class Shape(NamedTuple):
    """Model and batch."""

    vocab_size: int = 1024
    d_model: int = 256
    num_layers: int = 4
    num_heads: int = 8
    num_kv_heads: int = 4
    head_dim: int = 32
    num_experts: int = 32
    expert_width: int = 128
    top_k: int = 8
    rows: int = 8
    seq_len: int = 256

    @property
    def tokens(self) -> int:
        return self.rows * self.seq_len


def make_recipe(shape: Shape, *, micro_batches: int = 1, **parallel: Any) -> Recipe:
    """Ours of this shape; ``parallel`` are keys of that section."""
    ffn = {"d_ff": shape.expert_width, "activation": "silu", "gated": True}
    router = {"num_experts": shape.num_experts, "top_k": shape.top_k, "normalize": True}
    heads = {"num_heads": shape.num_heads, "num_kv_heads": shape.num_kv_heads, "head_dim": shape.head_dim}
    model = {
        "vocab_size": shape.vocab_size,
        "d_model": shape.d_model,
        "num_layers": shape.num_layers,
        "attention": heads | {"qk_norm": True},
        "feed_forward": ffn,
        "moe": {"router": router, "experts": ffn},
    }
    return Recipe.from_dict(
        {
            "name": "benchmark",
            "model": model,
            "data": {"path": "none", "tokenizer": "none", "seq_len": shape.seq_len},
            "train": {"steps": 1, "global_batch": shape.rows, "micro_batches": micro_batches},
            "optim": {"lr": LR, "clip": CLIP, "schedule": "constant"},
            "parallel": parallel,
            "balance": {"aux_coefficient": AUX},
            "log": {"wandb": "off"},
        }
    )


def our_names(whole: dict[str, Tensor], num_layers: int) -> dict[str, Tensor]:
    """transformers' names and orientation of stacked experts -> ours."""
    ours = {
        "embed.weight": whole["model.embed_tokens.weight"],
        "norm.weight": whole["model.norm.weight"],
        "head.weight": whole["lm_head.weight"],
    }
    renamed = {
        "attention_norm.weight": "input_layernorm.weight",
        "feed_forward_norm.weight": "post_attention_layernorm.weight",
        "feed_forward.router.weight": "mlp.gate.weight",
    }
    parts = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "o_proj"}
    parts |= {"query_norm": "q_norm", "key_norm": "k_norm"}
    renamed |= {f"attention.{ours}.weight": f"self_attn.{theirs}.weight" for ours, theirs in parts.items()}
    for layer in range(num_layers):
        theirs = f"model.layers.{layer}"
        ours |= {f"layers.{layer}.{name}": whole[f"{theirs}.{other}"] for name, other in renamed.items()}
        for name, other in (("w_up", "gate_up_proj"), ("w_down", "down_proj")):
            ours[f"layers.{layer}.feed_forward.experts.{name}"] = whole[f"{theirs}.mlp.experts.{other}"].transpose(1, 2)
    return ours


def save_checkpoint(shape: Shape, folder: Path) -> None:
    """Fresh weights as transformers saves them, and as one file of stacked tensors."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.d_model,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        num_experts=shape.num_experts,
        moe_intermediate_size=shape.expert_width,
        num_experts_per_tok=shape.top_k,
        norm_topk_prob=True,
        router_aux_loss_coef=AUX,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        use_cache=False,
    )
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config)
    model.save_pretrained(folder)
    torch.save(model.state_dict(), folder / "whole.pt")
