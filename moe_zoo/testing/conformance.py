"""Is a family what transformers says it is, and the same in every layout? One line per family asks.

    test_parity = parity({"qwen3_moe": [{"num_experts": 5, "num_experts_per_tok": 2}]})

Parity: logits, every gradient, generation with a cache, and what is saved loads there bit for bit.
Layouts: the certificate of a recipe with the family's tiny model.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from moe_zoo.models.causal_lm import MoeZooForCausalLM
from moe_zoo.models.families import FAMILIES
from moe_zoo.models.hub import load
from moe_zoo.models.mapping import UpstreamWeights
from moe_zoo.models.saving import family_that_fits
from moe_zoo.models.weight_files import WeightFiles
from moe_zoo.spec.accounting import num_parameters

LOGITS, GRADIENTS = 1e-5, 1e-4  # of the largest entry, in fp32
SMALL_GRADIENT = 1e-3  # of the model's largest: what should be zero is not measured by its own size
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
WITHOUT_HEAD_DIM = ("qwen2_moe", "olmoe", "deepseek_v2", "deepseek_v3", "granitemoe", "granitemoeshared", "phimoe")
Cases = dict[str, list[dict[str, Any]]]  # model_type -> values of tiny configurations, over ``SMALL``


class Reference(NamedTuple):
    """A random model of transformers, and how its folder is written: where the family is not in transformers, renamed."""

    model: PreTrainedModel
    write: Callable[[Path], None]
    is_in_transformers: bool = True


class Parity(NamedTuple):
    """What was measured, relative to the largest entry."""

    logits: float
    gradients: float


def make_reference(model_type: str, values: dict[str, Any]) -> Reference:
    """transformers' model of that configuration, every parameter random, biases of the selection included."""
    values = SMALL | values
    if model_type in WITHOUT_HEAD_DIM:
        values.pop("head_dim", None)
    config = AutoConfig.for_model(model_type, **values)
    model = randomized(AutoModelForCausalLM.from_config(config, attn_implementation="eager"))
    return Reference(model, model.save_pretrained)


@torch.no_grad()
def randomized(model: PreTrainedModel) -> PreTrainedModel:
    """Every parameter and buffer drawn, norms about one; for evaluation."""
    generator = torch.Generator().manual_seed(3)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "inv_freq" not in name:
            tensor.normal_(std=0.3, generator=generator).add_(1.0 if "norm" in name and "bias" not in name else 0.0)
    for module in model.modules():
        if getattr(module, "zero_expert_num", 0):  # LongCat's matrices that nobody reads, which we write as zeros
            module.gate_up_proj[module.num_routed_experts :] = 0
    return model.eval()


def check_family(
    model_type: str,
    values: dict[str, Any],
    folder: Path,
    make: Callable[[str, dict[str, Any]], Reference] = make_reference,
) -> Parity:
    """Parity of logits, gradients, generation and files. Raises ``AssertionError`` that names what differs."""
    reference = make(model_type, values)
    reference.write(folder / "theirs")
    ours = load(folder / "theirs")
    _check_files(reference, ours, folder)
    counted = sum(param.numel() for param in ours.model.parameters())
    assert counted == num_parameters(ours.model.architecture), "arithmetic counts other parameters"
    assert family_that_fits(ours.model.architecture) or not reference.is_in_transformers, "no family fits what was read"
    _check_generation(reference.model, ours)
    return _check_numbers(reference, ours, folder / "gradients")


def parity(cases: Cases, make: Callable[[str, dict[str, Any]], Reference] = make_reference) -> Callable[..., None]:
    """A pytest test of every case."""
    import pytest

    params = [
        pytest.param(family, case, id=f"{family}-{n}") for family in cases for n, case in enumerate(cases[family])
    ]

    @pytest.mark.parametrize(("model_type", "values"), params)
    def test(model_type: str, values: dict[str, Any], tmp_path: Path) -> None:
        check_family(model_type, values, tmp_path, make)

    return test


def check_layouts(
    model_type: str,
    values: dict[str, Any],
    factors: Sequence[str] | None = None,
    ranks: int = 2,
    **parallel: Any,
) -> None:
    """The certificate of the family's tiny model: every layout of ``factors`` takes the steps of one process.

    ``parallel`` is the recipe's own layout, which the factor ``combination`` takes.
    """
    from moe_zoo.certify import certify
    from moe_zoo.certify.certificate import why
    from moe_zoo.certify.crew import Crew

    found = certify(family_recipe(model_type, values, **parallel), Crew(ranks), factors)
    assert not found.failures, f"{model_type}: " + "; ".join(f"{r.name}: {why(r)}" for r in found.failures)
    assert any(result.status == "equal" for result in found.results), found.verdict


