"""Where two outputs part, and by how much, on a table of known logits."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from speculative.measurement import teacher_forced
from speculative.measurement.exactness import compare_greedy, rounding
from speculative.models import T5, T5Config
from tests import saved, tiny, toy
from tests.measurement.pairs import MODEL_DRAFT, SOURCE, toy_pair


def table(margin: float) -> np.ndarray:
    """After (3, 2) token 0 is ahead of token 3 by `margin`, and of token 2 by 1.5."""
    logits = toy.target_table()
    logits[3, 2, : toy.VOCABULARY] = [0.25, -4.0, -1.25, 0.25 - margin]
    return logits


@pytest.mark.parametrize(
    ("margin", "dtype", "near"),
    [
        (4e-6, "float32", True),
        (5e-6, "float32", False),
        (0.03, "float32", False),
        (0.03, "bfloat16", True),
        (0.033, "bfloat16", False),
    ],
)
def test_the_margin_is_that_of_the_logits(
    margin: float, dtype: str, near: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest logit is 4; in bfloat16 numbers from there on are 1/32 apart."""
    pair = toy_pair(MODEL_DRAFT, (), table(margin))
    config = pair.target.config.replace(dtype=dtype)
    monkeypatch.setattr(type(pair.target), "config", config)
    difference = compare_greedy(pair, SOURCE, [0, 3, 2, 0, 1], [0, 3, 2, 3, 1])
    assert difference is not None
    assert (difference.position, difference.autoregressive, difference.speculative) == (3, 0, 3)
    assert difference.margin == pytest.approx(margin, abs=1e-7)
    assert difference.near_tie == near


@pytest.mark.parametrize(("dtype", "least"), [("float32", 0.1), ("bfloat16", 0.05)])
@pytest.mark.parametrize("layers", [1, 4])
def test_another_order_of_addition_moves_logits_within_the_tolerance(
    layers: int, dtype: str, least: float
) -> None:
    """The two largest, towards each other, at 1,024 positions of a T5 whose MLPs are shuffled."""
    target = T5(T5Config(1024, 64, 8, 2, 1024, 1, layers, dtype=dtype))
    stored = saved.random(target.config, 0)
    texts = np.random.default_rng(1).integers(0, 1024, (16, 64))
    own, other = (
        np.asarray(teacher_forced.logits(target, tiny.rounded(one, dtype), tiny.sources(16), texts))
        for one in (stored, tiny.shuffled(stored))
    )
    best = np.argsort(own, axis=-1)[..., -2:]
    margins = [np.diff(np.take_along_axis(x, best, axis=-1))[..., 0] for x in (own, other)]
    bound = rounding(np.abs(own).max(axis=-1), target.config)
    moved = np.abs(margins[0] - margins[1]) / bound
    assert least < moved.max() <= 1


def test_neither_token_may_trail_the_best() -> None:
    """Two tokens close to each other explain nothing if a third is far ahead of them."""
    logits = table(1.5)
    pair = toy_pair(MODEL_DRAFT, (), logits)
    difference = compare_greedy(pair, SOURCE, [0, 3, 2, 3], [0, 3, 2, 2])
    assert difference is not None
    assert difference.margin == pytest.approx(1.5)
    assert not difference.near_tie


def test_equal_outputs_differ_nowhere() -> None:
    assert compare_greedy(toy_pair(MODEL_DRAFT, ()), SOURCE, [2, 3, 1], [2, 3, 1]) is None


@pytest.mark.parametrize("shorter", [[2, 3], []])
def test_an_output_that_just_stops_is_no_near_tie(shorter: list[int]) -> None:
    difference = compare_greedy(toy_pair(MODEL_DRAFT, ()), SOURCE, [2, 3, 1], shorter)
    assert difference is not None
    assert difference.position == len(shorter)
    assert difference.speculative is None
    assert difference.margin == math.inf
    assert not difference.near_tie


def test_texts_longer_than_one_block_of_padding() -> None:
    text = [3, 2] * 20
    pair = toy_pair(MODEL_DRAFT, (), table(0.5))
    difference = compare_greedy(pair, jnp.asarray(SOURCE), [*text, 0], [*text, 3])
    assert difference is not None
    assert (difference.position, difference.margin) == (40, pytest.approx(0.5))
