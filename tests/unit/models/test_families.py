"""Every family equals transformers' own model: logits, every gradient, generation, and what is saved loads there.

And its tiny model takes the steps of one process in every layout.
"""

import pytest

from moe_zoo.testing.conformance import check_layouts, make_reference, parity

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
GRANITE = {
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "num_attention_heads": 6,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.4,
    "logits_scaling": 6.0,
}
ERNIE = {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 12}
MIMO = DEEPSEEK | {
    "v_head_dim": 6,
    "head_dim": 12,
    "num_attention_heads": 8,
    "sliding_window": 5,
    "n_shared_experts": None,
}
CASES = {
    "granitemoe": [
        GRANITE,
        GRANITE
        | {"attention_bias": True, "tie_word_embeddings": True, "rope_parameters": YARN, "residual_multiplier": 1},
    ],
    "granitemoeshared": [GRANITE | {"shared_intermediate_size": 14}, GRANITE | {"num_key_value_heads": 1}],
    "ernie4_5_moe": [
        ERNIE,
        ERNIE | {"use_bias": True, "moe_num_shared_experts": 1, "tie_word_embeddings": False},
        ERNIE
        | {"num_hidden_layers": 6, "moe_layer_interval": 2, "moe_layer_end_index": 4, "moe_num_shared_experts": 0},
    ],
    "mimo_v2_flash": [
        MIMO,
        MIMO
        | {
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "attention_bias": True,
            "attention_value_scale": None,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 5e4, "partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3, "partial_rotary_factor": 0.34},
            },
        },
    ],
    "gpt_oss": [
        {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 7, "swiglu_limit": 1.5},
        {"num_local_experts": 4, "num_experts_per_tok": 3, "rope_parameters": YARN | {"truncate": False}}
        | {"sliding_window": 4, "attention_bias": False, "tie_word_embeddings": True},
        {"num_local_experts": 4, "num_experts_per_tok": 1, "layer_types": ["full_attention"] * 3},
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "layer_types": ["sliding_attention"] * 3,
            "sliding_window": 2,
        },
    ],
    "mixtral": [
        {"num_local_experts": 4, "sliding_window": 5},
        {"num_local_experts": 6, "num_experts_per_tok": 3, "rope_parameters": YARN},
    ],
    "qwen2_moe": [
        QWEN
        | {
            "shared_expert_intermediate_size": 6,
            "use_sliding_window": True,
            "sliding_window": 7,
            "max_window_layers": 3,
        },
        QWEN | {"shared_expert_intermediate_size": 10},
        QWEN | {"shared_expert_intermediate_size": 6, "qkv_bias": False, "norm_topk_prob": True, "head_dim": 4},
        QWEN | {"shared_expert_intermediate_size": 6, "decoder_sparse_step": 2},
    ],
    "qwen3_moe": [
        QWEN,
        QWEN | {"norm_topk_prob": True, "tie_word_embeddings": True, "rope_parameters": LLAMA3},
        QWEN | {"use_sliding_window": True, "sliding_window": 6, "attention_bias": True},
        QWEN | {"mlp_only_layers": [0, 2], "num_attention_heads": 3, "num_key_value_heads": 3},
    ],
    "olmoe": [
        {"num_experts": 6, "num_experts_per_tok": 2, "attention_bias": True},
        {"num_experts": 4, "num_experts_per_tok": 3, "norm_topk_prob": True},
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
    "dots1": [
        DEEPSEEK | {"sliding_window": 5, "max_window_layers": 1, "attention_bias": True},
        DEEPSEEK,
        DEEPSEEK | {"n_shared_experts": 1, "first_k_dense_replace": 0, "tie_word_embeddings": True},
    ],
    "minimax_m2": [
        {"num_local_experts": 6, "num_experts_per_tok": 2},
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 3,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
    ],
}
test_parity = parity(CASES)


def theirs(model_type: str, values: dict):
    """transformers' model, for tests of folders."""
    return make_reference(model_type, values).model


@pytest.mark.parametrize(
    ("model_type", "parallel"), [("gpt_oss", {"tp": 2, "cp": 2}), ("qwen3_moe", {"tp": 2, "ep": 2})]
)
def test_a_combined_layout(model_type, parallel):
    check_layouts(model_type, CASES[model_type][0], ["combination"], ranks=4, **parallel)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", CASES)
def test_every_layout(model_type):
    check_layouts(model_type, CASES[model_type][0], ["zero", "engine", "recompute", "ep", "pp", "tp", "cp", "etp"])
