"""Baselines against a slow twin that follows the definitions word by word."""

import math
from collections import Counter
from itertools import pairwise

import pytest

from data_pipelines import PrepareSpec, load_tokenizer, ngram_baselines, prepare, valid_rows
from data_pipelines import baselines as module


@pytest.fixture(scope="module")
def url(corpus, tokenizer_folder, tmp_path_factory) -> str:
    output = tmp_path_factory.mktemp("baselines")
    (output / "texts").mkdir()
    for path in sorted(corpus.iterdir())[:40]:
        (output / "texts" / path.name).write_text(path.read_text()[:3000])
    return prepare(PrepareSpec(output / "texts", tokenizer_folder, output / "set", seq_len=33, workers=1)).url


def slow_twin(url: str, limit: int) -> tuple:
    """(uniform, unigram, bigram) nats per token, number of targets, bytes."""
    tokenizer = load_tokenizer(f"{url}/tokenizer")
    V, bos, d = tokenizer.vocab_size, tokenizer.bos_id, 0.75

    def pairs(rows) -> list[tuple[int, int]]:
        return [(a, b) for row in rows.tolist() for a, b in pairwise(row) if b != bos]

    train, valid = pairs(valid_rows(url, "train")), pairs(valid_rows(url, limit=limit))
    unigrams, bigrams, histories = Counter(b for _, b in train), Counter(train), Counter(a for a, _ in train)
    kinds = Counter(a for a, _ in bigrams)

    def unigram(b: int) -> float:
        return (unigrams[b] + 1) / (len(train) + V)

    def bigram(a: int, b: int) -> float:
        if not histories[a]:
            return unigram(b)
        return max(bigrams[a, b] - d, 0) / histories[a] + d * kinds[a] / histories[a] * unigram(b)

    n = len(valid)
    losses = [sum(-math.log(p) for p in ps) / n for ps in ([unigram(b) for _, b in valid], [bigram(*p) for p in valid])]
    return math.log(V), *losses, n, sum(int(tokenizer.token_bytes[b]) for _, b in valid)


@pytest.mark.parametrize("limit", [3, None])
def test_equals_the_slow_twin(url, limit):
    result = ngram_baselines(url, limit)
    uniform, unigram, bigram, num_targets, num_bytes = slow_twin(url, limit)
    assert (result.num_targets, result.num_bytes) == (num_targets, num_bytes)
    nats = [score.nats_per_token for score in result[:3]]
    assert nats == pytest.approx([uniform, unigram, bigram], rel=1e-12)
    for score in result[:3]:
        assert score.bits_per_byte == pytest.approx(score.nats_per_token * num_targets / math.log(2) / num_bytes)
    assert bigram < unigram < uniform


def test_are_kept_beside_the_data_for_each_limit(url, monkeypatch):
    first, other = ngram_baselines(url, 5), ngram_baselines(url, 6)
    monkeypatch.setattr(module, "_count", lambda *_: pytest.fail("counted again"))
    assert ngram_baselines(url, 5) == first != other
