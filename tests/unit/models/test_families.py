"""Every family equals transformers' own model: logits, every gradient, generation, and what is saved loads there.

And its tiny model takes the steps of one process in every layout.
"""

import json
import re
from pathlib import Path

import pytest
import torch

import moe_zoo
from moe_zoo.testing.conformance import SMALL, Reference, check_layouts, make_reference, parity, write_renamed

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
LLAMA4 = {
    "num_local_experts": 4,
    "intermediate_size_mlp": 28,
    "attention_chunk_size": 7,
    "no_rope_layers": [1, 0, 1],
    "floor_scale": 5,
    "attn_scale": 0.3,
}
ERNIE = {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 12}
MIMO = DEEPSEEK | {
    "v_head_dim": 6,
    "head_dim": 12,
    "num_attention_heads": 8,
    "sliding_window": 5,
    "n_shared_experts": None,
}
LONGCAT = {
    "num_layers": 2,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "head_dim": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 9,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "n_routed_experts": 5,
    "zero_expert_num": 3,
    "moe_topk": 3,
    "expert_ffn_hidden_size": 12,
    "routed_scaling_factor": 1.5,
}
CASES = {
    "longcat_flash": [
        LONGCAT,
        LONGCAT | {"zero_expert_num": 7, "moe_topk": 6, "tie_word_embeddings": True, "attention_bias": True},
        LONGCAT
        | {"zero_expert_num": 0, "num_layers": 3, "num_hidden_layers": 6}
        | {"rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 1.0}},
    ],
    "granitemoe": [
        GRANITE,
        GRANITE
        | {"attention_bias": True, "tie_word_embeddings": True, "rope_parameters": YARN, "residual_multiplier": 1},
    ],
    "phimoe": [
        {"num_local_experts": 5, "router_jitter_noise": 0.4, "attention_bias": True, "lm_head_bias": True},
        {"num_local_experts": 4, "sliding_window": 6},
    ],
    "llama4_text": [
        LLAMA4,
        LLAMA4 | {"attn_temperature_tuning": False, "use_qk_norm": False, "interleave_moe_layer_step": 2},
        LLAMA4 | {"no_rope_layers": [1, 1, 1], "attention_bias": True, "rope_parameters": LLAMA3},
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
        {"num_local_experts": 4, "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}},
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
        LATENT | DEEPSEEK | {"topk_method": "greedy", "n_shared_experts": 1, "attention_bias": True},
    ],
    "deepseek_v3": [
        LATENT | DEEPSEEK,
        LATENT | DEEPSEEK | {"q_lora_rank": None, "rope_interleave": False, "n_group": 1, "topk_group": 1},
        LATENT | DEEPSEEK | {"attention_bias": True},
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
CASES |= {
    "llama": [{}, {"rope_parameters": LLAMA3, "tie_word_embeddings": True, "num_key_value_heads": 6}],
    "mistral": [{"sliding_window": None}, {"sliding_window": 7}],
    "qwen2": [
        {"num_attention_heads": 3, "num_key_value_heads": 3},
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ],
    "qwen3": [{"tie_word_embeddings": True}, {"attention_bias": True}],
}
test_parity = parity(CASES)


def theirs(model_type: str, values: dict):
    """transformers' model, for tests of folders."""
    return make_reference(model_type, values).model


LING = {
    "architectures": ["BailingMoeV2ForCausalLM"],
    "auto_map": {"AutoModelForCausalLM": "modeling_bailing_moe_v2.BailingMoeV2ForCausalLM"},
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 6e5,
    "rope_scaling": None,
    "partial_rotary_factor": 0.5,
    "use_qk_norm": True,
    "use_qkv_bias": False,
    "use_bias": False,
    "score_function": "sigmoid",
    "moe_intermediate_size": 12,
    "num_experts": 8,
    "num_shared_experts": 1,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
}
LING_CASES = {"bailing_moe": [LING], "bailing_moe_v2": [LING | {"use_qkv_bias": True, "use_qk_norm": False}]}


def glm_as_ling(model_type: str, values: dict) -> Reference:
    """transformers has no Ling: GLM-4.5 computes the same, its weights get Ling's names."""
    values = SMALL | values
    same = SMALL.keys() | DEEPSEEK.keys() | {"rms_norm_eps", "use_qk_norm"}
    there = {key: value for key, value in values.items() if key in same} | {
        "n_routed_experts": values["num_experts"],
        "n_shared_experts": values["num_shared_experts"],
        "attention_bias": values["use_qkv_bias"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 6e5, "partial_rotary_factor": 0.5},
    }
    model = make_reference("glm4_moe", there).model

    def write(folder: Path) -> None:
        write_renamed(model, folder, ling_names)
        (folder / "config.json").write_text(json.dumps({"model_type": model_type} | values))

    return Reference(model, write, is_in_transformers=False)


def ling_names(tensors: dict) -> dict:
    renamed = {}
    for name, values in tensors.items():
        if match := re.fullmatch(r"(.*)self_attn.q_proj.(weight|bias)", name):
            before, part = match.groups()
            parts = [tensors[f"{before}self_attn.{one}_proj.{part}"] for one in "qkv"]
            renamed[f"{before}attention.query_key_value.{part}"] = torch.cat(parts)
        elif not re.search("[kv]_proj", name):
            for theirs, ours in (
                ("embed_tokens", "word_embeddings"),
                ("self_attn.o_proj", "attention.dense"),
                ("self_attn.q_norm", "attention.query_layernorm"),
                ("self_attn.k_norm", "attention.key_layernorm"),
                ("e_score_correction_bias", "expert_bias"),
            ):
                name = name.replace(theirs, ours)
            renamed[name] = values
    return renamed


test_parity_of_ling = parity(LING_CASES, glm_as_ling)


def test_the_code_of_a_family_that_transformers_has_not_stays_known(tmp_path):
    glm_as_ling("bailing_moe", LING).write(tmp_path / "theirs")
    moe_zoo.load(tmp_path / "theirs").save_pretrained(tmp_path / "ours")
    before, after = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("theirs", "ours"))
    assert {key: after[key] for key in before if key != "rope_scaling"} == {
        k: v for k, v in before.items() if k != "rope_scaling"
    }


@pytest.mark.parametrize(
    ("model_type", "parallel"), [("gpt_oss", {"tp": 2, "cp": 2}), ("qwen3_moe", {"tp": 2, "ep": 2})]
)
def test_a_combined_layout(model_type, parallel):
    check_layouts(model_type, CASES[model_type][0], ["combination"], ranks=4, **parallel)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [*CASES, "bailing_moe"])
def test_every_layout(model_type):
    check_layouts(
        model_type, (CASES | LING_CASES)[model_type][0], ["zero", "engine", "recompute", "ep", "pp", "tp", "cp", "etp"]
    )
