"""The draft's distributions are its model's at the prefix it should have seen, always."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speculative.drafts import TransformerDraft
from speculative.sampling import Sampling
from tests import numpy_models, saved, tiny, toy

GAMMA = 3
DRAFT = TransformerDraft(tiny.TARGET)
SAMPLING = Sampling(0.8)
VOCABULARY = tiny.VOCABULARY

start = jax.jit(TransformerDraft.start, static_argnums=(0, 3))
propose = jax.jit(TransformerDraft.propose, static_argnums=(0, 5, 6))


@functools.cache
def q_at(row: int, prefix: tuple[int, ...]) -> np.ndarray:
    """[V] by float64 T5, after the start token and `prefix`."""
    source = tiny.sources(GAMMA + 1)[row]
    logits = numpy_models.logits(
        tiny.stored_params(), tiny.TARGET.config, source[source >= 0], np.array([0, *prefix])
    )
    return toy.standardise(logits[-1, :VOCABULARY], SAMPLING)


def test_q_follows_the_accepted_prefix_however_much_of_a_block_stands() -> None:
    """Row b accepts b guesses, then each row another number, so that all pairs of steps occur.

    With all guesses accepted the model has not consumed its own last one: its next q is right
    only if it catches up; and the filler it then feeds may not show in any other row.
    """
    rng = np.random.default_rng(0)
    rows = GAMMA + 1
    params = tiny.target_params()
    state = start(DRAFT, params, jax.device_put(tiny.sources(rows)), 64, toy.NOTHING)
    prefixes: list[tuple[int, ...]] = [()] * rows
    last = np.zeros(rows, np.int32)
    for shift in range(2 * rows):
        uniforms = rng.random((rows, GAMMA)).astype(np.float32)
        proposal = propose(DRAFT, params, state, last, uniforms, SAMPLING, VOCABULARY)
        assert proposal.q is not None
        guesses = np.asarray(proposal.guesses)
        for row in range(rows):
            for i in range(GAMMA):
                want = q_at(row, (*prefixes[row], *guesses[row, :i].tolist()))
                np.testing.assert_allclose(proposal.q[row, i], want, atol=1e-5)
                token = (want.cumsum() <= uniforms[row, i]).sum()
                assert guesses[row, i] == token
        accepted = (np.arange(rows) * (1 + shift // rows) + shift) % rows
        last = rng.integers(2, VOCABULARY, rows).astype(np.int32)
        for row in range(rows):
            stands = guesses[row, : accepted[row]].tolist()
            prefixes[row] = (*prefixes[row], *stands, int(last[row]))
        state = DRAFT.commit((), proposal, jax.device_put(accepted), {})


def test_at_temperature_0_guesses_are_the_argmax_and_certain() -> None:
    params = tiny.target_params()
    rows = GAMMA + 1
    state = start(DRAFT, params, jax.device_put(tiny.sources(rows)), 64, toy.NOTHING)
    last = jnp.zeros(rows, jnp.int32)
    proposal = propose(
        DRAFT, params, state, last, jnp.zeros((rows, GAMMA)), Sampling(0.0), VOCABULARY
    )
    assert proposal.q is None
    for row in range(rows):
        prefix: tuple[int, ...] = ()
        for guess in np.asarray(proposal.guesses)[row].tolist():
            assert guess == q_at(row, prefix).argmax()
            prefix = (*prefix, guess)


@pytest.mark.parametrize("gamma", [1, 2, 5])
def test_any_gamma_catches_up(gamma: int) -> None:
    """On the toy model, all guesses accepted three times in a row."""
    draft = TransformerDraft(toy.MarkovModel())
    table = toy.near_table()
    q = toy.distribution(table, Sampling())
    state = start(draft, toy.params(table), jnp.ones((1, 1), jnp.int32), 64, toy.NOTHING)
    said = [0, 0]
    for _ in range(3):
        last = jnp.array([said[-1]])
        uniforms = jnp.full((1, gamma), 0.4)
        proposal = propose(
            draft, toy.params(table), state, last, uniforms, Sampling(), toy.VOCABULARY
        )
        assert proposal.q is not None
        for i, guess in enumerate(np.asarray(proposal.guesses)[0].tolist()):
            np.testing.assert_allclose(proposal.q[0, i], q[said[-2], said[-1]], atol=1e-6)
            said.append(guess)
        said.append(3)
        state = draft.commit(toy.params(table), proposal, jnp.array([gamma]), {})


def test_a_draft_may_read_the_encoder_of_its_target() -> None:
    """Its q is the float64 model's of the draft's decoder on the target's encoder."""
    draft = TransformerDraft(tiny.READER, reads_target=True)
    inputs = jax.device_put(tiny.sources(2))
    begin = jax.jit(functools.partial(tiny.TARGET.start, layers=draft.layers), static_argnums=2)
    begun = begin(tiny.target_params(), inputs, 8)
    state = start(draft, tiny.reader_params(), inputs, 64, begun)
    last, uniforms = jnp.zeros(2, jnp.int32), jnp.full((2, 1), 0.5)
    given = tiny.reader_params(), state, last, uniforms, SAMPLING, VOCABULARY
    proposal = propose(draft, *given)
    assert proposal.q is not None
    stored = saved.random(tiny.READER.config, 2)
    for row, source in enumerate(tiny.sources(2)):
        source = source[source >= 0]
        encoded = numpy_models.encode(tiny.stored_params(), tiny.TARGET.config, source)
        logits = numpy_models.decode(stored, tiny.READER.config, encoded, np.array([0]))
        want = toy.standardise(logits[0, :VOCABULARY], SAMPLING)
        np.testing.assert_allclose(proposal.q[row, 0], want, atol=1e-5)
