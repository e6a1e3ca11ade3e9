"""Log-probabilities of emitted tokens, against a float64 pass of NumPy over the whole text."""

import dataclasses

import jax
import numpy as np
import pytest

from speculative.decoding import Decoding, Params, loop, queue, rules
from speculative.decoding.queue import Request
from speculative.drafts import TransformerDraft
from speculative.sampling import Kinds, Sampling
from tests import numpy_models, tiny, toy

DRAFT = TransformerDraft(tiny.TARGET)
PARAMS = Params(tiny.target_params(), tiny.near_params())
SOURCES = tiny.sources(6)


def expected(row: int, tokens: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Of a text's tokens."""
    stored = tiny.stored_params()
    source, fed = SOURCES[row][SOURCES[row] > 0], np.append(0, tokens[:-1])
    logits = numpy_models.logits(stored, tiny.TARGET.config, source, fed)
    own = Sampling() if sampling.greedy else sampling
    p = toy.standardise(logits[:, : tiny.VOCABULARY], own)
    return np.log(p[np.arange(len(tokens)), tokens])


@pytest.mark.long
@pytest.mark.parametrize(
    ("rule", "sampling"),
    [
        (rules.Token(), Sampling(0.0)),
        (rules.Token(), Sampling(0.7)),
        (rules.Block(), Sampling(1.0, top_p=0.9)),
    ],
    ids=str,
)
def test_they_are_the_targets(rule: rules.Rule, sampling: Sampling) -> None:
    config = Decoding(tiny.VOCABULARY, sampling, 3, 20, rule=rule, logprobs=True)
    inputs, draws = jax.device_put(SOURCES), config.draws(1, np.arange(len(SOURCES)))
    found = jax.device_get(loop.generate(tiny.TARGET, DRAFT, PARAMS, inputs, draws, config))
    assert int(found.accepted.sum()) > 10
    for row, length in enumerate(found.lengths):
        tokens = found.tokens[row, :length]
        wanted = expected(row, tokens, sampling)
        np.testing.assert_allclose(found.logprobs[row, :length], wanted, atol=1e-4)
    places = range(len(SOURCES))
    texts = [(i, Request(inputs[i : i + 1], config, 1, i)) for i in places]
    for kinds in (sampling.kinds, Kinds.of([sampling, Sampling(0.0), Sampling(1.0, 3, 0.5)])):
        batched = dict(queue.generate(tiny.TARGET, DRAFT, PARAMS, texts, kinds, 4))
        for row, length in enumerate(found.lengths):
            both = batched[row].logprobs[0, :length], found.logprobs[row, :length]
            np.testing.assert_allclose(*both, rtol=0 if kinds == sampling.kinds else 1e-5)


def test_without_being_asked_for_they_cost_nothing() -> None:
    config = Decoding(tiny.VOCABULARY, Sampling(), 3, 20)
    draws = config.draws(1, np.arange(2))
    given = tiny.TARGET, DRAFT, PARAMS, jax.device_put(SOURCES[:2]), draws
    found = loop.generate(*given, config)
    assert found.logprobs.shape == (2, 0)
    asked = loop.generate(*given, dataclasses.replace(config, logprobs=True))
    np.testing.assert_array_equal(asked.tokens, found.tokens)
