"""A draft that reads the target's hidden states guesses as its training pass says it should.

The training pass sees whole texts under masks; the draft has caches, which it corrects as it goes.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from speculative.drafts import HiddenDraft, model_draft
from speculative.models import DecoderOnly, DecoderOnlyConfig, FlaxModel
from speculative.models.encoder_decoder import Seq2Seq
from speculative.models.interface import Chunk
from speculative.models.reads import Reads
from speculative.models.t5gemma2 import T5Gemma2Config
from speculative.sampling import Sampling, standardise
from speculative.types import PyTree
from tests import saved, tiny

GAMMA = 3
ROWS = GAMMA + 1
SAMPLING = Sampling(0.8)
LAYERS = tiny.HIDDEN.config.reads.target_layers

start = jax.jit(HiddenDraft.start, static_argnums=(0, 3))
propose = jax.jit(HiddenDraft.propose, static_argnums=(0, 5, 6))
commit = jax.jit(HiddenDraft.commit, static_argnums=0)
follow = jax.jit(HiddenDraft.follow, static_argnums=0)


@functools.partial(jax.jit, static_argnums=(0, 1))
def unroll(
    target: FlaxModel,
    draft: FlaxModel,
    params: PyTree,
    draft_params: PyTree,
    inputs: Array,
    texts: Array,
) -> list[Array]:
    """Logits [B, L, V] by guess, of texts [B, L], as training has them."""
    encoded = target.encode(params, inputs)
    _, hidden = target.forward_with_hidden(params, inputs, texts, layers=LAYERS)
    hidden = jnp.concatenate([hidden[name] for name in LAYERS], axis=-1)
    segments = (inputs != target.pad_id).astype(int), jnp.ones_like(texts)
    return draft.unroll(draft_params, texts, segments, encoded, hidden, GAMMA)


class Given(NamedTuple):
    """A target and a draft of its hidden states, with inputs [4, S]."""

    target: FlaxModel
    params: PyTree
    draft: HiddenDraft
    draft_params: PyTree
    inputs: np.ndarray

    def texts(self) -> list[list[int]]:
        """The beginning of each row's text, the first `last` included."""
        if not self.target.decoder_only:
            return [[0] for _ in self.inputs]
        return [row[row >= 0].tolist() for row in self.inputs]

    def unrolled(self, texts: np.ndarray) -> list[np.ndarray]:
        """As `unroll`, without padding of the vocabulary."""
        models = self.target, self.draft.model
        found = unroll(*models, self.params, self.draft_params, self.inputs, texts)
        return [np.asarray(logits)[..., : tiny.VOCABULARY] for logits in found]


def t5() -> Given:
    draft = HiddenDraft(tiny.HIDDEN)
    return Given(tiny.TARGET, tiny.target_params(), draft, tiny.hidden_params(), tiny.sources(ROWS))


def gpt() -> Given:
    target = DecoderOnlyConfig(64, 16, 2, 8, 32, 2, max_positions=64)
    small = DecoderOnlyConfig(56, 8, 1, 8, 16, 1, max_positions=64, reads=Reads(16, LAYERS))
    models = DecoderOnly(target), DecoderOnly(small)
    params = [saved.drawn(model.config, seed, 0.5) for seed, model in enumerate(models)]
    prompts = np.random.default_rng(0).integers(0, tiny.VOCABULARY, (ROWS, 8)).astype(np.int32)
    prompts = np.where(np.arange(8) < np.array([[1], [8], [3], [6]]), prompts, -1)
    return Given(models[0], params[0], HiddenDraft(models[1]), params[1], prompts)


def t5gemma2() -> Given:
    """A target that merges its source; the draft attends to it separately."""
    target = T5Gemma2Config(
        *(64, 16, 2, 8, 32, 2, 2), max_positions=64, windows=(5, 0), window_rope_base=100.0
    )
    draft = target.replace(
        emb_dim=8, num_heads=1, num_encoder_layers=0, num_decoder_layers=1, reads=Reads(16, LAYERS)
    )
    models = Seq2Seq(target), Seq2Seq(draft)
    params = [saved.drawn(model.config, seed, 0.5) for seed, model in enumerate(models)]
    return Given(models[0], params[0], HiddenDraft(models[1]), params[1], tiny.sources(ROWS))


