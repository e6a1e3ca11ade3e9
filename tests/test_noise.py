"""Gumbel noise against float64 NumPy, and against what noise must be: distributed, independent.

Statistical checks have fixed seeds; correct noise would fail any one here with probability 1e-6 at
most, all together.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from scipy import stats

from speculative import noise
from speculative.backends.cpu import kernels

CHECKS = 20
"""More p-values than all tests here compute together."""
THRESHOLD = 1e-6 / CHECKS

PIECES, PADDED = 32_100, 32_128
"""Of T5's vocabulary, and of its checkpoints."""

KERNELS = pytest.param("kernel", marks=pytest.mark.skipif(not kernels.native(), reason="compiler"))
PATHS = [KERNELS, "xla"]
"""How noise is made: by the kernel for CPU, or by `noise._of_keys` wherever it cannot be used."""


def turned(words: np.ndarray, by: int) -> np.ndarray:
    return (words << np.uint32(by)) | (words >> np.uint32(32 - by))


@np.errstate(over="ignore")  # Numbers wrap around; of scalars NumPy tells it.
def threefry(key: np.ndarray, counter: np.ndarray) -> np.ndarray:
    """Threefry-2x32 of 20 rounds (Salmon et al., 2011, section 3.3): [..., 2] of [..., 2]."""
    key, counter = np.broadcast_arrays(key.astype(np.uint32), counter.astype(np.uint32))
    parity = key[..., 0] ^ key[..., 1] ^ np.uint32(0x1BD11BDA)
    schedule = [key[..., 0], key[..., 1], parity]
    x, y = counter[..., 0] + schedule[0], counter[..., 1] + schedule[1]
    rotations = [13, 15, 26, 6, 17, 29, 16, 24]
    for i in range(20):
        x = x + y
        y = turned(y, rotations[i % 8]) ^ x
        if i % 4 == 3:
            number = i // 4 + 1
            x = x + schedule[number % 3]
            y = y + schedule[(number + 1) % 3] + np.uint32(number)
    return np.stack([x, y], axis=-1)


def folded(key: np.ndarray, number: np.ndarray | int) -> np.ndarray:
    """Keys [..., 2] folded with numbers: [..., 2]."""
    number = np.asarray(number)
    return threefry(key, np.stack([np.zeros_like(number), number], axis=-1))


def of_words(words: np.ndarray) -> np.ndarray:
    """Gumbel's numbers [...] of words [..., 2]: 48 of their bits are a number between 0 and 1."""
    bits = words[..., 0].astype(np.uint64) << np.uint64(16) | words[..., 1] >> np.uint64(16)
    return -np.log(-np.log1p(-(bits + 0.5) * 2.0**-48))


def alone(seed: int, example: int, position: int, tokens: np.ndarray) -> np.ndarray:
    """The noise of tokens [...] at a position of a text, in float64."""
    key = np.array([0, seed], np.uint32)
    return of_words(folded(folded(folded(key, example), position), tokens))


