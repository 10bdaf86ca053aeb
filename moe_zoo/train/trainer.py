"""The training loop. It knows steps, not layouts: whatever is split is split below ``engine``."""

import sys
import time
from contextlib import ExitStack
from pathlib import Path

from data_pipelines import DataError
from moe_zoo.comm.agree import first_rank_decides, raise_everywhere
from moe_zoo.comm.launch import World, init_process_group
from moe_zoo.comm.mesh import Mesh
from moe_zoo.engines import MicroBatch, make_engine
from moe_zoo.models.source import Source, check_source
from moe_zoo.models.upstream import check_copies
from moe_zoo.parallel.build import build_model
from moe_zoo.spec.accounting import num_active_parameters, num_parameters, training_flops_per_token
from moe_zoo.spec.engine import engine_name
from moe_zoo.spec.errors import MoeZooError, PlanError
from moe_zoo.spec.layout import resolve_layout
from moe_zoo.spec.recipe import Recipe
from moe_zoo.spec.topology import describe, ranks_per_domain
from moe_zoo.train.checkpoint import Checkpoint
from moe_zoo.train.console import TrainingDisplay
from moe_zoo.train.feed import Feed
from moe_zoo.train.metrics import Metrics, peak_flops_per_s, step_metrics
from moe_zoo.train.run_folder import RunFolder
from moe_zoo.train.sampling import sample
from moe_zoo.train.schedule import learning_rate
from moe_zoo.train.stop import StopRequest, Verdict
from moe_zoo.train.watch import StallWatch, waits_for_a_peer

TIMEOUT_S = 600  # of a collective: a rank that waits longer ends with an error


def train(recipe: Recipe, world: World) -> Path:
    """Run a recipe to its end, or to the signal that stops it. Returns the run's folder."""
    domain = ranks_per_domain(recipe, world.ranks_per_node)
    layout = resolve_layout(recipe, world.world, domain)
    engine_name(recipe)  # refuse what cannot be before anything starts
    device = init_process_group(world, TIMEOUT_S)
    with ExitStack() as cleanup:
        run: Run | None = None
        try:
            run = Run(recipe, Mesh(layout, device, TIMEOUT_S), cleanup)
            if layout.world > 1:
                run.display.say(describe(layout, domain))
            return run.to_end()
        except RuntimeError as error:
            where = f"step {run.step + 1}, {run.engine.position.place}" if run else "the start of the run"
            line = waits_for_a_peer(error, world.rank, where)
            if line is None:
                raise
            raise MoeZooError(line) from None


