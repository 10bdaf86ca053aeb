"""What a run leaves on disk: its recipe, metrics, checkpoints, and at the end the model.

runs/<name>/recipe.yaml  metrics.jsonl  checkpoints/step-00000050/  model/
"""

import fcntl
import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from moe_zoo.comm.agree import first_rank_decides
from moe_zoo.engines import Engine
from moe_zoo.spec.errors import RecipeError
from moe_zoo.spec.recipe import Recipe
from moe_zoo.train.checkpoint import Checkpoint, latest_checkpoint, save_checkpoint
from moe_zoo.train.export import export_checkpoint
from moe_zoo.train.metrics import Metrics, MetricsFile, WandbRun


class RunFolder:
    """The folder of one run, shared by its ranks."""

    def __init__(self, recipe: Recipe):
        self.recipe = recipe
        self.path = Path(recipe.log.folder) / recipe.name
        self.logs: list[MetricsFile | WandbRun] = []

    def claim(self, cleanup: ExitStack) -> None:
        """Hold the folder until the run ends: two runs in one would tear each other's files. Collective."""

        def lock() -> None:
            with self._usable():
                if not self.path.parent.exists():
                    self.path.parent.mkdir(parents=True, exist_ok=True)
                file = open(self.path.parent / f".{self.path.name}.lock", "w")
                cleanup.callback(file.close)  # which gives the lock back, as does the death of the process
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise RecipeError(
                        f"log.folder: {self.path}; another run is writing there; wait for it, or give this one another "
                        f"name"
                    ) from None

        first_rank_decides(lock)

    def find_checkpoint(self) -> Checkpoint | None:
        """The one to resume from, if there is one and the recipe wants it. Collective."""
        if not self.recipe.checkpoint.resume:
            first_rank_decides(self._set_aside)
            return None

        def newest() -> Path | None:  # one rank reads everything once, all others believe it
            with self._usable():
                checkpoint = latest_checkpoint(self.path / "checkpoints", warn=lambda text: print(f"skipped: {text}"))
            return checkpoint.folder if checkpoint else None

        folder = first_rank_decides(newest)
        return Checkpoint(folder) if folder else None

    def restore(self, checkpoint: Checkpoint, engine: Engine) -> None:
        """Weights, moments and buffers of ``checkpoint`` into an engine of any layout."""

        def fetch(name: str, key: str, start: int, length: int) -> Tensor:
            return checkpoint.fetch_slice(engine.placements[name], key, start, length)

        engine.load(fetch, checkpoint.step)
        for name, buffer in engine.buffers().items():
            buffer.copy_(checkpoint.fetch(name, "buffer", 0, buffer.numel()).view_as(buffer))

    def save(self, engine: Engine, step: int, stream: dict[str, Any]) -> Path:
        """A checkpoint after ``step`` steps, the data standing at ``stream``. Collective."""
        return save_checkpoint(self.path / "checkpoints", engine, step, self.recipe.checkpoint.keep, stream)

    def export(self) -> Path:
        """The newest checkpoint as a model folder. Collective; one rank works."""

        def export() -> Path:
            with self._usable():
                return export_checkpoint(self.path, self.path / "model")

        return first_rank_decides(export)

    def open_logs(self, first_step: int, cleanup: ExitStack) -> None:
        """On one rank: start or continue the metrics."""
        with self._usable():
            self.path.mkdir(parents=True, exist_ok=True)
            (self.path / "recipe.yaml").write_text(self.recipe.to_yaml())
            self.logs.append(MetricsFile(self.path / "metrics.jsonl", first_step))
        cleanup.callback(self.logs[0].close)
        if self.recipe.log.wandb != "off":
            self.logs.append(WandbRun(self.recipe, self.path))
            cleanup.callback(self.logs[1].close)

    def log(self, step: int, metrics: Metrics) -> None:
        """Write to every log there is."""
        with self._usable():
            for log in self.logs:
                log.write(step, metrics)

    def _set_aside(self) -> None:
        """Nothing is overwritten by a run that starts anew: the earlier one gets a number, ``run.1`` and so on."""
        if not any((self.path / "checkpoints").glob("step-*")):
            return
        names = (self.path.with_name(f"{self.path.name}.{number}") for number in itertools.count(1))
        aside = next(path for path in names if not path.exists())
        with self._usable():
            self.path.rename(aside)
        print(f"checkpoint.resume is false: the earlier run stays in {aside}", flush=True)

    @contextmanager
    def _usable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RecipeError(
                f"log.folder: {self.path}; {error.strerror or error}; a run reads and writes there; free it, or set "
                f"log.folder to another"
            ) from None
