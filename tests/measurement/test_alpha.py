"""beta at every token against the float64 traced loop and against tables."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speculative.decoding import Decoding, Params, Token, tracing
from speculative.drafts import (
    Draft,
    NgramDraft,
    TransformerDraft,
    UniformDraft,
    count_ngrams,
    ngram_params,
)
from speculative.measurement.alpha import alpha_on_target_text
from speculative.sampling import Sampling
from tests import ngrams, tiny, toy
from tests.measurement.pairs import MODEL_DRAFT, SOURCE, toy_pair

SAMPLINGS = [Sampling(0.0), Sampling(1.0), Sampling(0.7, top_k=2), Sampling(1.3, top_p=0.8)]
TEXTS = [[2, 3, 0, 3, 3, 1], [3, 1], [0, 0, 2]]


def by_table(stands: np.ndarray, text: list[int]) -> list[float]:
    """Sum of the mass [V, V, V] of guesses that stand, at each token of a text."""
    follows = [0, 0, *text]
    return [
        float(stands[before, last].sum())
        for before, last in zip(follows, follows[1:-1], strict=False)
    ]


@pytest.mark.parametrize(
    ("draft", "sampling", "lenience"),
    [
        *itertools.product(("model", "bigram"), SAMPLINGS, (1.0,)),
        *itertools.product(("uniform", "certain"), SAMPLINGS[:2], (1.0,)),  # Not standardised.
        *itertools.product(("model", "uniform"), SAMPLINGS[::3], (0.3,)),
    ],
)
def test_beta_is_the_overlap_of_tables(draft: str, sampling: Sampling, lenience: float) -> None:
    """Sum of min(p / l, q); at temperature 0 the mass of q where p(x) >= l max p (A.5)."""
    near = toy.near_table()
    shape = (toy.VOCABULARY,) * 3
    corpus = ngrams.texts(toy.VOCABULARY)
    rows = [ngrams.row(corpus, [last], toy.VOCABULARY) for last in range(toy.VOCABULARY)]
    pairs = {
        "model": (MODEL_DRAFT, toy.params(near), toy.distribution(near, sampling)),
        "bigram": (
            NgramDraft(2),
            ngram_params(count_ngrams(corpus, 2, toy.VOCABULARY), 2),
            toy.standardise(np.broadcast_to(np.log(rows), shape), sampling),
        ),
        "uniform": (UniformDraft(), (), np.full(shape, 1 / toy.VOCABULARY)),
        "certain": (toy.CertainDraft(), jax.device_put(toy.certain_table()), None),
    }
    drafter, params, q = pairs[draft]
    pair = toy_pair(drafter, params)
    config = Decoding(toy.VOCABULARY, sampling, max_length=32, rule=Token(lenience))
    found = alpha_on_target_text(pair, [SOURCE] * len(TEXTS), TEXTS, config)
    p = toy.distribution(toy.target_table(), sampling)
    q = toy.certain_distribution() if q is None else q
    stands = np.minimum(p / lenience, q)
    if sampling.greedy and lenience < 1:
        p = toy.distribution(toy.target_table(), Sampling())
        stands = np.where(p >= lenience * p.max(axis=-1, keepdims=True), q, 0.0)
    for beta, text in zip(found, TEXTS, strict=True):
        np.testing.assert_allclose(beta, by_table(stands, text), atol=1e-6)


def test_beta_of_a_transformer_is_the_reference_loops() -> None:
    draft: Draft = TransformerDraft(tiny.DRAFT)
    pair = dataclasses.replace(
        toy_pair(draft, ()),
        target=tiny.TARGET,
        params=Params(tiny.target_params(), tiny.draft_params()),
    )
    pair.vocabulary.size = tiny.VOCABULARY  # pyright: ignore[reportAttributeAccessIssue]
    config = Decoding(tiny.VOCABULARY, Sampling(2.0, top_k=25), 2, max_length=40, eos_ids=())
    source = tiny.sources(1)
    draws = np.asarray(config.draws(5, np.array([0])))[0]
    trace = tracing.generate(tiny.TARGET, draft, pair.params, source[0], draws, config)
    (beta,) = alpha_on_target_text(pair, [jax.device_put(source)], [trace.tokens], config)
    position, checked = 0, 0
    for step in trace.steps:
        # The guess after a rejected one follows a text that was not generated.
        want = np.minimum(step.p[:-1], step.q).sum(axis=-1)
        on_text = min(step.accepted + 1, config.gamma, len(step.emitted))
        there = beta[position : position + on_text]
        np.testing.assert_allclose(there, want[:on_text], atol=2e-5)
        position += len(step.emitted)
        checked += on_text
    assert position == len(trace.tokens) == 40
    assert checked > 20
    assert 0.1 < beta.mean() < 0.95


def test_texts_of_any_width_are_scored_as_each_alone() -> None:
    pair = toy_pair(MODEL_DRAFT, toy.params(toy.near_table()))
    rng = np.random.default_rng(7)
    texts = [rng.integers(2, 4, 1 + i).tolist() for i in range(7)]
    sources = [jnp.ones((1, 2 + (i == 3)), jnp.int32) for i in range(7)]
    config = Decoding(toy.VOCABULARY, max_length=8)
    together = alpha_on_target_text(pair, sources, texts, config, batch_size=4)
    for source, text, beta in zip(sources, texts, together, strict=True):
        (alone,) = alpha_on_target_text(pair, [source], [text], config)
        assert len(beta) == len(text)
        np.testing.assert_allclose(beta, alone, rtol=1e-6)


def test_a_damaged_draft_is_named() -> None:
    table = toy.near_table()
    table[2, 3] = np.nan
    pair = toy_pair(MODEL_DRAFT, toy.params(table))
    with pytest.raises(ValueError, match="toy draft are not finite"):
        alpha_on_target_text(pair, [SOURCE], [[2, 3, 2]], Decoding(toy.VOCABULARY, max_length=3))