class Run:
    """One execution of a recipe on this rank."""

    def __init__(self, recipe: Recipe, mesh: Mesh, cleanup: ExitStack):
        self.recipe, self.mesh, self.folder = recipe, mesh, RunFolder(recipe)
        self.folder.claim(cleanup)
        checkpoint = self.folder.find_checkpoint()
        if checkpoint and recipe.parallel.nvme:
            raise PlanError(
                f"parallel.nvme: {recipe.parallel.nvme}; DeepSpeed does not take moments back onto a disk; resume with "
                f"parallel.nvme=null, which takes the same steps in host memory"
            )
        self.step = checkpoint.step if checkpoint else 0
        self.feed = self._open_feed(checkpoint, cleanup)
        source = _first_weights(recipe) if not checkpoint else None
        self.engine = make_engine(build_model(recipe, mesh, recipe.train.seed, source), mesh, recipe)
        if checkpoint:
            self.folder.restore(checkpoint, self.engine)
        self.stop = StopRequest()
        cleanup.callback(self.stop.restore)
        self.display = TrainingDisplay(recipe.train.steps, self.step, recipe.log.every, is_silent=mesh.rank > 0)
        cleanup.callback(self.display.close)
        if mesh.device.type == "cuda":
            cleanup.callback(StallWatch(self.engine.position, TIMEOUT_S, self._tell_stall).close)
        first_rank_decides(lambda: self.folder.open_logs(self.step, cleanup))
        self.failure: DataError | MoeZooError | None = None  # of this rank alone, told to all at the next step
        self.tokens_per_step = recipe.train.global_batch * recipe.data.seq_len
        peak = peak_flops_per_s(mesh.device, recipe.precision.compute) * mesh.world
        data = recipe.data
        self.peak_tokens_per_s = peak / training_flops_per_token(recipe.model, data.seq_len, data.encoder_len or 0)

    def to_end(self) -> Path:
        """Take every step that is left; look, save and log on the way."""
        self._introduce()
        train, saved = self.recipe.train, self.step
        while self.step < train.steps:
            batch = self._read()
            if (verdict := self.stop.agreed(self.mesh, self.failure is not None)) != Verdict.GO:
                return self._stop_early(verdict, is_saved=saved == self.step)
            metrics = self._step(batch)
            is_last = self.step == train.steps
            if is_last or _is_due(self.step, train.eval_every):
                metrics |= self._validate()
            self.display.step(self.step, metrics)
            self._log(metrics)
            if is_last or _is_due(self.step, self.recipe.checkpoint.every):
                saved = self._save()
            if is_last or _is_due(self.step, train.sample_every):
                self._sample()
        raise_everywhere(self.failure)
        model = self.folder.export()
        auto = "AutoModelForSeq2SeqLM" if self.recipe.model.encoder else "AutoModelForCausalLM"
        self.display.say(f"exported {model}; moe_zoo.load({str(model)!r}) or {auto} reads it")
        return self.folder.path

    def _open_feed(self, checkpoint: Checkpoint | None, cleanup: ExitStack) -> Feed:
        """Raises on all ranks what is wrong on one, and only when all are there to hear it."""
        feed = failure = None
        try:
            if checkpoint:
                checkpoint.check_model(self.recipe.model)
            feed = Feed(self.recipe, self.mesh, self.step, checkpoint.stream if checkpoint else None)
            cleanup.callback(feed.close)
            if checkpoint:
                checkpoint.check_stream(self.recipe.data.path, feed.stream.fingerprint)
        except (DataError, MoeZooError) as error:
            failure = error
        raise_everywhere(failure)
        return feed

    def _read(self) -> list[MicroBatch]:
        self.began = time.monotonic()
        self.engine.position.move("the agreement to go on")
        try:
            return next(self.feed) if self.failure is None else []
        except DataError as error:
            self.failure = error
            return []

    def _log(self, metrics: Metrics) -> None:
        try:
            self.folder.log(self.step, metrics)
        except MoeZooError as error:
            self.failure = error

    def _stop_early(self, verdict: Verdict, is_saved: bool) -> Path:
        if not is_saved:
            self._save()
        self.display.say(f"stopped after step {self.step}; the same command goes on from there")
        if verdict == Verdict.FAIL:
            raise_everywhere(self.failure)
        return self.folder.path

    def _step(self, batch: list[MicroBatch]) -> Metrics:
        lr = learning_rate(self.recipe.optim, self.step, self.recipe.train.steps)
        stats = self.engine.step(batch, lr)
        self.step += 1
        tokens_per_s = self.tokens_per_step / (time.monotonic() - self.began)
        speed = {"train/tokens_per_s": tokens_per_s, "train/mfu": tokens_per_s / self.peak_tokens_per_s}
        return step_metrics(stats, lr) | speed

    def _validate(self) -> Metrics:
        measured = self.feed.valid.measure(self.engine)
        loss, bits = measured.values()
        self.display.say(f"step {self.step}: validation loss {loss:.4f} nats per token, {bits:.4f} bits per byte")
        return measured

    def _sample(self) -> None:
        train, tokenizer = self.recipe.train, self.feed.tokenizer
        prompt = [tokenizer.bos_id, *tokenizer.encode(train.sample_prompt)]
        limits = {"vocab_size": tokenizer.vocab_size, "eos_id": tokenizer.eos_id}
        new = sample(self.engine, prompt, train.sample_tokens, seed=train.seed, **limits)
        self.display.say(f"step {self.step}: {train.sample_prompt!r} -> {tokenizer.decode(new)!r}")

    def _tell_stall(self, what: str) -> None:
        print(f"train: rank {self.mesh.rank}, step {self.step + 1}: {what}", file=sys.stderr, flush=True)

    def _save(self) -> int:
        self.engine.position.move("a checkpoint")
        self.display.say(
            f"step {self.step}: saved {self.folder.save(self.engine, self.step, self.feed.state_after(self.step))}"
        )
        return self.step

    def _introduce(self) -> None:
        recipe, layout = self.recipe, self.mesh.layout
        total, active = num_parameters(recipe.model), num_active_parameters(recipe.model)
        engine = f"{engine_name(recipe)} zero_stage={recipe.parallel.zero_stage} {recipe.precision.compute}"
        ranks = f"{layout.world} rank{'s' * (layout.world > 1)}"
        self.display.say(
            f"{recipe.name}: {total / 1e6:.2f} M parameters, {active / 1e6:.2f} M active; {ranks} = {layout}; {engine} on "
            f"{self.mesh.device.type}"
        )
        if self.step:
            self.display.say(f"resumed after step {self.step}")
        if self.step >= recipe.train.steps:
            self.display.say(f"nothing is left of its {recipe.train.steps} steps; name=ANOTHER starts another run")


def _first_weights(recipe: Recipe) -> Source | None:
    """What ``init`` names, or None. Raises on all ranks what is wrong on one."""
    source = failure = None
    try:
        if recipe.init:
            source = Source(recipe.init)
            check_source(source, recipe.model)
            if source.family is not None:
                check_copies(source)
    except MoeZooError as error:
        failure = error
    raise_everywhere(failure)
    return source


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
