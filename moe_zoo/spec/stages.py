"""Cut a model into pipeline stages of equal work, by arithmetic alone."""

from moe_zoo.spec.accounting import block_flops_per_token, head_flops_per_token
from moe_zoo.spec.architecture import Architecture


def cut_stages(architecture: Architecture, num_stages: int, seq_len: int, encoder_len: int = 0) -> list[range]:
    """The blocks of each stage, at least one: the cut whose most expensive stage is cheapest, the head counted.

    The embedding's look-up costs nothing; a stage with the head holds fewer blocks for it.
    """
    layers = range(architecture.num_layers)
    costs = [block_flops_per_token(architecture, layer, seq_len, encoder_len) for layer in layers]
    costs[-1] += head_flops_per_token(architecture, seq_len, encoder_len)
    assert num_stages <= len(costs)
    # best[n][i]: (cost of the dearest of n stages over the first i blocks, where the last of them begins)
    best = [[(sum(costs[:i]), 0) for i in range(len(costs) + 1)]]
    for stages in range(2, num_stages + 1):
        row = [(0, 0)] * (len(costs) + 1)
        for end in range(stages, len(costs) + 1):
            row[end] = min((max(best[-1][cut][0], sum(costs[cut:end])), cut) for cut in range(stages - 1, end))
        best.append(row)
    ends = [len(costs)]
    for row in reversed(best[1:]):
        ends.append(row[ends[-1]][1])
    starts = [0, *sorted(ends[1:])]
    return [range(start, end) for start, end in zip(starts, [*starts[1:], len(costs)], strict=True)]
