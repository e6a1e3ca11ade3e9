"""A draft that reads the target's hidden states guesses as its training pass says it should."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speculative.drafts import HiddenDraft, model_draft
from speculative.sampling import Sampling, standardise
from tests import tiny

GAMMA = 3
DRAFT = HiddenDraft(tiny.HIDDEN)
LAYERS = tiny.HIDDEN.config.target_layers
SAMPLING = Sampling(0.8)
ROWS = GAMMA + 1
TEXT = 14

start = jax.jit(HiddenDraft.start, static_argnums=(0, 3))
propose = jax.jit(HiddenDraft.propose, static_argnums=(0, 5, 6))
begin = jax.jit(functools.partial(tiny.TARGET.start, layers=DRAFT.layers), static_argnums=2)
extend = jax.jit(functools.partial(tiny.TARGET.extend, layers=DRAFT.layers))


def unrolled(text: np.ndarray) -> list[np.ndarray]:
    """[B, L, V] by guess, of texts [B, L] that begin with the start token, as training has them."""
    sources = jnp.asarray(tiny.sources(ROWS))
    encoded = tiny.TARGET.encode(tiny.target_params(), sources)
    given = tiny.target_params(), sources, jnp.asarray(text)
    _, hidden = tiny.TARGET.forward_with_hidden(*given, layers=LAYERS)
    hidden = jnp.concatenate([hidden[name] for name in LAYERS], axis=-1)
    segments = (sources != 0).astype(int), jnp.ones_like(text)
    given = tiny.hidden_params(), jnp.asarray(text), segments, encoded, hidden, GAMMA
    return [np.asarray(logits[..., : tiny.VOCABULARY]) for logits in tiny.HIDDEN.unroll(*given)]


def test_q_is_that_of_the_training_pass_however_much_of_a_block_stands() -> None:
    """Row b accepts b guesses, then another number, and so on; the text so far is teacher-forced.

    The training pass sees whole texts under masks, the draft caches that it corrects as it goes.
    """
    rng = np.random.default_rng(0)
    sources = jnp.asarray(tiny.sources(ROWS))
    begun = begin(tiny.target_params(), sources, 64)
    state, target = start(DRAFT, tiny.hidden_params(), sources, 64, begun), begun.state
    texts, last = [[0] for _ in range(ROWS)], jnp.zeros(ROWS, jnp.int32)
    for turn in range(4):
        uniforms = jnp.asarray(rng.random((ROWS, GAMMA)), jnp.float32)
        proposal = propose(
            DRAFT, tiny.hidden_params(), state, last, uniforms, SAMPLING, tiny.VOCABULARY
        )
        assert proposal.q is not None
        guesses = np.asarray(proposal.guesses)
        whole = np.zeros((ROWS, 24), int)
        for row, text in enumerate(texts):
            whole[row, : len(text) + GAMMA] = [*text, *guesses[row]]
        expected = unrolled(whole)
        for row, text in enumerate(texts):
            for k in range(GAMMA):
                q = standardise(expected[k][row, len(text) - 1 + k], SAMPLING)
                np.testing.assert_allclose(proposal.q[row, k], q, atol=1e-5)
        chunk = jnp.concatenate([last[:, None], proposal.guesses], axis=1)
        _, target, hidden = extend(tiny.target_params(), target, chunk)
        accepted = (np.arange(ROWS) + turn) % (GAMMA + 1)
        last = jnp.asarray(rng.integers(2, tiny.VOCABULARY, ROWS), jnp.int32)
        for row, text in enumerate(texts):
            text += [*guesses[row, : accepted[row]].tolist(), int(last[row])]
        lengths = jnp.array([len(text) - 1 for text in texts])
        target = tiny.TARGET.rewind(target, lengths)
        state = DRAFT.commit(proposal, jnp.asarray(accepted), hidden)


def test_the_hidden_states_matter() -> None:
    """Else the test above would say nothing about them."""
    text = np.random.default_rng(1).integers(2, tiny.VOCABULARY, (ROWS, 8))
    text[:, 0] = 0
    first, second, third = (np.asarray(jax.nn.softmax(logits)) for logits in unrolled(text))
    assert np.abs(first - second)[:, 1:].sum(-1).mean() > 0.05
    assert np.abs(third - second)[:, 2:].sum(-1).mean() > 0.01


def test_a_models_configuration_says_what_its_draft_reads() -> None:
    assert model_draft(tiny.HIDDEN) == DRAFT
    assert model_draft(tiny.READER).layers == ("encoder",)
    with pytest.raises(ValueError, match="source_dim"):
        tiny.DRAFT.config.replace(target_layers=LAYERS)
