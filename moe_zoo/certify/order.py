"""The order of the data: whatever the layout, micro-batch m of a step is the same set of rows."""

import io
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from xxhash import xxh3_128_hexdigest

from data_pipelines import ShardIndex, TokenStream
from data_pipelines.shards import TOKEN_BYTES, encode_shard
from moe_zoo.certify.factors import PASSES
from moe_zoo.certify.measure import Deviation
from moe_zoo.certify.problem import BOS, layout_of
from moe_zoo.comm.mesh import Mesh
from moe_zoo.ops.noise import row_seeds
from moe_zoo.spec.recipe import Recipe

NUM_ROWS, ROWS_PER_BLOCK, BLOCKS_PER_SHARD, VOCAB = 41, 1, 15, 32  # odd on purpose: a short window, a short shard
STEPS, RESUMED_AT = 6, 4  # together more rows than there are: batches cross into the next epoch
Rows = dict[tuple[int, int], dict[int, tuple]]  # (step, micro-batch) -> place in the global batch -> what is read


def write_rows(folder: Path, seq_len: int) -> None:
    """A prepared split of random rows."""
    generator = np.random.default_rng(0)
    rows = generator.integers(BOS + 1, VOCAB, (NUM_ROWS, seq_len + 1)).astype("<u2")
    step, shards = ROWS_PER_BLOCK * BLOCKS_PER_SHARD, []
    (folder / "train").mkdir(parents=True)
    for number, first in enumerate(range(0, NUM_ROWS, step)):
        shard, data = encode_shard(f"shard-{number:05d}.bin", rows[first : first + step], ROWS_PER_BLOCK)
        (folder / "train" / shard.name).write_bytes(data)
        shards.append(shard)
    buffer = io.BytesIO()
    np.save(buffer, np.ones(VOCAB, np.int64))
    (folder / TOKEN_BYTES).write_bytes(buffer.getvalue())
    index = ShardIndex(
        dtype="<u2",
        seq_len=seq_len,
        vocab_size=VOCAB,
        bos_id=BOS,
        eos_id=0,
        num_rows=NUM_ROWS,
        num_tokens=NUM_ROWS * seq_len,
        num_bytes=NUM_ROWS * seq_len,
        rows_per_block=ROWS_PER_BLOCK,
        blocks_per_shard=BLOCKS_PER_SHARD,
        fingerprint="certificate",
        token_bytes_digest=xxh3_128_hexdigest(buffer.getvalue()),
        shards=shards,
    )
    (folder / "train" / "index.json").write_bytes(index.to_json())


def same_rows(recipe: Recipe, folder: Path) -> list[Deviation]:
    """What all ranks read together, in every split over ranks, against what one reader reads. Collective."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = Mesh(layout_of(recipe, world), torch.device("cpu"))
    splits = {
        f"dp {dp}": (dp, rank % dp) for dp in range(1, world + 1) if recipe.train.global_batch % (PASSES * dp) == 0
    }
    splits["the recipe's layout"] = (mesh.dp, mesh.dp_rank)
    whole, found = _read(recipe, folder, 1, 0, 0), []
    for name, (dp, dp_rank) in splits.items():
        for begin in (0, RESUMED_AT):
            together = _together(_read(recipe, folder, dp, dp_rank, begin))
            expected = {key: rows for key, rows in whole.items() if key[0] >= begin}
            found += _differences(name + (", resumed" if begin else ""), together, expected)
    return found


def _read(recipe: Recipe, folder: Path, dp: int, dp_rank: int, begin: int) -> Rows:
    """The rows of one rank from step ``begin`` on, with the seeds of their jitter."""
    train, rows = recipe.train, {}
    sizes = {"global_batch": train.global_batch, "micro_batches": PASSES, "position": begin * train.global_batch}
    stream = TokenStream(folder, seed=train.seed, dp=dp, dp_rank=dp_rank, **sizes)
    for step in range(begin, STEPS):
        batch = next(stream)
        seeds = row_seeds(train.seed, step, batch.rows)
        for micro in range(PASSES):
            read = zip(batch.rows[micro].tolist(), batch.tokens[micro].tolist(), seeds[micro].tolist(), strict=True)
            rows[step, micro] = {place: (tuple(tokens), seed) for place, tokens, seed in read}
    stream.close()
    return rows


def _together(own: Rows) -> Rows:
    everybody: list[Rows] = [{}] * dist.get_world_size()
    dist.all_gather_object(everybody, own)
    return {key: {place: row for rows in everybody for place, row in rows[key].items()} for key in own}


def _differences(name: str, together: Rows, expected: Rows) -> list[Deviation]:
    """The share of rows that are not where one reader finds them, the worst micro-batch of each step."""
    found = []
    for (step, micro), rows in expected.items():
        read = together[step, micro]
        wrong = sum(read.get(place) != rows.get(place) for place in read.keys() | rows.keys())
        found.append(Deviation("order", f"micro-batch {micro} under {name}", step + 1, wrong / len(rows)))
    return found
