"""Ranks of the target's tokens among a draft's choices, on enumerable models."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from speculative import noise
from speculative.decoding import Decoding
from speculative.decoding.rules import Coupled
from speculative.drafts import TransformerDraft
from speculative.measurement.ranks import shares_on_target_text
from speculative.sampling import Sampling
from tests import toy
from tests.measurement.pairs import toy_pair

TEXT = [2, 0, 3, 2, 1]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_shares_of_ranks_are_those_of_tables(temperature: float) -> None:
    """Above temperature 0 of log q with the noise of each token's position."""
    sampling = Sampling(temperature)
    config = Decoding(toy.VOCABULARY, sampling, 1, 8, toy.ENDS, Coupled())
    draws = config.draws(3, np.array([5]))
    own = np.asarray(noise.gumbel(draws, jnp.zeros(1, jnp.int32), len(TEXT), toy.VOCABULARY))[0]
    logits = toy.near_table()[:, :, : toy.VOCABULARY]
    ranks = []
    for token, here, g in zip(TEXT, itertools.pairwise((0, 0, *TEXT[:-1])), own, strict=True):
        scores = logits[here] / (temperature or 1) + (g if temperature else 0)
        ranks.append(int((scores > scores[token]).sum()))
    pair = toy_pair(TransformerDraft(toy.MarkovModel()), toy.params(toy.near_table()))
    found = shares_on_target_text(pair, [jnp.ones((1, 1), jnp.int32)], [TEXT], [draws], config)
    np.testing.assert_allclose(found[:4], np.bincount(ranks, minlength=4) / len(TEXT))
    assert not found[4:].any()
