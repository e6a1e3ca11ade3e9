"""Copying against a search in plain Python; exact whatever it copies."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speculative.decoding import Decoding, Params
from speculative.drafts import CopyDraft, Draft, Proposal
from speculative.ragged import resized
from speculative.sampling import Sampling
from speculative.types import PADDING, PyTree
from tests import toy
from tests.decoding.test_exactness import FEWER, decode, outputs
from tests.decoding.test_tracing import check_same_tokens

VOCAB = 4
ROWS = 16
SIZE = 24
THRESHOLD = 1e-5
"""Of one chi-square test; with the six of them here, in test_suffix.py and in test_ngram.py a
correct program would fail with probability 6e-5 (seeds are fixed)."""

Following = Callable[[list[int]], int]
"""What a draft should guess after a text."""


def copied(text: list[int], longest: int = 8) -> tuple[int, int]:
    """The token after the place most like the text's end, and the length of the match."""
    end = [text[-1 - k] if k < len(text) else None for k in range(longest)]
    best, at = (False,) * longest, 0
    for place in range(len(text) - 1):
        here = [text[place - k] if k <= place else None for k in range(longest)]
        like = tuple(a == b and a is not None for a, b in zip(here, end, strict=True))
        if like > best:
            best, at = like, place
    token = text[at + 1] if len(text) > 1 else 0
    return min(token, VOCAB - 1), [*best, False].index(False)


def texts(seed: int, alphabet: int = VOCAB) -> list[list[int]]:
    """Ragged, some of one token; none holds the padding 0."""
    rng = np.random.default_rng(seed)
    return [rng.integers(1, alphabet, n).tolist() for n in rng.integers(1, SIZE + 1, ROWS)]


@functools.partial(jax.jit, static_argnums=(0, 3))
def start(draft: Draft, params: PyTree, inputs: jax.Array, cache_length: int) -> Any:
    return draft.start(params, inputs, cache_length, toy.NOTHING)


def begin(
    draft: Draft, params: PyTree, rows: list[list[int]], decoder_only: bool, cache_length: int
) -> tuple[Any, list[int], list[list[int]]]:
    """A state, the first `last` of each row and the text up to it."""
    inputs = jnp.array([[*row, *[PADDING] * (SIZE - len(row))] for row in rows])
    state = start(draft, params, inputs, cache_length)
    if decoder_only:
        return state, [row[-1] for row in rows], [list(row) for row in rows]
    return state, [0] * len(rows), [[*row, 0] for row in rows]


@functools.partial(jax.jit, static_argnums=(0, 4))
def propose(
    draft: Draft, params: PyTree, state: Any, last: jax.Array, gamma: int
) -> tuple[jax.Array, Any]:
    uniforms = jnp.zeros((len(last), gamma))
    proposal = draft.propose(params, state, last, uniforms, Sampling(1.0), VOCAB)
    assert proposal.q is None
    return proposal.guesses, proposal.state


def guess(following: Following, text: list[int], gamma: int) -> list[int]:
    """A token at a time; guesses are text."""
    text = list(text)
    for _ in range(gamma):
        text.append(following(text))
    return text[len(text) - gamma :]


def check_against_search(
    draft: Draft, params: PyTree, decoder_only: bool, following: Following, seed: int
) -> None:
    """Guesses of ragged rows over some steps, whatever was accepted in each, in a cache that grows.

    The target accepts at random; its next token is random too.
    """
    rng = np.random.default_rng(seed)
    rows = texts(seed)
    state, last, said = begin(draft, params, rows, decoder_only, 16)
    for step, gamma in enumerate((1, 1, 4, 4, 4)):
        if step == 2:
            larger, _, _ = begin(draft, params, rows, decoder_only, 32)
            state = resized(state, larger)
        guesses, proposed = propose(draft, params, state, jnp.array(last), gamma)
        expected = [guess(following, text, gamma) for text in said]
        np.testing.assert_array_equal(guesses, expected)
        accepted = rng.integers(0, gamma + 1, ROWS)
        state = draft.commit((), Proposal(guesses, None, proposed), jnp.array(accepted), {})
        last = rng.integers(1, VOCAB, ROWS).tolist()
        for text, row, n, token in zip(said, expected, accepted, last, strict=True):
            text += [*row[:n], token]


