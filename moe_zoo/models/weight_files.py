"""The safetensors of a folder, read one tensor at a time."""

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from moe_zoo.spec.errors import CheckpointError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class WeightFiles:
    """All tensors of a folder, read one at a time. Raises ``CheckpointError`` that names file and tensor."""

    def __init__(self, folder: Path):
        self.folder, self.seen = folder, set()
        self.file_of = self._index()

    def read(self, name: str) -> Tensor:
        """A tensor, whole."""
        if name not in self.file_of:
            raise CheckpointError(
                f"{self.folder}: {name}; no file of the folder has it; the download is incomplete or another model's"
            )
        path = self.folder / self.file_of[name]
        try:
            with safe_open(path, "pt") as file:
                self.seen.add(name)
                return file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            reason = " ".join(str(error).split())
            raise CheckpointError(f"{path}: {name}; {reason}; fetch the file again") from None

    def unused(self) -> list[str]:
        """Tensors that nobody has read."""
        return sorted(self.file_of.keys() - self.seen)

    def _index(self) -> dict[str, str]:
        if (self.folder / INDEX).is_file():
            file_of: dict[str, str] = json.loads((self.folder / INDEX).read_text())["weight_map"]
            for missing in sorted({file for file in file_of.values() if not (self.folder / file).is_file()}):
                raise CheckpointError(f"{self.folder}: {missing}; {INDEX} names it and it is not there; fetch it")
            return file_of
        if (self.folder / SINGLE).is_file():
            try:
                with safe_open(self.folder / SINGLE, "pt") as file:
                    return dict.fromkeys(file.keys(), SINGLE)
            except SafetensorError as error:
                reason = " ".join(str(error).split())
                raise CheckpointError(
                    f"{self.folder / SINGLE}: {reason}; the file is truncated or damaged; fetch it again"
                ) from None
        pickled = next(iter(sorted(self.folder.glob("*.bin"))), None)
        if pickled is not None:
            raise CheckpointError(
                f"{pickled}: a pickle can run any code when it is read; moe-zoo reads safetensors alone; convert it with "
                f"transformers' save_pretrained"
            )
        raise CheckpointError(f"{self.folder}: no {SINGLE} and no {INDEX}; give a folder that holds a model's weights")
