"""Experts spread over ranks: each holds some of them (ep), or some hidden units of each (etp)."""

from moe_zoo.comm.mesh import Mesh
from moe_zoo.layers.dispatch import Dispatcher, make_dispatcher
from moe_zoo.layers.experts import Experts
from moe_zoo.layers.moe import MoELayer
from moe_zoo.models.switch import Network
from moe_zoo.parallel.placement import Cut, Slices, run_margins


def expert_slices(path: str, experts: Experts, mesh: Mesh) -> Slices:
    """How this rank's experts are cut out of the whole stacks."""
    if mesh.ep * mesh.etp == 1:
        return {}
    own = Cut(0, mesh.ep, mesh.ep_rank)
    hidden = {
        "w_up": Cut(2, mesh.etp, mesh.etp_rank, blocks=1 + experts.unit.gated),
        "w_down": Cut(1, mesh.etp, mesh.etp_rank),
        "up_bias": Cut(1, mesh.etp, mesh.etp_rank, blocks=1 + experts.unit.gated),
        "down_bias": Cut(1, mesh.etp, mesh.etp_rank),  # slices are summed: each adds its run of the bias
    }
    cuts = {name: tuple(cut for cut in (own, cut) if cut.parts > 1) for name, cut in hidden.items()}
    return {f"{path}.{name}": ("ep", cut) for name, cut in cuts.items()}


def spread_experts(model: Network, mesh: Mesh) -> Slices:
    """Route through the network, in place; what becomes of the weights is returned."""
    slices: Slices = {}
    for path, layer in model.named_modules():
        if isinstance(layer, MoELayer):
            slices |= expert_slices(f"{path}.experts", layer.experts, mesh)
            if layer.experts.down_bias is not None:
                layer.experts.bias_margins = run_margins(layer.experts.down_bias.shape[1], mesh.etp, mesh.etp_rank)
            layer.dispatcher = _dispatcher(layer.router.num_experts, mesh)
    return slices


def _dispatcher(num_experts: int, mesh: Mesh) -> Dispatcher:
    kind = mesh.layout.dispatch
    if mesh.ep * mesh.etp == 1:
        return make_dispatcher("exact" if kind == "hierarchical" else kind, num_experts)
    if kind == "hierarchical":
        return make_dispatcher(kind, num_experts, inner=mesh.ep_in_node, outer=mesh.ep_across, slices=mesh.etp)
    return make_dispatcher(kind, num_experts, group=mesh.ep_group, slices=mesh.etp)
