"""Recipe: what a person asks of a run. Strict and frozen; numbers that follow from others are never written here.

Keys and their defaults stand below, one class per section. ``moe_zoo.spec.recipe_file`` reads the YAML.
"""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from moe_zoo.spec.architecture import Architecture
from moe_zoo.spec.errors import RecipeError
from moe_zoo.spec.validation import validate
from moe_zoo.spec.yaml_text import dump_yaml

Count = Annotated[int, Field(gt=0)]
CountOrZero = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
PositiveOrZero = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Text = Annotated[str, Field(min_length=1)]
Dtype = Literal["fp32", "bf16"]


class Section(BaseModel):
    """A group of keys."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)


class Data(Section):
    """What the model reads."""

    path: Text  # prepared shards: a folder or an s3:// url
    source: Text = "stdlib"  # the text they are made of: Python's own library, or a folder of text files
    tokenizer: Text  # folder
    seq_len: Count
    encoder_len: Count | None = None  # of a row's seq_len tokens, those that an encoder reads; the decoder goes on
    heldout_percent: Annotated[int, Field(ge=1, le=50)] = 5  # of the files, for validation; read by moe-zoo prepare
    cache: Text | None = None  # folder for blocks of a remote path, shared by the ranks of a node


def row_parts(data: Data) -> tuple[int, ...]:
    """Tokens of a row that go each their own way: all of them, or an encoder's and the decoder's."""
    return (data.seq_len,) if data.encoder_len is None else (data.encoder_len, data.seq_len - data.encoder_len)


class Train(Section):
    """How long, on how many rows, and what is looked at on the way. 0 means only at the end."""

    steps: Count
    global_batch: Count  # rows per optimizer step
    micro_batches: Count = 1  # passes per step, the same in every layout: the result never depends on the world
    seed: CountOrZero = 0
    eval_every: CountOrZero = 0
    eval_rows: Count = 64
    sample_every: CountOrZero = 0
    sample_prompt: str = ""
    sample_tokens: Count = 64


class Optim(Section):
    """AdamW (arXiv:1711.05101) and its learning rate over time."""

    lr: Positive
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    eps: Positive = 1e-8
    weight_decay: PositiveOrZero = 0.1
    clip: Positive | None = 1.0  # largest gradient norm; null never clips
    schedule: Literal["constant", "cosine", "wsd"] = "cosine"
    warmup_steps: CountOrZero = 0
    decay_steps: CountOrZero = 0  # wsd: the last steps, in which the rate falls
    min_lr_ratio: Fraction = 0.1  # where the schedule ends, over lr


class Parallel(Section):
    """How the model is split; the rest follows from the number of ranks."""

    pp: Count = 1  # pipeline: ranks that hold different layers
    schedule: Literal["GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"] = (
        "1F1B"  # of the micro-batches, where pp > 1
    )
    tp: Count = 1  # tensor: ranks that share attention heads, dense feed-forwards, vocabulary, and between layers a row
    cp: Count = 1  # context: ranks that share each row
    context: Literal["gather", "ulysses"] = "gather"  # cp: keys of the whole row come here, or heads change places
    ep: Count | Literal["auto"] = "auto"  # auto: the largest divisor of num_experts that divides the ranks of a node
    etp: Count = 1  # expert-tensor: ranks that share each expert
    replicate: Count = 1  # pods: weights are sharded inside each, gradients summed across them
    dispatch: Literal["auto", "exact", "padded", "hierarchical"] = "auto"  # how tokens reach experts; auto: exact
    engine: Literal["auto", "deepspeed", "fsdp"] = "auto"
    zero_stage: Annotated[int, Field(ge=0, le=3)] = 3
    recompute: CountOrZero | Literal["selective"] = 0  # every so many blocks run again in backward, or parts of each
    offload: Literal["none", "optimizer", "all"] = "none"  # master weights and moments to host memory; all: weights too
    nvme: Text | None = None  # folder on a local disk to which what is offloaded goes instead
    gather: Literal["layer", "step"] = "layer"  # stage 3: weights gathered for each use, or once for a whole step
    reduce: Literal["step", "micro_batch"] = "step"  # stage 3: gradients reduced once, or sharded after each backward


class Precision(Section):
    """Of the matrix products, and of the sums over ranks. Master weights and moments are fp32."""

    compute: Dtype = "fp32"
    reduce: Dtype = "fp32"


class Balance(Section):
    """How the load of the experts is kept even, and over which tokens it is measured."""

    method: Literal["aux_loss", "bias", "none"] = "aux_loss"
    scope: Literal["sequence", "micro_batch", "global_batch"] = "micro_batch"
    aux_coefficient: PositiveOrZero = 0.01  # of method aux_loss (Switch, arXiv:2101.03961, section 2.2)
    z_coefficient: PositiveOrZero = 0.0  # of any method; ST-MoE uses 1e-3 (arXiv:2202.08906, section 3)
    bias_update_rate: Positive = 1e-3  # of method bias (DeepSeek-V3, arXiv:2412.19437, section 4.2)


class Checkpoint(Section):
    """When the run is saved. 0 means only at the end."""

    every: CountOrZero = 0
    keep: Count | None = 3  # the newest so many; null keeps all
    resume: bool = True  # continue the run's folder if it holds a checkpoint


class Log(Section):
    """Where the run writes."""

    folder: Text = "runs"
    every: Count = 10
    wandb: Literal["off", "offline", "online"] = Field(
        default_factory=lambda: "offline" if find_spec("wandb") else "off"
    )


class Expect(Section):
    """What the recipe was written for; another launch is refused."""

    world: Count


class Recipe(Section):
    """One run, whole."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    model: Architecture
    init: Text | None = None  # folder or Hub id whose weights the run begins with; null: fresh ones
    data: Data
    train: Train
    optim: Optim
    parallel: Parallel = Parallel()
    cluster: Text | None = None  # file that says which ranks are near each other; null: those of a node
    precision: Precision = Precision()
    balance: Balance = Balance()
    checkpoint: Checkpoint = Checkpoint()
    log: Log = Field(default_factory=Log)
    expect: Expect | None = None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Recipe":
        """A recipe from plain nested values, ``model`` a whole Architecture. Raises ``RecipeError``, one line."""
        return validate(cls, values)

    def to_dict(self) -> dict[str, Any]:
        """Plain nested values, defaults included."""
        return self.model_dump(mode="json") | {"model": self.model.to_dict()}

    def to_yaml(self) -> str:
        """The text to save with the run: every number, no ``extends``, no preset. It loads back equal."""
        return dump_yaml(self.to_dict())

    @model_validator(mode="after")
    def _sections_agree(self) -> "Recipe":
        _check_batch(self.train)
        _check_encoder(self.data, self.model)
        _check_schedule(self.optim, self.train.steps)
        _check_balance(self.balance, self.model)
        _check_dispatch(self.parallel.dispatch, self.model)
        _check_precision(self.precision)
        return self