@pytest.fixture(scope="module", params=[t5, gpt, t5gemma2])
def given(request: pytest.FixtureRequest) -> Given:
    return request.param()


def test_q_is_that_of_the_training_pass_however_much_of_a_block_stands(given: Given) -> None:
    """Row b accepts b guesses, then another number, and so on; each second turn's are another's."""
    target, draft, inputs = given.target, given.draft, jax.device_put(given.inputs)
    begin = jax.jit(functools.partial(target.start, layers=draft.layers), static_argnums=2)
    extend = jax.jit(functools.partial(target.extend, layers=draft.layers))
    begun = begin(given.params, inputs, 64)
    state = start(draft, given.draft_params, inputs, 64, begun)
    texts, before = given.texts(), begun.state
    prompts = np.array([len(text) - 1 for text in texts])
    last = target.first(inputs)
    rng = np.random.default_rng(0)
    for turn in range(5):
        uniforms = jnp.asarray(rng.random((ROWS, GAMMA)), jnp.float32)
        sampled = uniforms, SAMPLING, tiny.VOCABULARY
        proposal = propose(draft, given.draft_params, state, last, *sampled)
        assert proposal.q is not None
        guesses = np.asarray(proposal.guesses)
        whole = np.zeros((ROWS, 40), np.int32)
        for row, text in enumerate(texts):
            whole[row, : len(text) + GAMMA] = [*text, *guesses[row]]
        expected = given.unrolled(whole)
        for row, text in enumerate(texts):
            for k in range(GAMMA):
                q = standardise(expected[k][row, len(text) - 1 + k], SAMPLING)
                np.testing.assert_allclose(proposal.q[row, k], q, atol=2e-5)
        if turn % 2:
            guesses = rng.integers(2, tiny.VOCABULARY, guesses.shape).astype(np.int32)
            followed = follow(draft, given.draft_params, state, last, guesses)
            proposal = proposal._replace(guesses=guesses, state=followed)
        chunk = np.concatenate([np.asarray(last)[:, None], guesses], axis=1)
        _, after, hidden = extend(given.params, before, Chunk(jnp.asarray(chunk)))
        accepted = (np.arange(ROWS) + turn) % (GAMMA + 1)
        last = jnp.asarray(rng.integers(2, tiny.VOCABULARY, ROWS), jnp.int32)
        for row, text in enumerate(texts):
            text += [*guesses[row, : accepted[row]].tolist(), int(last[row])]
        lengths = np.array([len(text) - 1 for text in texts]) - prompts
        before = target.rewind(after, jax.device_put(lengths))
        state = commit(draft, given.draft_params, proposal, accepted, hidden)


def test_the_hidden_states_matter(given: Given) -> None:
    """Else the test above would say nothing about them."""
    text = np.random.default_rng(1).integers(2, tiny.VOCABULARY, (ROWS, 8)).astype(np.int32)
    first, second, third = (np.asarray(jax.nn.softmax(x)) for x in given.unrolled(text))
    assert np.abs(first - second)[:, 1:].sum(-1).mean() > 0.05
    assert np.abs(third - second)[:, 2:].sum(-1).mean() > 0.01


def test_a_models_configuration_says_what_its_draft_reads() -> None:
    assert model_draft(tiny.HIDDEN) == HiddenDraft(tiny.HIDDEN)
    assert model_draft(tiny.READER).layers == ("encoder",)
    assert model_draft(gpt().draft.model).layers == LAYERS
    with pytest.raises(ValueError, match="source_dim must be the target's emb_dim"):
        Reads(0, LAYERS)
    with pytest.raises(ValueError, match="source_dim must be 0 where there are no target_layers"):
        DecoderOnlyConfig(56, 8, 1, 8, 16, 1, max_positions=64, reads=Reads(16))
