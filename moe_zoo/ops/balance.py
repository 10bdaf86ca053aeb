"""The auxiliary losses of routing, written so that they are exact in every layout.

The balance loss of one pool of N tokens is ``E * sum_e f_e * P_e`` with ``f_e = counts_e / (N K)`` and
``P_e = prob_sums_e / N`` (Switch, arXiv:2101.03961, eqs. 4-6). It is linear in ``prob_sums``: once the counts of the
whole pool are known, each rank multiplies its own ``prob_sums`` by a constant, and the sum over ranks is the loss.
Per layer first, then the mean over layers and pools: pooling layers before the product would call a model balanced
whose every layer had collapsed onto another expert.

Letters: L layers, B rows on this rank, E experts.
"""

from torch import Tensor

SCOPES = ("sequence", "micro_batch", "global_batch")


def pool_tokens(scope: str, seq_len: int, global_rows: int, micro_batches: int) -> int:
    """Tokens per pool: a row, a micro-batch over all ranks, or the whole global batch."""
    rows = {"sequence": 1, "micro_batch": global_rows // micro_batches, "global_batch": global_rows}[scope]
    return rows * seq_len


def balance_loss(
    prob_sums_LBE: Tensor,
    pooled_counts_LBE: Tensor,
    *,
    pool_tokens: int,
    total_tokens: int,
    slots_per_token: float,
    num_layers: int,
) -> Tensor:
    """This rank's share of the global batch's balance loss; 1.0 in sum over micro-batches and ranks if all is even.

    ``pooled_counts_LBE``: for each local row the counts of its pool, (L, B or 1, E). ``num_layers``: sparse layers of
    the whole model, of which L are here.
    """
    num_experts = prob_sums_LBE.shape[-1]
    slope_LBE = pooled_counts_LBE * (num_experts / (num_layers * total_tokens * pool_tokens * slots_per_token))
    return (slope_LBE * prob_sums_LBE).sum()


def z_loss(z_sums_LB: Tensor, *, total_tokens: int, num_layers: int) -> Tensor:
    """This rank's share of the mean squared log-partition. Source: ST-MoE, arXiv:2202.08906, eq. 5."""
    return z_sums_LB.sum() / (num_layers * total_tokens)


def bias_step(counts_LE: Tensor, rate: float) -> Tensor:
    """How the selection bias moves after a step: up where an expert got too little, (L, E), fp32.

    Experts without weights count for the mean and stay where they are (LongCat-Flash, arXiv:2509.01322: with an even
    share of all choices as what an expert with weights is to get). Source: Wang et al., arXiv:2408.15664, algorithm 1.
    """
    counts_LE = counts_LE.float()
    return rate * (counts_LE.mean(-1, keepdim=True) - counts_LE).sign()
