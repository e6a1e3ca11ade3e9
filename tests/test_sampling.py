"""Standardising and drawing, against float64 NumPy."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speculative import sampling as of_sampling
from speculative.sampling import Kinds, Sampling, argmax, categorical, standardise
from tests import toy

ALMOST_ONE = np.float32(1 - 2**-24)
"""The largest float32 below 1."""

standardised = jax.jit(standardise, static_argnums=1)
drawn = jax.jit(categorical)

SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.3),
    Sampling(temperature=2.5),
    Sampling(temperature=0.0),
    Sampling(temperature=0.0, top_k=3, top_p=0.5),
    Sampling(top_k=1),
    Sampling(top_k=7),
    Sampling(top_k=1000),
    Sampling(top_p=0.05),
    Sampling(top_p=0.9),
    Sampling(temperature=0.7, top_k=5),
    Sampling(temperature=1.4, top_p=0.7),
    Sampling(temperature=1.2, top_k=9, top_p=0.8),
    Sampling(min_p=0.1),
    Sampling(min_p=1.0),
    Sampling(temperature=0.8, top_k=20, top_p=0.9, min_p=0.05),
    Sampling(temperature=0.0, min_p=0.5),
]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("vocabulary", [5, 50])
def test_standardise_is_section_2_2(sampling: Sampling, vocabulary: int) -> None:
    logits = np.random.default_rng(3).normal(0.0, 3.0, (4, 3, vocabulary)).astype(np.float32)
    probabilities = np.asarray(standardised(logits, sampling))
    expected = toy.standardise(logits, sampling)
    assert probabilities.dtype == np.float32
    np.testing.assert_array_equal(probabilities > 0, expected > 0)
    np.testing.assert_allclose(probabilities, expected, rtol=2e-5)


@pytest.mark.parametrize("middle", [(), (3,)], ids=["rows", "blocks"])
def test_rows_of_a_batch_are_standardised_each_in_its_own_way(middle: tuple[int, ...]) -> None:
    sizes = len(SAMPLINGS), *middle, 50
    logits = np.random.default_rng(4).normal(0.0, 3.0, sizes).astype(np.float32)
    together = Sampling.together(SAMPLINGS, Kinds.of(SAMPLINGS))
    found = np.asarray(jax.jit(standardise)(logits, together))
    for row, sampling, own in zip(logits, SAMPLINGS, found, strict=True):
        expected = toy.standardise(row, sampling)
        np.testing.assert_array_equal(own > 0, expected > 0)
        np.testing.assert_allclose(own, expected, rtol=2e-5)


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(top_k=1), [0]),
        (Sampling(top_k=2), [0, 1, 3]),
        (Sampling(top_k=3), [0, 1, 3]),
        (Sampling(top_k=4), [0, 1, 2, 3, 4]),
        (Sampling(top_p=0.55), [0, 1, 3]),
        (Sampling(min_p=0.399), [0, 1, 3]),
        (Sampling(min_p=0.401), [0]),
    ],
    ids=str,
)
def test_tokens_that_tie_with_the_last_one_kept_stay(sampling: Sampling, kept: list[int]) -> None:
    weights = np.array([0.5, 0.2, 0.05, 0.2, 0.05])
    probabilities = np.asarray(standardised(np.log(weights).astype(np.float32), sampling))
    expected = np.where(np.isin(np.arange(5), kept), weights, 0.0)
    np.testing.assert_allclose(probabilities, expected / expected.sum(), rtol=1e-5)


def test_top_p_keeps_the_token_that_reaches_the_mass() -> None:
    """In binary fractions, so that no rounding decides."""
    logits = jnp.log(jnp.array([0.5, 0.25, 0.125, 0.125]))
    for top_p, kept in ((0.49, 1), (0.5, 1), (0.51, 2), (0.74, 2), (0.75, 2), (0.76, 4)):
        assert (standardised(logits, Sampling(top_p=top_p)) > 0).sum() == kept


@pytest.mark.parametrize("vocabulary", [1, 5, 127, 128, 129, 1000])
def test_argmax_is_the_first_greatest(vocabulary: int) -> None:
    rng = np.random.default_rng(vocabulary)
    logits = rng.integers(-4, 4, (40, 2, vocabulary)).astype(np.float32)
    logits[:3] = [[[-np.inf]], [[np.inf]], [[-3e38]]]
    np.testing.assert_array_equal(jax.jit(argmax)(logits), logits.argmax(axis=-1))


def test_bfloat16_logits_are_standardised_in_float32() -> None:
    logits = jnp.asarray(np.random.default_rng(4).normal(size=(2, 40)), jnp.bfloat16)
    probabilities = standardised(logits, Sampling(0.8, top_p=0.9))
    expected = toy.standardise(np.asarray(logits, np.float64), Sampling(0.8, top_p=0.9))
    np.testing.assert_allclose(probabilities, expected, rtol=2e-5)


def test_impossible_tokens_stay_impossible() -> None:
    logits = jnp.array([-jnp.inf, 0.0, -jnp.inf, 1.0])
    for sampling in (Sampling(), Sampling(top_k=3), Sampling(top_p=0.99), Sampling(0.0)):
        probabilities = np.asarray(standardised(logits, sampling))
        assert probabilities[0] == probabilities[2] == 0
        assert probabilities.sum() == pytest.approx(1)


@pytest.mark.parametrize("vocabulary", [5, 128, 129, 8192, 32128])
def test_categorical_is_inversion(vocabulary: int) -> None:
    rng = np.random.default_rng(vocabulary)
    weights = rng.gamma(0.5, size=(64, vocabulary)) * (rng.random((64, vocabulary)) < 0.6)
    weights[:, vocabulary // 2] += 0.01
    # Not normalised: a residual is not.
    weights = (weights * rng.uniform(0.01, 3.0, (64, 1))).astype(np.float32)
    uniforms = rng.random(64).astype(np.float32)
    uniforms[:8], uniforms[8:16] = 0.0, ALMOST_ONE
    tokens = np.asarray(drawn(weights, uniforms))
    assert tokens.dtype == np.int32

    rows = np.arange(64)
    assert (weights[rows, tokens] > 0).all()
    running = np.cumsum(weights, axis=1, dtype=np.float64)
    threshold = uniforms.astype(np.float64) * running[:, -1]
    # Float32 sums may only move a draw across a boundary that lies this close to it.
    slack = 2e-6 * running[:, -1]
    assert (running[rows, tokens] > threshold - slack).all()
    assert (running[rows, tokens] - weights[rows, tokens] <= threshold + slack).all()
    assert (tokens == (running <= threshold[:, None]).sum(axis=1)).mean() > 0.9


@pytest.mark.parametrize("vocabulary", [5, 128, 129, 8192, 32128])
def test_categorical_at_the_ends_of_the_unit_interval(vocabulary: int) -> None:
    """The first and the last token of positive weight; nothing before or beyond them."""
    rng = np.random.default_rng(1)
    weights = rng.random((20, vocabulary)).astype(np.float32)
    first, last = vocabulary // 5, vocabulary - 1 - vocabulary // 5
    weights[:, :first] = weights[:, last + 1 :] = 0.0
    assert (drawn(weights, np.zeros(20, np.float32)) == first).all()
    tokens = np.asarray(drawn(weights, np.full(20, ALMOST_ONE)))
    # Rounding may stop a hair short of the end, never at a token of weight 0.
    tail = weights[:, ::-1].cumsum(axis=1, dtype=np.float64)[:, ::-1]
    assert (tokens <= last).all()
    assert (tail[np.arange(20), tokens] <= 2e-6 * tail[:, 0] + weights[np.arange(20), tokens]).all()


@pytest.mark.parametrize("vocabulary", [1, 5, 128, 129, 8192, 32128])
@pytest.mark.parametrize("mass", [1.0, 1e-30, 3e-7])
def test_categorical_with_all_mass_on_one_token(vocabulary: int, mass: float) -> None:
    for token in {0, vocabulary // 2, vocabulary - 1}:
        weights = np.zeros((3, vocabulary), np.float32)
        weights[:, token] = mass
        uniforms = np.array([0.0, 0.5, ALMOST_ONE], np.float32)
        assert (drawn(weights, uniforms) == token).all()


def test_categorical_never_draws_weight_zero_even_at_the_boundaries() -> None:
    """Thresholds on the running sums themselves, where one ulp decides."""
    rng = np.random.default_rng(6)
    for vocabulary in (128, 300):
        weights = rng.random((500, vocabulary)).astype(np.float32)
        weights *= rng.random(weights.shape) < 0.3
        weights[:, 7] = 1.0
        running = np.cumsum(weights, axis=1)
        cuts = rng.integers(0, vocabulary, 500)
        uniforms = running[np.arange(500), cuts] / running[:, -1]
        uniforms = np.minimum(uniforms, ALMOST_ONE).astype(np.float32)
        tokens = np.asarray(drawn(weights, uniforms))
        assert (weights[np.arange(500), tokens] > 0).all()


@pytest.mark.parametrize("vocabulary", [5, 1000])
def test_what_is_not_a_number_still_gives_a_token(vocabulary: int) -> None:
    """Of a draft it is a guess like others, which an embedding is then read for."""
    for values in (np.full(vocabulary, np.nan), np.where(np.arange(vocabulary) == 3, np.nan, 1.0)):
        tokens = [argmax(jnp.asarray(values)), categorical(jnp.asarray(values), jnp.float32(0.5))]
        assert all(0 <= token < vocabulary for token in tokens), tokens


def test_categorical_takes_any_leading_axes() -> None:
    rng = np.random.default_rng(2)
    weights = rng.random((3, 2, 200)).astype(np.float32)
    uniforms = rng.random((3, 2)).astype(np.float32)
    flat = drawn(weights.reshape(6, 200), uniforms.reshape(6))
    np.testing.assert_array_equal(drawn(weights, uniforms), flat.reshape(3, 2))


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"temperature": -0.1}, "temperature.*-0.1"),
        ({"temperature": math.nan}, "temperature.*nan"),
        ({"temperature": math.inf}, "temperature.*inf"),
        ({"temperature": 1e-37}, "temperature.*1e-37"),  # Logits would overflow.
        ({"top_k": -1}, "top_k.*-1"),
        ({"top_k": 2.5}, "top_k.*2.5"),
        ({"top_p": 0.0}, "top_p.*0.0"),
        ({"top_p": -0.5}, "top_p.*-0.5"),
        ({"top_p": 1.1}, "top_p.*1.1"),
        ({"top_p": math.nan}, "top_p.*nan"),
    ],
)
def test_values_out_of_range_are_named(values: dict[str, float], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Sampling(**values)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("find", [of_sampling._one_by_one, of_sampling.greatest_few])
@pytest.mark.parametrize("shape", [(40,), (3, 129), (2, 8, 1000)])
def test_the_greatest_few(find: Any, shape: tuple[int, ...]) -> None:
    """By a stable sort: among equal values the first comes first; -inf is the least."""
    values = np.random.default_rng(len(shape)).integers(-6, 7, shape).astype(np.float32)
    values[..., ::5] = -np.inf
    at = np.argsort(-values, axis=-1, kind="stable")[..., :8]
    best, found = jax.jit(find, static_argnums=1)(values, 8)
    np.testing.assert_array_equal(found, at)
    np.testing.assert_array_equal(best, np.take_along_axis(values, at, axis=-1))
