"""Counting bigrams by hand, and walking the table."""

import jax.numpy as jnp
import numpy as np
import pytest

from speculative.drafts import BigramDraft, bigram_params, count_bigrams
from speculative.sampling import Sampling
from tests import toy

SEQUENCES = [np.array([2, 3, 2, 1]), np.array([2, 1]), np.array([1])]
"""With the start: 0-2-3-2-1, 0-2-1 and 0-1."""

FOLLOWED = np.array(
    [
        [0, 1, 2, 0],
        [0, 0, 0, 0],
        [0, 2, 0, 1],
        [0, 0, 1, 0],
    ]
)
SAID = np.array([0, 3, 3, 1])


def test_pairs_are_counted_as_by_hand() -> None:
    counts = count_bigrams(SEQUENCES)
    dense = np.zeros((4, 4), int)
    dense[counts["previous"], counts["following"]] = counts["count"]
    np.testing.assert_array_equal(dense, FOLLOWED)
    assert len(counts["count"]) == np.count_nonzero(FOLLOWED)


@pytest.mark.parametrize("smoothing", [1.0, 0.25])
def test_a_row_mixes_pairs_with_single_tokens(smoothing: float) -> None:
    unigram = (SAID + 1 / 4) / (SAID.sum() + 1)
    want = np.log(FOLLOWED + smoothing * unigram)
    got = bigram_params(count_bigrams(SEQUENCES), 4, smoothing)["log_counts"]
    assert got.dtype == jnp.float16
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)


def test_another_start_token() -> None:
    got = bigram_params(count_bigrams([np.array([2, 1])], start=4), 5)["log_counts"]
    assert got[4].argmax() == 2
    assert (got[0] == got[3]).all()


def test_every_row_is_a_proper_distribution() -> None:
    """Skewed counts over many pieces: the logarithms stay finite in half precision."""
    counts = count_bigrams([np.repeat(2, 100_000), np.array([3, 1])])
    table = np.asarray(bigram_params(counts, 4000, smoothing=1e-3)["log_counts"], np.float32)
    assert np.isfinite(table).all()
    q = toy.standardise(table[:5], Sampling())
    np.testing.assert_allclose(q.sum(axis=1), 1)
    assert (q > 0).all()


def test_nothing_to_count_is_said() -> None:
    with pytest.raises(ValueError, match="at least one sequence"):
        count_bigrams([])


@pytest.mark.parametrize(
    ("vocabulary", "smoothing", "said"),
    [
        (3, 1.0, "token 3.* 3 pieces"),
        (4, 0.0, "smoothing.*0.0"),
        (4, -1.0, "smoothing.*-1.0"),
        (4, float("nan"), "smoothing.*nan"),
    ],
)
def test_what_makes_no_table_is_named(vocabulary: int, smoothing: float, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        bigram_params(count_bigrams(SEQUENCES), vocabulary, smoothing)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.5, top_k=2), Sampling(0.0)], ids=str)
def test_guesses_walk_the_table(sampling: Sampling) -> None:
    """Each guess is the inversion of its row, and its row follows from the guess before."""
    rng = np.random.default_rng(1)
    table = rng.normal(0.0, 1.5, (6, 6))
    uniforms = rng.random((50, 3)).astype(np.float32)
    last = rng.integers(0, 5, 50)
    params = {"log_counts": jnp.asarray(table, jnp.float32)}
    draft = BigramDraft()
    state = draft.start(params, jnp.ones((50, 1), jnp.int32), 64, ())
    # Five of the table's six tokens may be guessed.
    proposal = draft.propose(params, state, jnp.asarray(last), jnp.asarray(uniforms), sampling, 5)
    guesses, q = np.asarray(proposal.guesses), np.asarray(proposal.q)
    assert (guesses.shape, q.shape) == ((50, 3), (50, 3, 5))
    before = np.column_stack([last, guesses[:, :-1]])
    want = toy.standardise(table[:, :5], sampling)[before]
    np.testing.assert_allclose(q, want, atol=1e-6)
    running = want.cumsum(axis=-1)
    np.testing.assert_array_equal(guesses, (running <= uniforms[..., None]).sum(axis=-1))
    assert draft.commit(proposal, jnp.ones(50, jnp.int32)) == ()


def test_a_negative_token_is_refused() -> None:
    with pytest.raises(ValueError, match="-1"):
        bigram_params(count_bigrams([np.array([2, -1, 1])]), 5)
