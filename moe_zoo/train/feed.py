"""From the data stream to micro-batches on the device. The only file that reads batches of data_pipelines."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data_pipelines import TokenStream, load_tokenizer, valid_rows
from moe_zoo.comm.mesh import Mesh
from moe_zoo.engines import Engine, MicroBatch
from moe_zoo.ops.documents import unpack_rows
from moe_zoo.ops.noise import row_seeds
from moe_zoo.spec.errors import RecipeError
from moe_zoo.spec.recipe import Recipe


class Feed:
    """This rank's part of every global batch, and of the validation rows."""

    def __init__(self, recipe: Recipe, mesh: Mesh, step: int, state: dict[str, Any] | None = None):
        """Begin before optimizer step ``step``, where a checkpoint's ``state`` says the data stood."""
        train, self.device = recipe.train, mesh.device
        self.first_step, self.first_position = step, state["position"] if state else 0
        self.stream = TokenStream(
            recipe.data.path,
            seed=train.seed,
            global_batch=train.global_batch,
            micro_batches=train.micro_batches,
            dp=mesh.dp,
            dp_rank=mesh.dp_rank,
            position=self.first_position,
            cache_dir=recipe.data.cache,
        )
        self.seed, self.step = train.seed, step
        self.path, self.global_batch = recipe.data.path, train.global_batch
        self.encoder_len = recipe.data.encoder_len
        self._check(recipe)
        self.tokenizer = load_tokenizer(recipe.data.tokenizer)
        self._check_tokenizer(recipe)
        self.valid = Validation(recipe, mesh, self.stream.bos_id, self.stream.token_bytes)

    def __next__(self) -> list[MicroBatch]:
        batch = next(self.stream)
        seeds = row_seeds(self.seed, self.step, batch.rows)
        self.step += 1
        return [
            MicroBatch(self._unpack(tokens), torch.from_numpy(ids).to(self.device))
            for tokens, ids in zip(batch.tokens, seeds, strict=True)
        ]

    def state_after(self, step: int) -> dict[str, Any]:
        """Where the data stands after optimizer step ``step``, which may be a batch behind what was read."""
        position = self.first_position + (step - self.first_step) * self.global_batch
        return {"path": self.path, "fingerprint": self.stream.fingerprint, "position": position}

    def close(self) -> None:
        """Stop reading ahead."""
        self.stream.close()

    def _unpack(self, tokens: np.ndarray):
        return unpack_rows(torch.from_numpy(tokens).to(self.device), self.stream.bos_id, self.encoder_len)

    def _check(self, recipe: Recipe) -> None:
        path, wanted = recipe.data.path, recipe.data.seq_len
        if self.stream.seq_len != wanted:
            raise RecipeError(
                f"data.seq_len: {wanted}; {path} was prepared for {self.stream.seq_len}; set it so, or prepare another "
                f"folder"
            )
        if self.stream.vocab_size > recipe.model.vocab_size:
            raise RecipeError(
                f"model.vocab_size: {recipe.model.vocab_size}; the data in {path} has {self.stream.vocab_size} tokens; "
                f"raise it to that"
            )

    def _check_tokenizer(self, recipe: Recipe) -> None:
        ours = (self.tokenizer.vocab_size, self.tokenizer.bos_id, self.tokenizer.eos_id)
        theirs = (self.stream.vocab_size, self.stream.bos_id, self.stream.eos_id)
        if ours != theirs:
            raise RecipeError(
                f"data.tokenizer: {recipe.data.tokenizer}; its size, bos and eos are {ours}, those of {recipe.data.path} "
                f"are {theirs}; set it to the tokenizer that the data was prepared with"
            )


class Validation:
    """The same rows every time, dealt out to the ranks; the last forward of a rank may hold padding."""

    def __init__(self, recipe: Recipe, mesh: Mesh, bos_id: int, token_bytes: np.ndarray):
        rows = valid_rows(recipe.data.path, limit=recipe.train.eval_rows)
        self.encoder_len = recipe.data.encoder_len
        targets = rows[:, (self.encoder_len or 0) + 1 :]
        self.num_bytes = int(token_bytes[targets[targets != bos_id]].sum())
        self.mesh, self.bos_id = mesh, bos_id
        self.rows_per_forward = recipe.train.global_batch // recipe.train.micro_batches // mesh.dp
        per_round = self.rows_per_forward * mesh.dp
        missing = -len(rows) % per_round
        padding = np.full((missing, rows.shape[1]), bos_id, rows.dtype)  # a row of bos has no target
        self.rows = np.concatenate((rows, padding)).reshape(-1, mesh.dp, self.rows_per_forward, rows.shape[1])

    def __iter__(self) -> Iterator[Tensor]:
        for rows in self.rows[:, self.mesh.dp_rank]:
            yield torch.from_numpy(rows).to(self.mesh.device)

    def measure(self, engine: Engine) -> dict[str, float]:
        """Validation loss in nats per token and in bits per byte of text."""
        sums = [engine.evaluate(unpack_rows(rows, self.bos_id, self.encoder_len)) for rows in self]
        nats, targets = (sum(values) for values in zip(*sums, strict=True))
        return {"valid/loss": nats / targets, "valid/bits_per_byte": nats / math.log(2) / self.num_bytes}
