"""Ways to take the same optimizer step of a Qwen3-MoE model on all ranks: what ``step_time.py`` races.

A contestant is built from the folder of one checkpoint, so that all start from the same weights, and is then called
with a step's tokens, (rows, seq + 1), of which it takes its rank's rows.
"""

from abc import ABC, abstractmethod
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from benchmarks.qwen3_moe import AUX, CLIP, LR, Shape, make_recipe, our_names
from moe_zoo.comm.mesh import Mesh
from moe_zoo.engines import MicroBatch, make_engine
from moe_zoo.ops.documents import unpack_rows
from moe_zoo.parallel.build import build_model
from moe_zoo.spec.layout import resolve_layout

ADAMW = {"lr": LR, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


class Contestant(ABC):
    """Construction is collective, and so is a step. ``step`` returns nats per target of the whole batch."""

    @abstractmethod
    def __init__(self, shape: Shape, checkpoint: Path): ...

    @abstractmethod
    def step(self, tokens: Tensor) -> float: ...


# ---------------------------------------------------------------------- ours


class Ours(Contestant):
    """moe-zoo, ZeRO-3 with experts spread over both ranks."""

    engine, gather = "deepspeed", "layer"

    def __init__(self, shape: Shape, checkpoint: Path):
        world = dist.get_world_size()
        recipe = make_recipe(shape, engine=self.engine, gather=self.gather, ep=world)
        self.mesh = Mesh(resolve_layout(recipe, world, world), torch.device("cpu"))
        placed = build_model(recipe, self.mesh, seed=0)
        whole = our_names(torch.load(checkpoint / "whole.pt"), shape.num_layers)
        with torch.no_grad():
            for name, param in placed.module.global_names(placed.module.named_parameters()).items():
                param.copy_(placed.placements[name].take(whole.pop(name)))
        assert not whole, sorted(whole)
        self.held = make_engine(placed, self.mesh, recipe)

    def step(self, tokens: Tensor) -> float:
        rows = unpack_rows(own_rows(tokens), bos_id=-1)
        return self.held.step([MicroBatch(rows)], LR).loss


class OursGatheredOnce(Ours):
    """The same with ``parallel.gather: step``."""

    gather = "step"


class OursFSDP(Ours):
    """The same model and layout under torch's FSDP2."""

    engine = "fsdp"


# ---------------------------------------------------------------------- theirs


class AutoEP(Contestant):
    """DeepSpeed's own expert parallelism of transformers models, ZeRO-3."""

    expert_parallel = True

    def __init__(self, shape: Shape, checkpoint: Path):
        import deepspeed

        if self.expert_parallel:
            mend_record_registry()
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else a C++ extension is compiled
        from transformers import Qwen3MoeForCausalLM

        model = Qwen3MoeForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).train()
        optimizer = torch.optim.AdamW(decay_groups(model), fused=True, **ADAMW)
        config = {
            "train_micro_batch_size_per_gpu": shape.rows // dist.get_world_size(),
            "gradient_accumulation_steps": 1,
            "gradient_clipping": CLIP,
            "zero_optimization": {"stage": 3},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        if self.expert_parallel:
            ep = dist.get_world_size()
            config["expert_parallel"] = {"enabled": True, "autoep_size": ep, "preset_model": "qwen3_moe"}
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def step(self, tokens: Tensor) -> float:
        total, token = losses(self.engine, own_rows(tokens))
        self.engine.backward(total)
        self.engine.step()
        self.engine.get_global_grad_norm()
        return token


def mend_record_registry() -> None:
    """DeepSpeed 0.19.8 reads a dictionary of transformers by class names; 5.23 made it one of models.

    As installed AutoEP stops: ``_CanRecordRegistry.get() takes 2 positional arguments but 3 were given``.
    """
    from transformers.utils.output_capturing import _CanRecordRegistry as Registry

    def name(key) -> str:
        return key if isinstance(key, str) else str(key.__class__)

    Registry.get = lambda self, key, default=None: dict.get(self, name(key)) or default or {}
    Registry.__setitem__ = lambda self, key, value: dict.__setitem__(self, name(key), value)


class PlainZeRO3(AutoEP):
    """The model of transformers under DeepSpeed ZeRO-3, no expert parallelism: every rank gathers every expert."""

    expert_parallel = False


class Transformers(Contestant):
    """transformers' own expert parallelism on FSDP2."""

    def __init__(self, shape: Shape, checkpoint: Path):
        from transformers import Qwen3MoeForCausalLM
        from transformers.distributed.configuration_utils import DistributedConfig

        world = dist.get_world_size()
        config = DistributedConfig(fsdp_size=world, ep_size=world)
        self.model = Qwen3MoeForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, distributed_config=config)
        self.model.train()
        self.optimizer = torch.optim.AdamW(decay_groups(self.model), fused=True, **ADAMW)

    def step(self, tokens: Tensor) -> float:
        total, token = losses(self.model, own_rows(tokens))
        self.optimizer.zero_grad()
        total.backward()
        self._clip()
        self.optimizer.step()
        return token

    @torch.no_grad()
    def _clip(self) -> None:
        """By hand: torch's clip refuses gradients of several meshes. Shards are disjoint, so one sum is the norm."""
        grads = [param.grad.to_local() for param in self.model.parameters() if param.grad is not None]
        square = torch.stack([grad.square().sum() for grad in grads]).sum()
        dist.all_reduce(square)
        scale = (CLIP / (square.sqrt() + 1e-6)).clamp(max=1.0)
        for grad in grads:
            grad.mul_(scale)


def decay_groups(model: nn.Module) -> list[dict]:
    """Parameter groups by (decays, mesh of a DTensor): a fused step takes one mesh at a time."""
    groups: dict = {}
    for param in model.parameters():
        mesh = param.device_mesh if isinstance(param, DTensor) else None
        groups.setdefault((param.ndim > 1, mesh), []).append(param)
    return [
        {"params": params, "weight_decay": ADAMW["weight_decay"] * decays} for (decays, _), params in groups.items()
    ]


def losses(model: nn.Module, tokens: Tensor) -> tuple[Tensor, float]:
    """(what is differentiated, nats per target over the world) of transformers' model on this rank's rows."""
    targets = tokens[:, 1:].contiguous()
    output = model(input_ids=tokens[:, :-1], labels=targets, shift_labels=targets, output_router_logits=True)
    token = (output.loss - AUX * output.aux_loss).detach()
    dist.all_reduce(token)
    return output.loss, token.item() / dist.get_world_size()


def own_rows(tokens: Tensor) -> Tensor:
    """This rank's rows."""
    return tokens.chunk(dist.get_world_size())[dist.get_rank()]
