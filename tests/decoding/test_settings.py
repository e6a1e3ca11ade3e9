"""A generation's settings and random numbers."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from speculative.decoding import Decoding
from speculative.sampling import Sampling


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("gamma", -1),
        ("gamma", 1.5),
        ("max_length", 0),
        ("max_length", -3),
        ("max_length", 4.0),
        ("gamma", True),
        ("eos_id", -2),
    ],
)
def test_values_out_of_range_are_named(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{field}.*{value}"):
        dataclasses.replace(Decoding(10), **{field: value})


def test_numpys_numbers_are_numbers() -> None:
    """They become Python's, so that equal settings are compiled once."""
    numbers: list[Any] = [np.float32(0.5), np.int32(3), np.uint8(2), np.int64(9)]
    given = Decoding(10, Sampling(*numbers[:2]), *numbers[2:])
    assert given == Decoding(10, Sampling(0.5, 3), 2, 9)
    assert [type(x) for x in (given.gamma, given.max_length, given.sampling.top_k)] == [int] * 3
    assert type(given.sampling.temperature) is float


@pytest.mark.parametrize(("field", "value"), [("sampling", 1.0), ("rule", "token")])
def test_parts_of_another_type_are_named(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{field} must be of type {field.title()}.*{value!r}"):
        dataclasses.replace(Decoding(10), **{field: value})


@pytest.mark.parametrize("seed", [-1, 2**32, 0.5])
def test_seeds_do_not_wrap_around(seed: Any) -> None:
    with pytest.raises(ValueError, match=f"seed must .* from 0 to 4294967295, not {seed}"):
        Decoding(10).draws(seed, np.arange(1))


@pytest.mark.parametrize("gamma", [0, 1, 7, 62, 63, 100, 300])
@pytest.mark.parametrize("max_length", [1, 40, 62, 128, 250, 2000])
def test_cache_lengths_ascend_to_one_that_holds_everything(gamma: int, max_length: int) -> None:
    """The last step starts with max_length - 1 tokens and appends gamma + 1."""
    config = Decoding(10, gamma=gamma, max_length=max_length)
    sizes = config.cache_lengths()
    assert sizes == sorted(set(sizes))
    assert sizes[0] >= config.room  # Of a whole step.
    assert max_length + gamma <= sizes[-1] <= max_length + gamma + 18


def test_short_answers_get_short_caches() -> None:
    assert Decoding(10, gamma=7, max_length=20).cache_lengths() == [32]
    assert Decoding(10, gamma=7, max_length=500).cache_lengths() == [64, 256, 512]


@pytest.mark.usefixtures("optimized")  # The function itself: conftest cuts few texts' from more.
def test_draws_depend_on_seed_example_and_position_alone() -> None:
    config, examples = Decoding(10, max_length=38), np.array([3, 8, 2**31 - 1])
    every = np.asarray(config.draws(5, examples))
    assert every.shape == (3, 40, 3)
    np.testing.assert_array_equal(config.draws(5, examples[1:2])[0], every[1])
    shorter = dataclasses.replace(config, max_length=20, gamma=3)
    np.testing.assert_array_equal(shorter.draws(5, examples), every[:, :25])
    other = np.asarray(config.draws(6, examples))
    # 720 numbers of 23 bits: a coincidence is rarer than 1 in 30, and fixed.
    assert len(np.unique([every, other])) == 720


def test_draws_are_uniform_and_independent() -> None:
    draws = np.asarray(Decoding(10, max_length=48).draws(0, np.arange(400)), np.float64)
    assert 0 <= draws.min()
    assert draws.max() < 1
    flat = draws.reshape(-1, 3)
    # 20,000 rows: 5 standard errors.
    np.testing.assert_allclose(flat.mean(axis=0), 0.5, atol=5 * np.sqrt(1 / 12 / 20_000))
    np.testing.assert_allclose(np.corrcoef(flat.T), np.eye(3), atol=5 / np.sqrt(20_000))
    following = draws[:, 1:].reshape(-1), draws[:, :-1].reshape(-1)
    assert abs(np.corrcoef(*following)[0, 1]) < 5 / np.sqrt(60_000)