def check_commit(draft: Draft, params: PyTree, decoder_only: bool) -> None:
    """After every number of accepted guesses it guesses as if it had read that text afresh."""
    rows, gamma = texts(3), 4
    state, last, _ = begin(draft, params, rows, decoder_only, 32)
    guesses, proposed = propose(draft, params, state, jnp.array(last), gamma)
    for n in range(gamma + 1):
        accepted = jnp.full(ROWS, n)
        committed = draft.commit(params, Proposal(guesses, None, proposed), accepted, {})
        got, _ = propose(draft, params, committed, jnp.full(ROWS, 2), gamma)
        fresh, before, _ = begin(draft, params, rows, decoder_only, 32)
        for token in [*np.asarray(guesses).T[:n], np.full(ROWS, 2)]:
            nothing, seen = propose(draft, params, fresh, jnp.array(before), gamma)
            fresh = draft.commit(
                params, Proposal(nothing, None, seen), jnp.zeros(ROWS, jnp.int32), {}
            )
            before = token.tolist()
        want, _ = propose(draft, params, fresh, jnp.array(before), gamma)
        np.testing.assert_array_equal(got, want)


def check_exact(draft: Draft, params: PyTree, gamma: int, sampling: Sampling) -> None:
    """20,000 outputs have the target's distribution."""
    config = Decoding(toy.VOCABULARY, sampling, gamma, 6, toy.ENDS)
    p = toy.distribution(toy.target_table(), sampling)
    output = decode(draft, params, config, FEWER)
    assert toy.p_value(outputs(output), toy.output_probabilities(p, config.max_length)) > THRESHOLD
    assert 0.05 < output.accepted.sum() / output.tested.sum() < 0.95


def check_reference(draft: Draft, draft_params: PyTree, sampling: Sampling) -> None:
    config = Decoding(toy.VOCABULARY, sampling, 4, max_length=20, eos_ids=toy.ENDS)
    params = Params(toy.params(toy.target_table()), draft_params)
    inputs = np.array([[1], [2], [3], [1]])
    check_same_tokens(toy.MarkovModel(), draft, params, inputs, config, seed=0)


@pytest.mark.parametrize("decoder_only", [False, True])
@pytest.mark.parametrize("longest", [1, 8])
def test_the_place_most_like_the_end(longest: int, decoder_only: bool) -> None:
    def following(text: list[int]) -> int:
        return copied(text, longest)[0]

    draft = CopyDraft(decoder_only, longest)
    for seed in range(2):
        check_against_search(draft, (), decoder_only, following, seed)


@pytest.mark.parametrize("decoder_only", [False, True])
def test_lengths_of_matches(decoder_only: bool) -> None:
    draft, rows = CopyDraft(decoder_only, 4), texts(7)
    state, _, said = begin(draft, (), rows, decoder_only, 8)
    # The text up to the first `last`, which has not come yet.
    tokens, lengths = draft.following(state, VOCAB)
    known = [(i, text[:-1]) for i, text in enumerate(said) if len(text) > 2]
    expected = [copied(text, 4) for _, text in known]
    assert [(int(tokens[i]), int(lengths[i])) for i, _ in known] == expected
    assert {length for _, length in expected} == {0, 1, 2, 3, 4}


@pytest.mark.parametrize(
    ("text", "copy"),
    [
        # It runs on into itself.
        ([1, 3, 2, 1, 3], [2, 1, 3, 2, 1, 3, 2, 1]),
        # After 1 2 came 3; now it is 0, and the copy goes on after the 3.
        ([1, 2, 3, 1, 1, 2, 0], [1]),
    ],
)
def test_copies_by_hand(text: list[int], copy: list[int]) -> None:
    draft = CopyDraft(decoder_only=True)
    state, last, _ = begin(draft, (), [text], True, 32)
    guesses, _ = propose(draft, (), state, jnp.array(last), len(copy))
    assert guesses.tolist() == [copy]


@pytest.mark.parametrize("decoder_only", [False, True])
def test_what_the_target_never_says_is_not_guessed(decoder_only: bool) -> None:
    draft = CopyDraft(decoder_only)
    state, last, _ = begin(draft, (), texts(5, 2 * VOCAB), decoder_only, 8)
    guesses, _ = propose(draft, (), state, jnp.array(last), 3)
    assert 0 <= guesses.min() <= guesses.max() == VOCAB - 1


@pytest.mark.parametrize("decoder_only", [False, True])
def test_commit_after_any_number_of_guesses(decoder_only: bool) -> None:
    check_commit(CopyDraft(decoder_only), (), decoder_only)


@pytest.mark.parametrize("longest", [0, 31])
def test_lengths_beyond_a_number_of_bits(longest: int) -> None:
    with pytest.raises(ValueError, match=f"longest.*{longest}"):
        CopyDraft(longest=longest)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_reference_loop_says_the_same(temperature: float) -> None:
    check_reference(CopyDraft(), (), Sampling(temperature))


@pytest.mark.parametrize("gamma", [1, 4])
def test_exact(gamma: int) -> None:
    check_exact(CopyDraft(), (), gamma, Sampling())
