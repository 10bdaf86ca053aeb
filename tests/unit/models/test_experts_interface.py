"""``experts_implementation="moe_zoo"`` gives transformers' models the outputs and gradients of their own experts."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import moe_zoo  # noqa: F401  registers it
from moe_zoo.models.experts_interface import moe_zoo_experts
from tests.unit.models.test_families import DEEPSEEK, LATENT, QWEN, SMALL

CASES = {  # plain, latent, biased and interleaved, without a gate
    "qwen3_moe": QWEN,
    "deepseek_v3": DEEPSEEK | LATENT,
    "gpt_oss": {"num_local_experts": 5, "num_experts_per_tok": 2, "layer_types": ["sliding_attention"] * 3},
    "mixtral": {"num_local_experts": 4, "hidden_act": "gelu"},
}


def model_of(model_type: str, implementation: str):
    torch.manual_seed(4)
    values = SMALL | CASES[model_type]
    if model_type == "deepseek_v3":
        values.pop("head_dim")
    config = AutoConfig.for_model(model_type, **values)
    model = AutoModelForCausalLM.from_config(config, experts_implementation=implementation)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.normal_(std=0.3)
    return model


@pytest.mark.parametrize("model_type", CASES)
def test_outputs_and_gradients(model_type):
    ids = torch.randint(2, 48, (2, 16), generator=torch.Generator().manual_seed(5))
    theirs, ours = (model_of(model_type, kind) for kind in ("eager", "moe_zoo"))
    ours.load_state_dict(theirs.state_dict())
    expected, found = (model(ids).logits for model in (theirs, ours))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())
    expected.square().sum().backward()
    found.square().sum().backward()
    for (name, param), other in zip(theirs.named_parameters(), ours.parameters(), strict=True):
        assert (param.grad is None) == (other.grad is None), name
        if param.grad is not None:
            limit = 1e-4 * param.grad.abs().max().item() + 1e-6
            torch.testing.assert_close(other.grad, param.grad, rtol=0, atol=limit, msg=lambda t, n=name: f"{n}: {t}")


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_slots_of_other_ranks_are_left_out(model_type):
    experts = model_of(model_type, "moe_zoo").model.layers[0].mlp.experts
    hidden, weights = torch.randn(6, SMALL["hidden_size"]), torch.rand(6, 2)
    inside, both = torch.zeros(6, 2, dtype=torch.int64), torch.zeros(6, 2, dtype=torch.int64)
    both[:, 1] = experts.num_experts + 3
    inside[:, 1] = 1
    with torch.no_grad():
        found = moe_zoo_experts(experts, hidden, both, weights)
        expected = moe_zoo_experts(experts, hidden, inside, weights * torch.tensor([1.0, 0.0]))
    torch.testing.assert_close(found, expected)
