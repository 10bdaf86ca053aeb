"""Every family equals transformers' own model: logits, every gradient, generation, and what is saved loads there."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import moe_zoo
from moe_zoo.models.families import FAMILIES
from moe_zoo.models.mapping import UpstreamWeights
from moe_zoo.models.weight_files import WeightFiles

SMALL = {
    "vocab_size": 48,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 20,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}
QWEN = {"moe_intermediate_size": 12, "num_experts": 5, "num_experts_per_tok": 2}
DEEPSEEK = {
    "moe_intermediate_size": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
}
LATENT = {
    "kv_lora_rank": 8,
    "q_lora_rank": 9,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CASES = {
    "mixtral": [{"num_local_experts": 4}, {"num_local_experts": 6, "num_experts_per_tok": 3, "rope_parameters": YARN}],
    "qwen2_moe": [
        QWEN | {"shared_expert_intermediate_size": 10},
        QWEN | {"shared_expert_intermediate_size": 6, "qkv_bias": False, "norm_topk_prob": True, "head_dim": 4},
        QWEN | {"shared_expert_intermediate_size": 6, "decoder_sparse_step": 2},
    ],
    "qwen3_moe": [
        QWEN,
        QWEN | {"norm_topk_prob": True, "tie_word_embeddings": True, "rope_parameters": LLAMA3},
        QWEN | {"mlp_only_layers": [0, 2], "num_attention_heads": 3, "num_key_value_heads": 3},
    ],
    "olmoe": [
        {"num_experts": 6, "num_experts_per_tok": 2, "head_dim": 4},
        {"num_experts": 4, "num_experts_per_tok": 3, "norm_topk_prob": True, "head_dim": 4},
    ],
    "glm4_moe": [
        DEEPSEEK | {"use_qk_norm": True, "attention_bias": True},
        DEEPSEEK | {"n_group": 1, "topk_group": 1, "norm_topk_prob": False, "n_shared_experts": 1},
    ],
    "deepseek_v2": [
        LATENT | DEEPSEEK | {"topk_method": "group_limited_greedy", "q_lora_rank": None},
        LATENT | DEEPSEEK | {"topk_method": "greedy", "n_shared_experts": 1},
    ],
    "deepseek_v3": [
        LATENT | DEEPSEEK,
        LATENT | DEEPSEEK | {"q_lora_rank": None, "rope_interleave": False, "n_group": 1, "topk_group": 1},
        LATENT | DEEPSEEK | {"rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 1.0}},
    ],
    "dots1": [DEEPSEEK, DEEPSEEK | {"n_shared_experts": 1, "first_k_dense_replace": 0, "tie_word_embeddings": True}],
    "minimax_m2": [
        {"num_local_experts": 6, "num_experts_per_tok": 2},
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 3,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
    ],
}
PARAMS = [
    pytest.param(family, case, id=f"{family}-{n}") for family, cases in CASES.items() for n, case in enumerate(cases)
]


def theirs(model_type: str, values: dict):
    """transformers' model, every parameter random, biases of the selection included."""
    torch.manual_seed(3)
    values = SMALL | values
    if model_type in ("qwen2_moe", "olmoe", "deepseek_v2", "deepseek_v3"):
        values.pop("head_dim")
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **values), attn_implementation="eager")
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" not in name:
                tensor.normal_(std=0.3).add_(1.0 if "norm" in name else 0.0)
    return model.eval()


@pytest.mark.parametrize(("model_type", "values"), PARAMS)
def test_logits_gradients_and_generation_are_those_of_transformers(model_type, values, tmp_path):
    reference = theirs(model_type, values)
    reference.save_pretrained(tmp_path)
    ours = moe_zoo.load(tmp_path)
    ids = torch.randint(2, 48, (2, 40), generator=torch.Generator().manual_seed(5))
    weights = torch.randn(2, 40, 48, generator=torch.Generator().manual_seed(6))
    expected, found = reference(ids).logits, ours(ids).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())
    (expected * weights).sum().backward()
    (found * weights).sum().backward()
    tokens = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    assert torch.equal(ours.generate(ids[:, :9], **tokens), reference.generate(ids[:, :9], **tokens))
    compare_gradients(reference, ours, tmp_path / "gradients")


@torch.no_grad()
def compare_gradients(reference, ours, folder: Path) -> None:
    """transformers writes its gradients as if they were weights: then both go by the names of its files."""
    for param in reference.parameters():
        param.copy_(param.grad if param.grad is not None else torch.zeros_like(param))
    reference.save_pretrained(folder)
    theirs = UpstreamWeights(FAMILIES[reference.config.model_type], ours.model.architecture, WeightFiles(folder))
    for name, param in ours.model.named_parameters():
        expected = theirs.values(name)
        limit = 1e-4 * expected.abs().max().item() + 1e-6
        torch.testing.assert_close(param.grad, expected, rtol=0, atol=limit, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize(("model_type", "values"), PARAMS)
def test_what_is_saved_loads_there_bit_for_bit(model_type, values, tmp_path):
    reference = theirs(model_type, values)
    reference.save_pretrained(tmp_path / "theirs")
    ours = moe_zoo.load(tmp_path / "theirs")
    ours.save_pretrained(tmp_path / "ours")
    again, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", output_loading_info=True, attn_implementation="eager", dtype=torch.float32
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    expected = reference.state_dict()
    for name, values in again.state_dict().items():
        assert torch.equal(values, expected[name]), name
    ids = torch.randint(2, 48, (1, 12))
    assert torch.equal(again(ids).logits, reference(ids).logits)
