"""The safetensors of a folder, read one tensor at a time, quantised ones as the numbers that they stand for."""

import json
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from moe_zoo.models.quantised import from_fp8_blocks, from_mxfp4
from moe_zoo.spec.errors import CheckpointError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FP8_SCALE, MX_BLOCKS, MX_SCALES = "_scale_inv", "_blocks", "_scales"
FP8_BLOCK = (128, 128)
MOST_OPEN = 2
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class WeightFiles:
    """All tensors of a folder. Raises ``CheckpointError`` that names file and tensor.

    Two files are open at a time: what is mapped of a checkpoint counts as memory of the process on some systems.
    """

    def __init__(self, folder: Path):
        self.folder, self.seen = folder, set()
        self.quantised_as = torch.float32  # what FP8 and MXFP4 weights come as
        self.open_files: dict[str, Any] = {}
        self.file_of = self._index()

    def read(self, name: str, entries: range | None = None) -> Tensor:
        """A tensor, or ``entries`` of its first dimension alone. FP8 and MXFP4 weights come as ``quantised_as``."""
        if name + MX_BLOCKS in self.file_of:
            # As gpt-oss has it: (experts, outputs, inputs) when unpacked, and inputs first where it is not packed.
            blocks, scales = (self._stored(name + end, entries) for end in (MX_BLOCKS, MX_SCALES))
            return from_mxfp4(blocks, scales).transpose(-1, -2).to(self.quantised_as)
        values = self._stored(name, entries)
        if values.dtype not in FP8:
            return values
        if entries is not None or values.dim() != 2:
            raise CheckpointError(
                f"{self.folder}: {name}; FP8 of shape {tuple(values.shape)}; moe-zoo reads FP8 matrices with a scale per "
                f"block, one tensor each; convert the checkpoint to bf16"
            )
        return self._unscaled(name, values).to(self.quantised_as)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor, which is not read."""
        return tuple(self._asked(name, lambda file: file.get_slice(name).get_shape()))

    def __contains__(self, name: str) -> bool:
        return name in self.file_of or name + MX_BLOCKS in self.file_of

    def where(self, name: str) -> str:
        """The file that holds a tensor, and the tensor."""
        stored = next((full for full in (name, name + MX_BLOCKS) if full in self.file_of), None)
        return f"{self.folder / self.file_of[stored]}: {stored}" if stored else f"{self.folder}: {name}"

    def unused(self) -> list[str]:
        """Tensors that nobody has read."""
        return sorted(self.file_of.keys() - self.seen)

    @cached_property
    def fp8_block(self) -> tuple[int, int]:
        """Rows and columns that share a scale."""
        config = json.loads((self.folder / "config.json").read_text(encoding="utf-8"))
        block = (config.get("quantization_config") or {}).get("weight_block_size") or FP8_BLOCK
        if not isinstance(block, list | tuple) or [type(size) for size in block] != [int, int]:
            raise CheckpointError(
                f"{self.folder / 'config.json'}: weight_block_size: {block}; FP8 has a scale per block of rows and columns; "
                f"give two numbers, as [128, 128]"
            )
        return block[0], block[1]

    def _unscaled(self, name: str, values: Tensor) -> Tensor:
        scales, block = self._stored(name + FP8_SCALE), self.fp8_block
        expected = tuple(-(-size // width) for size, width in zip(values.shape, block, strict=True))
        if tuple(scales.shape) != expected:
            raise CheckpointError(
                f"{self.folder}: {name + FP8_SCALE}; shape {tuple(scales.shape)}; a weight of {tuple(values.shape)} in "
                f"blocks of {block} has {expected} scales; config.json's weight_block_size or the file is wrong"
            )
        return from_fp8_blocks(values, scales, block)

    def _stored(self, name: str, entries: range | None = None) -> Tensor:
        def read(file: Any) -> Tensor:
            return file.get_tensor(name) if entries is None else file.get_slice(name)[entries.start : entries.stop]

        values: Tensor = self._asked(name, read)
        self.seen.add(name)
        return values

    def _asked(self, name: str, ask: Callable[[Any], Any]) -> Any:
        """What ``ask`` gets of the file that holds a tensor."""
        if name not in self.file_of:
            raise CheckpointError(
                f"{self.folder}: {name}; no file of the folder has it; the download is incomplete or another model's"
            )
        path = self.folder / self.file_of[name]
        try:
            return ask(self._opened(self.file_of[name]))
        except (SafetensorError, OSError) as error:
            reason = " ".join(str(error).split())
            raise CheckpointError(f"{path}: {name}; {reason}; fetch the file again") from None

    def _opened(self, name: str) -> Any:
        file = self.open_files.pop(name, None)
        if file is None:
            while len(self.open_files) >= MOST_OPEN:  # closed before the next one opens
                del self.open_files[next(iter(self.open_files))]
            file = safe_open(self.folder / name, "pt")
        self.open_files[name] = file  # behind those that were asked for longer ago
        return file

    def _index(self) -> dict[str, str]:
        if (self.folder / SINGLE).is_file():  # where there are both transformers reads this one too
            try:
                with safe_open(self.folder / SINGLE, "pt") as file:
                    return dict.fromkeys(file.keys(), SINGLE)
            except SafetensorError as error:
                reason = " ".join(str(error).split())
                raise CheckpointError(
                    f"{self.folder / SINGLE}: {reason}; the file is truncated or damaged; fetch it again"
                ) from None
        if (self.folder / INDEX).is_file():
            return self._sharded()
        pickled = next(iter(sorted(self.folder.glob("*.bin"))), None)
        if pickled is not None:
            raise CheckpointError(
                f"{pickled}: a pickle can run any code when it is read; moe-zoo reads safetensors alone; convert it with "
                f"transformers' save_pretrained"
            )
        raise CheckpointError(f"{self.folder}: no {SINGLE} and no {INDEX}; give a folder that holds a model's weights")

    def _sharded(self) -> dict[str, str]:
        try:
            file_of: dict[str, str] = json.loads((self.folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
            is_map = all(isinstance(file, str) for file in file_of.values())
        except (ValueError, KeyError, TypeError, AttributeError):
            is_map = False
        if not is_map:
            raise CheckpointError(
                f"{self.folder / INDEX}: it is no JSON with a weight_map; the file is truncated or damaged; fetch it again"
            )
        for missing in sorted({file for file in file_of.values() if not (self.folder / file).is_file()}):
            raise CheckpointError(f"{self.folder}: {missing}; {INDEX} names it and it is not there; fetch it")
        return file_of