def _check_batch(train: Train) -> None:
    if train.global_batch % train.micro_batches:
        fits = -(-train.global_batch // train.micro_batches) * train.micro_batches
        raise RecipeError(
            f"train.global_batch: {train.global_batch}; must be a multiple of train.micro_batches = "
            f"{train.micro_batches}; try {fits}"
        )


def _check_encoder(data: Data, model: Architecture) -> None:
    length = data.encoder_len
    if model.encoder is None and length is not None:
        raise RecipeError(
            f"data.encoder_len: {length}; the model has no encoder to read them; drop it, or describe model.encoder"
        )
    if model.encoder is not None and (length is None or length >= data.seq_len):
        raise RecipeError(
            f"data.encoder_len: {'missing' if length is None else length}; the encoder reads so many of data.seq_len = "
            f"{data.seq_len} tokens, the decoder the others; try {data.seq_len // 2}"
        )


def _check_schedule(optim: Optim, steps: int) -> None:
    if optim.warmup_steps >= steps:
        raise RecipeError(
            f"optim.warmup_steps: {optim.warmup_steps}; must be below train.steps = {steps}; try {steps // 10}"
        )
    if optim.schedule == "wsd" and not optim.decay_steps:
        raise RecipeError(f"optim.decay_steps: 0; schedule wsd ends in a decay; try {max(1, steps // 5)}")
    if optim.schedule != "wsd" and optim.decay_steps:
        raise RecipeError(
            f"optim.decay_steps: {optim.decay_steps}; only schedule wsd reads it, this is {optim.schedule}; "
            f"set it to 0 or optim.schedule to wsd"
        )
    if optim.warmup_steps + optim.decay_steps > steps:
        raise RecipeError(
            f"optim.decay_steps: {optim.decay_steps}; with warmup_steps = {optim.warmup_steps} it must fit in "
            f"train.steps = {steps}; try {steps - optim.warmup_steps}"
        )


def _check_precision(precision: Precision) -> None:
    if precision.reduce == "bf16" and precision.compute == "fp32":
        raise RecipeError(
            "precision.reduce: bf16; gradients of fp32 products are summed in fp32; set it to fp32, or "
            "precision.compute to bf16"
        )


def _check_dispatch(dispatch: str, model: Architecture) -> None:
    if dispatch == "auto":
        return
    if model.moe is None:
        raise RecipeError(f"parallel.dispatch: {dispatch}; the model has no experts to reach; set it to auto")
    if dispatch == "padded" and model.moe.router.capacity_factor is None and not model.experts_choose:
        raise RecipeError(
            "parallel.dispatch: padded; its buffers have room for model.moe.router.capacity_factor, which is null; set "
            "that to a number, for example 1.25, or this to exact"
        )


def _check_balance(balance: Balance, model: Architecture) -> None:
    if model.experts_choose and balance.method != "none":
        raise RecipeError(
            f"balance.method: {balance.method}; with model.moe.router.choice = expert all experts take equally many "
            f"tokens; set it to none"
        )
    has_bias = model.moe is not None and model.moe.router.selection_bias
    if balance.method == "bias" and not has_bias:
        remedy = "set it to true" if model.moe else "set balance.method to none, the model has no experts"
        raise RecipeError(f"balance.method: bias; moves model.moe.router.selection_bias, which is off; {remedy}")
    if has_bias and balance.method != "bias":
        raise RecipeError(
            f"balance.method: {balance.method}; the model has model.moe.router.selection_bias, which nothing would "
            f"move; set balance.method to bias, or selection_bias to false"
        )
