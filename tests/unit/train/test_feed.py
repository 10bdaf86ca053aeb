"""What a rank reads: the same global batch and the same validation rows, however many ranks share them."""

from types import SimpleNamespace

import pytest
import torch

from moe_zoo.engines import make_engine
from moe_zoo.ops.documents import unpack_rows
from moe_zoo.parallel.build import build_model
from moe_zoo.spec.presets import load_preset
from moe_zoo.spec.recipe import Recipe
from moe_zoo.train.feed import Feed
from moe_zoo.train.sampling import sample


@pytest.fixture
def recipe(run_values) -> Recipe:
    run_values["parallel"] = {"engine": "fsdp"}
    run_values["train"]["eval_rows"] = 5
    return Recipe.from_dict(run_values)


@pytest.fixture
def open_feed(recipe):
    """A feed as one of ``dp`` ranks has it; a mesh is read for these three alone."""
    opened = []

    def make(dp: int = 1, rank: int = 0, step: int = 0, state: dict | None = None) -> Feed:
        opened.append(Feed(recipe, SimpleNamespace(dp=dp, dp_rank=rank, device=torch.device("cpu")), step, state))
        return opened[-1]

    yield make
    for feed in opened:
        feed.close()


def test_ranks_share_each_micro_batch_of_one_process_in_order(open_feed):
    whole, parts = next(open_feed()), [next(open_feed(dp=2, rank=rank)) for rank in range(2)]
    assert len(whole) == 2 and whole[0].rows.input_ids.shape == (4, 32)
    for index, micro in enumerate(whole):
        shared = [part[index] for part in parts]
        assert torch.equal(micro.rows.input_ids, torch.cat([m.rows.input_ids for m in shared]))
        assert torch.equal(micro.rows.targets, torch.cat([m.rows.targets for m in shared]))
        assert torch.equal(micro.row_seeds, torch.cat([m.row_seeds for m in shared]))


def test_a_feed_from_a_later_step_goes_on_where_the_first_would(open_feed):
    first = open_feed()
    for _ in range(2):
        next(first)
    later = open_feed(step=2, state=first.state_after(2))
    for ours, theirs in zip(next(first), next(later), strict=True):
        assert torch.equal(ours.rows.input_ids, theirs.rows.input_ids)
        assert torch.equal(ours.row_seeds, theirs.row_seeds)


@pytest.fixture
def engine(alone, recipe):
    return make_engine(build_model(recipe, alone, seed=0), alone, recipe)


def test_validation_adds_up_to_the_same_nats_over_any_number_of_ranks(open_feed, engine):
    """5 rows fill neither 4 nor 2 rows per forward: the rest is padding, which has no target."""
    found = {}
    for dp in (1, 2, 4):
        rounds = [list(open_feed(dp=dp, rank=rank).valid) for rank in range(dp)]
        assert {len(rows) for rows in rounds} == {2}, "every rank calls evaluate equally often"
        sums = [engine.evaluate(unpack_rows(rows, bos_id=1)) for rank in rounds for rows in rank]
        found[dp] = tuple(sum(values) for values in zip(*sums, strict=True))
    assert found[1][1] == found[2][1] == found[4][1] > 100
    for dp in (2, 4):
        assert found[dp][0] == pytest.approx(found[1][0], rel=1e-5)  # fp32 sums of other shapes
    measured = open_feed().valid.measure(engine)
    assert measured["valid/loss"] == pytest.approx(found[1][0] / found[1][1], rel=1e-6)
    assert measured["valid/loss"] == pytest.approx(6.93, abs=0.5)  # ln 1024: it has learnt nothing


def test_a_sample_repeats_with_its_seed_stops_at_eos_and_takes_a_prompt_longer_than_the_window(engine):
    settings = {"vocab_size": 1024, "eos_id": -1, "seed": 3}
    text = sample(engine, [1] * 40, 8, **settings)
    assert text == sample(engine, [1] * 40, 8, **settings) and len(text) == 8
    assert text != sample(engine, [1] * 40, 8, **settings | {"seed": 4})
    assert sample(engine, [1] * 40, 8, **settings | {"eos_id": text[2]}) == text[:3]


def test_a_sample_holds_no_id_that_the_tokenizer_does_not_know(alone, recipe):
    values = recipe.to_dict()
    values["model"]["vocab_size"] = 8192
    wide = Recipe.from_dict(values)
    engine = make_engine(build_model(wide, alone, seed=0), alone, wide)
    assert max(sample(engine, [1], 24, vocab_size=1024, eos_id=-1, seed=0)) < 1024  # by chance: 8**-24


def test_an_encoder_reads_the_first_tokens_and_the_decoder_goes_on(run_values, open_feed):
    whole = [micro.rows for micro in next(open_feed())]
    model = load_preset("switch-encdec-test").to_dict() | {"vocab_size": 1024}
    values = run_values | {"model": model, "data": run_values["data"] | {"encoder_len": 20}, "balance": {}}
    mesh = SimpleNamespace(dp=1, dp_rank=0, device=torch.device("cpu"))
    feed = Feed(Recipe.from_dict(values), mesh, 0)
    for rows, micro in zip(whole, next(feed), strict=True):
        split = micro.rows
        assert torch.equal(torch.cat(split.ids, dim=1), rows.input_ids) and split.mask is None and split.seq_len == 32
        assert torch.equal(split.targets, rows.targets[:, 20:])
        assert split.positions[0].tolist() == list(range(12))
    sizes = torch.from_numpy(feed.stream.token_bytes)
    targets = torch.cat([unpack_rows(rows, feed.stream.bos_id, 20).targets.flatten() for rows in feed.valid])
    assert feed.valid.num_bytes == int(sizes[targets[targets >= 0].long()].sum())
    feed.close()
