"""Where two outputs part, and by how much, on a table of known logits."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from speculative.measurement.exactness import compare_greedy
from tests import toy
from tests.measurement.pairs import MODEL_DRAFT, SOURCE, toy_pair


def table(margin: float) -> np.ndarray:
    """After (3, 2) token 0 is ahead of token 3 by `margin`, and of token 2 by 1.5."""
    logits = toy.target_table()
    logits[3, 2, : toy.VOCABULARY] = [0.25, -4.0, -1.25, 0.25 - margin]
    return logits


@pytest.mark.parametrize(
    ("margin", "dtype", "near"),
    [
        (2e-5, "float32", True),
        (4e-5, "float32", False),
        (0.05, "float32", False),
        (0.05, "bfloat16", True),
        (0.07, "bfloat16", False),
    ],
)
def test_the_margin_is_that_of_the_logits(margin: float, dtype: str, near: bool) -> None:
    """The largest logit is 4, which in bfloat16 is 1/32 from the next."""
    pair = toy_pair(MODEL_DRAFT, (), table(margin))
    difference = compare_greedy(pair, SOURCE, [0, 3, 2, 0, 1], [0, 3, 2, 3, 1], dtype)
    assert difference is not None
    assert (difference.position, difference.autoregressive, difference.speculative) == (3, 0, 3)
    assert difference.margin == pytest.approx(margin, abs=1e-7)
    assert difference.near_tie == near


def test_neither_token_may_trail_the_best() -> None:
    """Two tokens close to each other explain nothing if a third is far ahead of them."""
    logits = table(1.5)
    pair = toy_pair(MODEL_DRAFT, (), logits)
    difference = compare_greedy(pair, SOURCE, [0, 3, 2, 3], [0, 3, 2, 2], "float32")
    assert difference is not None
    assert difference.margin == pytest.approx(1.5)
    assert not difference.near_tie


def test_equal_outputs_differ_nowhere() -> None:
    assert (
        compare_greedy(toy_pair(MODEL_DRAFT, ()), SOURCE, [2, 3, 1], [2, 3, 1], "float32") is None
    )


@pytest.mark.parametrize("shorter", [[2, 3], []])
def test_an_output_that_just_stops_is_no_near_tie(shorter: list[int]) -> None:
    difference = compare_greedy(toy_pair(MODEL_DRAFT, ()), SOURCE, [2, 3, 1], shorter, "float32")
    assert difference is not None
    assert difference.position == len(shorter)
    assert difference.speculative is None
    assert difference.margin == math.inf
    assert not difference.near_tie


def test_texts_longer_than_one_block_of_padding() -> None:
    text = [3, 2] * 20
    pair = toy_pair(MODEL_DRAFT, (), table(0.5))
    difference = compare_greedy(pair, jnp.asarray(SOURCE), [*text, 0], [*text, 3], "float32")
    assert difference is not None
    assert (difference.position, difference.margin) == (40, pytest.approx(0.5))
