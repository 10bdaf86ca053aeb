"""Bugs that other systems shipped, planted in our own code on a rank: each is a context manager that changes one thing.

Where they were seen stands in the comments (GitHub issues).
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from data_pipelines import stream
from moe_zoo.engines.base import Engine
from moe_zoo.engines.deepspeed import DeepSpeedEngine
from moe_zoo.engines.fsdp import FSDPEngine
from moe_zoo.engines.objective import Objective
from moe_zoo.layers import router as router_module
from moe_zoo.layers.router import TopKRouter
from moe_zoo.parallel import context
from moe_zoo.train.checkpoint import writer
from moe_zoo.train.checkpoint.reader import Checkpoint


@contextlib.contextmanager
def changed(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """``owner.name`` becomes ``make(what it was)``."""
    before = getattr(owner, name)
    setattr(owner, name, make(before))
    try:
        yield
    finally:
        setattr(owner, name, before)


# ------------------------------------------------------------------ gradients


def expert_gradients_times_ep():  # DeepSpeed #5618, #6545
    def scaled(init):
        def new(self, placed, mesh, recipe):
            for name, param in placed.module.global_names(placed.module.named_parameters()).items():
                if placed.placements[name].kind == "ep":
                    param.register_hook(lambda grad: grad * mesh.ep)
            init(self, placed, mesh, recipe)

        return new

    return changed(Engine, "__init__", scaled)


def router_gradients_not_summed_over_tp():  # the norms and routers of a Megatron-like data-parallel group
    def unsummed(init):
        def new(self, placed, mesh, recipe):
            for name, param in placed.module.global_names(placed.module.named_parameters()).items():
                if name.endswith("router.weight"):
                    param.register_hook(lambda grad: grad * mesh.tp * (mesh.tp_rank == 0))
            init(self, placed, mesh, recipe)

        return new

    return changed(Engine, "__init__", unsummed)


def whole_gradients_not_summed():  # a missing all-reduce: every rank steps by its own rows
    def silent(window):
        @contextlib.contextmanager
        def new(self):
            own = self.named["embed.weight"]
            with window(self):
                yield
                kept = own.grad.clone() * self.factor
            own.grad.copy_(kept)

        return new

    return changed(DeepSpeedEngine, "_window", silent)


def aux_loss_scaled_by_accumulation():  # AutoModel #3359
    def scaled(routing):
        def new(self, output, scale, step_counts=None):
            added, *seen = routing(self, output, scale, step_counts)
            return added * scale.micro_batches, *seen

        return new

    return changed(Objective, "routing", scaled)


def aux_loss_detached_from_the_router():  # AutoModel #1408, #2995
    def detached(routing):
        def new(self, *args):
            added, *seen = routing(self, *args)
            return added.detach(), *seen

        return new

    return changed(Objective, "routing", detached)


# ------------------------------------------------------------------ what is averaged over what


def last_micro_batch_dropped():  # torchtitan #1733
    return changed(Engine, "backward", lambda backward: lambda self, batch: backward(self, batch[:-1] or batch))


def loss_averaged_per_rank():
    def local(scale):
        def new(self, batch):
            own = sum((micro.rows.targets != -100).sum() for micro in batch)
            return scale(self, batch)._replace(num_targets=int(own) * self.mesh.dp)

        return new

    return changed(Engine, "_scale", local)


def router_bias_from_local_counts():  # torchtitan #3686
    def local(summary):
        def new(self, scale, parts, stats, norm):
            counts = torch.zeros(len(self.recipe.model.sparse_layers), self.recipe.model.num_experts)
            counts[self.own_layers] = sum(one.counts for one in stats)
            with changed(self, "_move_bias", lambda move: lambda counts_LE: move(counts)):
                return summary(self, scale, parts, stats, norm)

        return new

    return changed(Engine, "_summary", local)


def norm_counts_replicas_twice():
    return changed(DeepSpeedEngine, "_replicas", lambda _: lambda self, name: 1)


def statistics_counted_in_forward():  # torchtitan: counters on the module, with a hack that divides by two
    counted: dict[int, torch.Tensor] = {}

    def counting(forward):
        def new(self, *args):
            routing = forward(self, *args)
            counted[self.layer] = counted.get(self.layer, 0) + routing.stats.counts.detach().sum(0)
            return routing

        return new

    def from_counters(summary):
        def new(self, scale, parts, stats, norm):
            counts = torch.stack([counted[layer] for layer in self.recipe.model.sparse_layers])
            counted.clear()
            return summary(self, scale, parts, [stats[0]._replace(counts=counts), *_uncounted(stats[1:])], norm)

        return new

    stack = contextlib.ExitStack()
    stack.enter_context(changed(TopKRouter, "forward", counting))
    stack.enter_context(changed(Engine, "_summary", from_counters))
    return stack


def _uncounted(stats):
    return [one._replace(counts=torch.zeros_like(one.counts)) for one in stats]


# ------------------------------------------------------------------ what depends on where a row lies


def jitter_from_local_rows():
    def local(noise):
        return lambda seeds, *args, **kwargs: noise(torch.arange(len(seeds)), *args, **kwargs)

    return changed(router_module, "uniform_noise", local)


def capacity_of_the_local_batch():
    def pooled(within):
        def new(experts_BSK, num_experts, capacity):
            rows = len(experts_BSK)
            whole = within(experts_BSK.flatten(0, 1)[None], num_experts, capacity * rows)
            return whole.view_as(experts_BSK)

        return new

    return changed(router_module, "within_capacity", pooled)


def documents_forgotten_in_stages():  # each stage of a pipeline makes its mask anew, from positions
    return changed(context, "document_mask", lambda _: lambda positions: None)


def ranks_cut_before_micro_batches():
    def other(init):
        def new(self, reader, order, global_batch, micro_batches, dp, dp_rank):
            init(self, reader, order, global_batch, micro_batches, dp, dp_rank)
            self.places = self.places * 0 + _ranks_first(global_batch, micro_batches, dp, dp_rank)

        return new

    return changed(stream._Share, "__init__", other)


def _ranks_first(global_batch, micro_batches, dp, dp_rank):
    return torch.arange(global_batch).view(dp, micro_batches, -1)[dp_rank].numpy()


# ------------------------------------------------------------------ checkpoints


def only_the_first_rank_saves_experts():  # KempnerForge #202, verl #2086
    def partial(chunks):
        def new(engine):
            mine = chunks(engine)
            return mine if dist.get_rank() == 0 else (chunk for chunk in mine if ".experts." not in chunk[0])

        return new

    return changed(writer, "_chunks", partial)


def every_rank_loads_the_first_experts():  # UniRL #158: 7 of 8 experts were copies
    def first(fetch):
        def new(self, placement, key, start, length):
            begins = 0 if ".experts." in placement.name else start
            return fetch(self, placement, key, begins, length)

        return new

    return changed(Checkpoint, "fetch_slice", first)


def moments_start_anew():  # DeepSpeed #8147
    def without(load):
        def new(self, fetch, num_steps):
            def weights_only(name, key, start, length):
                return fetch(name, key, start, length) * (key == "weight")

            load(self, weights_only, num_steps)

        return new

    return changed(FSDPEngine, "load", without)


# ------------------------------------------------------------------ ranks that do not come back


def one_rank_raises():
    def fail(mesh):
        raise RuntimeError("out of memory")

    return _in_expert_parallel(fail)


def one_rank_hangs():
    return _in_expert_parallel(lambda mesh: dist.recv(torch.zeros(1), src=0))


def _in_expert_parallel(act: Callable[[Any], Any]):
    def acting(init):
        def new(self, placed, mesh, recipe):
            if mesh.ep > 1 and mesh.rank == 1:
                act(mesh)
            init(self, placed, mesh, recipe)

        return new

    return changed(Engine, "__init__", acting)
