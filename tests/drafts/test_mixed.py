"""A model mixed with a lookup: which one guesses, with what q, and that it stays exact."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest

from speculative.decoding import Decoding, Params, rules
from speculative.drafts import CopyDraft, MixedDraft, SuffixDraft, TransformerDraft, suffix
from speculative.sampling import Sampling
from tests import toy
from tests.decoding import test_block
from tests.decoding.test_tracing import check_same_tokens
from tests.drafts.test_copying import copied

MODEL = TransformerDraft(toy.MarkovModel())
LONGEST, GAMMA = 2, 4
MIXED = MixedDraft(MODEL, CopyDraft(longest=LONGEST))
TABLE = toy.near_table()
PARAMS = toy.params(TABLE), ()

start = jax.jit(MIXED.start, static_argnums=2)
propose = jax.jit(MIXED.propose, static_argnums=(4, 5))
commit = jax.jit(MIXED.commit)


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_copies_where_its_text_goes_on_as_before(rows: int, temperature: float) -> None:
    """By a search in plain Python, and else by the model's table, whatever was accepted before."""
    sampling, rng = Sampling(temperature), np.random.default_rng(rows)
    inputs = rng.integers(1, toy.VOCABULARY, (rows, 3)).astype(np.int32)
    state, last = start(PARAMS, inputs, 60, toy.NOTHING), np.zeros(rows, np.int32)
    said, outputs = [[*row.tolist(), 0] for row in inputs], [[0, 0] for _ in range(rows)]
    q, by = toy.distribution(TABLE, sampling), list[bool]()
    for step in range(8):
        numbers = rng.random((rows, GAMMA)).astype(np.float32)
        proposal = propose(PARAMS, state, last, numbers, sampling, toy.VOCABULARY)
        guesses = np.asarray(proposal.guesses)
        for row, (text, output) in enumerate(zip(said, outputs, strict=True)):
            by.append(copied(text, LONGEST)[1] >= LONGEST)
            for place, guess in enumerate(guesses[row].tolist()):
                before = guesses[row, :place].tolist()
                if by[-1]:
                    assert guess == copied(text + before, LONGEST)[0]
                    want = np.eye(toy.VOCABULARY)[guess]
                else:
                    want = q[tuple((output + before)[-2:])]
                    assert guess == want.argmax() or temperature
                if temperature:
                    assert proposal.q is not None
                    np.testing.assert_allclose(proposal.q[row, place], want, atol=1e-6)
        accepted = (np.arange(rows) + step) % (GAMMA + 1)
        state = commit(PARAMS, proposal, accepted, {})
        last = rng.integers(2, toy.VOCABULARY, rows).astype(np.int32)
        for row, text in enumerate(itertools.chain(said, outputs)):
            text += [*guesses[row % rows, : accepted[row % rows]].tolist(), int(last[row % rows])]
    assert 0.2 < np.mean(by) < 0.8


def test_to_time_it_the_model_guesses_whatever_the_text() -> None:
    """Where the text repeats itself, and so is looked up else."""
    asking = dataclasses.replace(MIXED, asks=True)
    inputs, last = np.full((1, 6), 2, np.int32), np.array([2], np.int32)
    state, numbers = start(PARAMS, inputs, 60, toy.NOTHING), np.zeros((1, GAMMA), np.float32)
    given = PARAMS, state, last, numbers, Sampling(1.0), toy.VOCABULARY
    looked_up, asked = propose(*given).q, jax.jit(asking.propose, static_argnums=5)(*given).q
    assert looked_up is not None and asked is not None
    assert looked_up.max() == 1 > asked.max()


@pytest.mark.parametrize("rule", [rules.Token(), rules.Block()], ids=str)
def test_exact(rule: rules.Rule) -> None:
    """A p-value of a correct program is below `test_block.THRESHOLD` with probability 1e-6."""
    config = test_block.settings(GAMMA, rule)
    draft = MixedDraft(MODEL, CopyDraft(longest=1))
    output = test_block.decode(draft, PARAMS, config, rows=test_block.FEWER)
    assert test_block.p_value(output, config) > test_block.THRESHOLD


@pytest.mark.parametrize("temperature", [0.0, pytest.param(1.0, marks=pytest.mark.long)])
def test_a_batch_decodes_as_each_row_would_alone(temperature: float) -> None:
    """The traced loop has one row, where nothing is guessed that is not used."""
    config = Decoding(toy.VOCABULARY, Sampling(temperature), GAMMA, max_length=20, eos_ids=toy.ENDS)
    texts = np.random.default_rng(7).integers(2, toy.VOCABULARY, (20, 8))
    past_outputs = suffix.automaton(list(texts), toy.VOCABULARY)
    params = Params(toy.params(toy.target_table()), (PARAMS[0], past_outputs))
    draft = MixedDraft(MODEL, SuffixDraft())
    inputs = np.array([[2, 3, 2], [3, 3, 2], [1, 2, 3], [2, 2, 2]])
    check_same_tokens(toy.MarkovModel(), draft, params, inputs, config, seed=3)