@pytest.fixture
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which way of making noise `made` takes."""
    if request.param == "xla":
        monkeypatch.setattr(kernels, "native", lambda: False)
    return request.param


def made(seed: int, examples: list[int], lengths: list[int], positions: int, size: int) -> Array:
    """By a program of its own, for it may differ from test to test how it is made."""
    gumbel = jax.jit(lambda keys, lengths: noise.gumbel(keys, lengths, positions, size))
    return gumbel(noise.keys_of(seed, np.array(examples, np.int32)), jnp.array(lengths, jnp.int32))


BY_PATH = pytest.mark.parametrize("path", PATHS, indirect=True)


def test_the_generator_of_these_tests_is_threefry() -> None:
    """By the known answers of its authors' library, and by JAX."""
    known = [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 2, (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ]
    for key, counter, words in known:
        np.testing.assert_array_equal(threefry(np.array(key), np.array(counter)), words)
    for seed, number in ((0, 0), (3, 1), (2**32 - 1, 2**32 - 1), (5, 32_127)):
        key = jax.random.key(seed, impl="threefry2x32")
        expected = jax.random.key_data(jax.random.fold_in(key, number))
        np.testing.assert_array_equal(folded(np.array([0, seed]), number), expected)


def test_keys_are_those_of_fold_in() -> None:
    examples = np.array([0, 1, 77, 2**31 - 1], np.int32)
    for seed in (0, 9, 2**32 - 1):
        found = noise.keys_of(seed, examples)
        np.testing.assert_array_equal(found, folded(np.array([0, seed]), examples))


@BY_PATH
@pytest.mark.parametrize("size", [1, 5, 17, 600])
def test_noise_is_that_of_float64(path: str, size: int) -> None:
    """Of every seed, example, position and token, whatever the row they share a batch with."""
    examples, lengths, positions = [0, 5, 123_456], [0, 700, 3], 4
    found = np.asarray(made(11, examples, lengths, positions, size))
    assert found.shape == (3, positions, size) and found.dtype == np.float32
    for row, (example, length) in enumerate(zip(examples, lengths, strict=True)):
        for i in range(positions):
            expected = alone(11, example, length + i, np.arange(size))
            np.testing.assert_allclose(found[row, i], expected, rtol=1e-7, atol=1e-6)


@BY_PATH
def test_a_padded_vocabulary_has_the_same_noise(path: str) -> None:
    given = 2, [4, 1], [3, 0]
    whole = made(*given, 2, PADDED)
    expected = alone(2, 4, 4, np.arange(PADDED))
    np.testing.assert_allclose(whole[0, 1], expected, rtol=1e-7, atol=1e-6)
    for size in (1, 5, 16, 17, PIECES):
        np.testing.assert_array_equal(made(*given, 2, size), whole[..., :size])


# Far in the tails, found by a search: 24 bits would cut noise at 17.
EXTREME = [
    (7, 58, 67, 6002, 20.650),
    (7, 55, 326, 22404, 19.996),
    (7, 47, 405, 3117, -3.107),
    (7, 52, 340, 6698, -2.993),
]
"""Seed, example, position, token, and their noise."""


@BY_PATH
def test_the_tails_are_exact(path: str) -> None:
    for seed, example, position, token, value in EXTREME:
        found = made(seed, [example], [position], 1, token + 1)[0, 0, token]
        expected = alone(seed, example, position, np.array([token]))[0]
        np.testing.assert_allclose(found, expected, rtol=1e-7, atol=1e-6)
        assert abs(found - value) < 0.01


def test_the_greatest_and_least_words_give_finite_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """From 48 bits that are all 0, or all 1, or next to that, and around a half."""
    low = np.array([0, 0, 0, 255, 256, 2**31 - 1, 2**31, 2**32 - 1, 2**32 - 1, 2**32 - 257])
    high = np.array([0, 2**16, 2**32 - 1, 9, 9, 2**32 - 1, 0, 0, 2**32 - 1, 9])
    words = np.stack([low, high], axis=-1).astype(np.uint32)
    monkeypatch.setattr(
        noise, "_words", lambda *_: (jnp.array(words[:, 0]), jnp.array(words[:, 1]))
    )
    found = noise._of_keys(jnp.zeros(2, jnp.uint32), len(words))
    np.testing.assert_allclose(found, of_words(words), rtol=1.5e-7, atol=1e-6)
    assert found[0] > 33 and found[8] < -3.5


@BY_PATH
def test_noise_has_gumbels_distribution(path: str) -> None:
    """By the test of Kolmogorov and Smirnov on 200,000 numbers of many keys."""
    found = np.asarray(made(1, [*range(40)], [*range(40)], 50, 100), np.float64)
    assert stats.kstest(found.ravel(), stats.gumbel_r.cdf).pvalue > THRESHOLD


def test_tails_are_as_heavy_as_gumbels() -> None:
    """By how many of four million numbers lie beyond bounds."""
    found = np.asarray(made(3, [0, 1], [0, 9], 64, PADDED))
    for bound in (4.0, 8.0, 11.0):
        count = int((found > bound).sum())
        chance = float(stats.gumbel_r.sf(bound))
        assert stats.binomtest(count, found.size, chance).pvalue > THRESHOLD
    for bound in (-1.5, -2.5):
        count = int((found < bound).sum())
        chance = float(stats.gumbel_r.cdf(bound))
        assert stats.binomtest(count, found.size, chance).pvalue > THRESHOLD


def correlation_p_value(one: np.ndarray, other: np.ndarray) -> float:
    """That of two samples of noise being uncorrelated, as the uniform numbers that they come to."""
    uniform = np.exp(-np.exp(-np.stack([one.ravel(), other.ravel()]).astype(np.float64)))
    correlation = np.corrcoef(uniform)[0, 1]
    return float(2 * stats.norm.sf(abs(correlation) * one.size**0.5))


def test_noise_of_neighbours_is_independent() -> None:
    """Over 100,000 pairs each of neighbouring tokens, positions, examples and seeds."""
    examples, positions, size = 21, 51, 100
    found = np.asarray(made(6, [*range(examples)], [0] * examples, positions, size))
    other = np.asarray(made(7, [*range(examples)], [0] * examples, positions, size))
    pairs = {
        "tokens": (found[..., 1:], found[..., :-1]),
        "positions": (found[:, 1:], found[:, :-1]),
        "examples": (found[1:], found[:-1]),
        "seeds": (found, other),
        # Sums of numbers must not do either: an example's position is not another's.
        "examples and positions": (found[1:, :-1], found[:-1, 1:]),
        "positions and tokens": (found[:, 1:, :-1], found[:, :-1, 1:]),
    }
    for name, (one, another) in pairs.items():
        assert one.size >= 100_000, name
        assert correlation_p_value(one, another) > THRESHOLD, name
    assert correlation_p_value(found, found + 0.1 * other) < THRESHOLD