def family_recipe(model_type: str, values: dict[str, Any], **parallel: Any) -> Any:
    """A recipe that trains the family's tiny model."""
    from moe_zoo.spec.recipe import Recipe

    family, values = FAMILIES[model_type], SMALL | values
    if model_type in WITHOUT_HEAD_DIM:
        values.pop("head_dim", None)
    architecture = family.read(family.make_config(values))
    is_biased = architecture.moe is not None and architecture.moe.router.selection_bias
    return Recipe.from_dict(
        {
            "name": model_type,
            "model": architecture.to_dict(),
            "data": {"path": "none", "tokenizer": "none", "seq_len": 16},
            "train": {"steps": 3, "global_batch": 8},
            "optim": {"lr": 1e-2},
            "balance": {
                "method": "bias" if is_biased else "aux_loss" if architecture.moe else "none",
                "z_coefficient": 0.01,
            },
            "parallel": parallel,
            "log": {"wandb": "off"},
        }
    )


def _check_numbers(reference: Reference, ours: MoeZooForCausalLM, folder: Path) -> Parity:
    model = reference.model
    vocab_size = model.config.vocab_size
    ids = torch.randint(2, vocab_size, (2, 40), generator=torch.Generator().manual_seed(5))
    weights = torch.randn(2, 40, vocab_size, generator=torch.Generator().manual_seed(6))
    expected, found = model(ids).logits, ours(ids).logits
    logits = _error(found, expected)
    assert logits <= LOGITS, f"logits are off by {logits:.1e} of the largest"
    (expected * weights).sum().backward()
    (found * weights).sum().backward()
    with torch.no_grad():  # gradients written as if they were weights: then both go by the names of the files
        for param in model.parameters():
            param.copy_(param.grad if param.grad is not None else torch.zeros_like(param))
    reference.write(folder)
    family = FAMILIES[ours.config.upstream["model_type"]]
    theirs = UpstreamWeights(family, ours.model.architecture, WeightFiles(folder))
    expected = {name: theirs.values(name) for name, _ in ours.model.named_parameters()}
    least = SMALL_GRADIENT * max(values.abs().max().item() for values in expected.values())
    errors = {name: _error(param.grad, expected[name], least) for name, param in ours.model.named_parameters()}
    worst = max(errors, key=lambda name: errors[name])
    assert errors[worst] <= GRADIENTS, f"gradient of {worst} is off by {errors[worst]:.1e} of its largest"
    return Parity(logits, errors[worst])


def _error(found: Tensor, expected: Tensor, least: float = 0.0) -> float:
    assert found.shape == expected.shape, (found.shape, expected.shape)
    return (found - expected).abs().max().item() / max(expected.abs().max().item(), least)


def _check_generation(model: PreTrainedModel, ours: MoeZooForCausalLM) -> None:
    ids = torch.randint(2, model.config.vocab_size, (2, 9), generator=torch.Generator().manual_seed(7))
    how = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    assert torch.equal(ours.generate(ids, **how), model.generate(ids, **how)), "other tokens are generated"
    longer = torch.cat((ids, ids.flip(1)), dim=1)
    cached = ours(longer[:, :11], use_cache=True)
    rest = ours(longer[:, 11:], past_key_values=cached.past_key_values).logits
    error = _error(torch.cat((cached.logits, rest), dim=1), ours(longer).logits)
    assert error <= LOGITS, f"logits continued from a cache are off by {error:.1e}"


def _check_files(reference: Reference, ours: MoeZooForCausalLM, folder: Path) -> None:
    ours.save_pretrained(folder / "ours")
    before, after = (_tensors(folder / name) for name in ("theirs", "ours"))
    assert before.keys() == after.keys(), f"names differ: {sorted(before.keys() ^ after.keys())[:4]}"
    for name, values in before.items():
        assert torch.equal(after[name], values), f"{name} is not what was loaded"
    again = load(folder / "ours")
    assert again.model.architecture == ours.model.architecture, "the configuration that was written reads otherwise"
    if not reference.is_in_transformers:
        return
    model, told = AutoModelForCausalLM.from_pretrained(
        folder / "ours", output_loading_info=True, attn_implementation="eager", dtype=torch.float32
    )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not told[kind], f"{kind} where transformers loads what we saved: {told[kind]}"
    expected = reference.model.state_dict()
    for name, values in model.state_dict().items():
        assert torch.equal(values, expected[name]), f"{name} is another where transformers loads what we saved"
    ids = torch.randint(2, model.config.vocab_size, (1, 24), generator=torch.Generator().manual_seed(8))
    error = _error(model(ids).logits, reference.model(ids).logits)  # sums depend on where memory lies
    assert error <= LOGITS, f"logits are off by {error:.1e} where transformers loads what we saved"


def _tensors(folder: Path) -> dict[str, Tensor]:
    return {name: values for file in folder.glob("*.safetensors") for name, values in load_file(file).items()}


def write_renamed(
    model: PreTrainedModel, folder: Path, rename: Callable[[dict[str, Tensor]], dict[str, Tensor]]
) -> None:
    """The folder of a family that transformers does not have, from the weights of one that it has. No config.json."""
    model.save_pretrained(folder)
    tensors = rename(_tensors(folder))
    for file in [*folder.glob("*.safetensors*"), folder / "config.json"]:
        file.unlink()
    save_file({name: values.contiguous() for name, values in tensors.items()}, folder / "model.safetensors")
