"""The divergence of a target's probabilities in int8, against float64."""

import pathlib

import jax
import numpy as np
import pytest

from speculative import load
from speculative.measurement import teacher_forced
from speculative.measurement.divergence import divergence

TEXTS = [[5, 9, 1], [7, 1], [60, 3, 8, 2, 1], [11, 1], [4, 4, 1]]


@pytest.mark.parametrize("batch", [1, 4])
def test_it_is_that_of_all_tokens(
    batch: int, saved_pair: tuple[pathlib.Path, pathlib.Path]
) -> None:
    target, draft = map(str, saved_pair)
    one, other = (load(target, draft, quantize=held) for held in ("none", "int8"))
    sources = [one.encode(text) for text in ("a map", "an editor", "b", "a", "c d e")]
    found, same = divergence(one, other, sources, TEXTS, batch)
    wanted, equal, size = [], [], one.vocabulary.size
    for source, text in zip(sources, TEXTS, strict=True):
        row = jax.device_put(np.array([text], np.int32))
        logits = [
            np.asarray(
                teacher_forced.logits(pair.target, pair.params.target, source, row)[0, :, :size],
                np.float64,
            )
            for pair in (one, other)
        ]
        p, q = (np.exp(x - x.max(axis=-1, keepdims=True)) for x in logits)
        p, q = (x / x.sum(axis=-1, keepdims=True) for x in (p, q))
        wanted += (p * np.log(p / q)).sum(axis=-1).tolist()
        equal += (p.argmax(axis=-1) == q.argmax(axis=-1)).tolist()
    np.testing.assert_allclose(found, wanted, rtol=1e-2, atol=1e-6)
    assert len(found) == sum(map(len, TEXTS)) and max(wanted) > 1e-5
    np.testing.assert_array_equal(same, equal)
    assert divergence(one, one, sources, TEXTS, batch)[0].max() < 1e-6
