"""A checkpoint of any layout -> a folder that ``from_pretrained`` loads. One process, no cluster."""

import shutil
import tempfile
from pathlib import Path

import torch
from safetensors import SafetensorError

from moe_zoo.models.causal_lm import MoeZooForCausalLM
from moe_zoo.models.config import MoeZooConfig
from moe_zoo.models.hub import from_architecture, without_progress_bars
from moe_zoo.models.upstream import with_decoder
from moe_zoo.spec.errors import CheckpointError
from moe_zoo.train.checkpoint import Checkpoint, latest_checkpoint

OURS = MoeZooConfig.model_type
TOKENIZER_FILES = ("tokenizer.model", "tokenizer.json", "tokenizer_config.json")


def export_checkpoint(source: Path, out: Path, tokenizer: Path | None = None, family: str = OURS) -> Path:
    """Write weights, configuration and tokenizer of a run's newest checkpoint, or of one given, to ``out``.

    ``family``: ours, with the code that loads it elsewhere; a ``model_type`` of transformers; or "auto", which is the
    one that has a model of these numbers, and ours where none has.
    """
    checkpoint = Checkpoint(source) if (source / "MANIFEST.json").exists() else _newest(source)
    tokenizer = tokenizer or Path(checkpoint.recipe.data.tokenizer)
    if not tokenizer.is_dir():
        raise CheckpointError(f"export: tokenizer {tokenizer}; no such folder; give it with --tokenizer")
    model = _dressed(_model(checkpoint, tokenizer), family)
    try:
        _write(model, tokenizer, out)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise CheckpointError(
            f"export: {out}; {reason}; what stood there is unchanged and {checkpoint.folder} is whole; free some space "
            f"or choose another folder, and run moe-zoo export"
        ) from None
    return out


def _dressed(model: MoeZooForCausalLM, family: str) -> MoeZooForCausalLM:
    if family == OURS:
        return model
    fitting = with_decoder(model, model.model)
    found = fitting.config.upstream["model_type"] if fitting.config.upstream else OURS
    if family not in ("auto", found):
        raise CheckpointError(
            f"export: --format {family}; the model of this run is no {family}; give {found}, or auto, which finds it"
        )
    return fitting


def _write(model: MoeZooForCausalLM, tokenizer: Path, out: Path) -> None:
    """Beside ``out`` first: a disk that is full leaves no torn model where a good one stood."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as name:
        made = Path(name)
        with without_progress_bars():
            model.save_pretrained(made)
        for file in TOKENIZER_FILES:
            if (tokenizer / file).exists():
                shutil.copy2(tokenizer / file, made / file)
        stale = [path for path in out.glob("model*.safetensors*") if not (made / path.name).exists()]
        for path in made.iterdir():
            path.replace(out / path.name)
        for (
            path
        ) in stale:  # shards and index of a model that was larger, which somebody would read in place of this one
            path.unlink()


def _newest(source: Path) -> Checkpoint:
    for root in (source, source / "checkpoints"):
        if checkpoint := latest_checkpoint(root):
            return checkpoint
    raise CheckpointError(f"export: {source}; holds no checkpoint; give a run's folder or one of its checkpoints")


@torch.no_grad()
def _model(checkpoint: Checkpoint, tokenizer: Path) -> MoeZooForCausalLM:
    from data_pipelines import load_tokenizer

    ids = load_tokenizer(tokenizer)
    model = from_architecture(checkpoint.architecture, bos_token_id=ids.bos_id, eos_token_id=ids.eos_id).eval()
    for key, tensors in (("weight", model.model.named_parameters()), ("buffer", model.model.named_buffers())):
        for name, tensor in tensors:
            tensor.copy_(checkpoint.fetch(name, key, 0, tensor.numel()).view_as(tensor))
    return model
