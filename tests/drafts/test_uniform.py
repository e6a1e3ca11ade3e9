import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speculative.drafts import UniformDraft
from speculative.sampling import Sampling
from tests import toy


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.3, top_k=2, top_p=0.5)], ids=str)
@pytest.mark.parametrize("vocabulary", [7, 300])
def test_guesses_and_q_are_uniform_whatever_the_sampling(
    vocabulary: int, sampling: Sampling
) -> None:
    uniforms = (np.arange(4 * vocabulary) + 0.5) / (4 * vocabulary)
    rows = uniforms.astype(np.float32).reshape(4, vocabulary)
    draft = UniformDraft()
    state = draft.start((), jnp.ones((4, 1), jnp.int32), 64, toy.NOTHING)
    propose = jax.jit(draft.propose, static_argnums=(4, 5))
    proposal = propose((), state, np.zeros(4, np.int32), rows, sampling, vocabulary)
    assert proposal.q is not None
    assert proposal.q.shape == (4, vocabulary, vocabulary)
    np.testing.assert_allclose(proposal.q, 1 / vocabulary, rtol=1e-6)
    # Equally spaced numbers give every token as often.
    counts = np.bincount(np.ravel(proposal.guesses), minlength=vocabulary)
    np.testing.assert_array_equal(counts, 4)
    assert draft.commit((), proposal, jnp.zeros(4, jnp.int32), {}) == ()
