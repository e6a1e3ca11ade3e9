"""The loop on the device: equal to the baseline, to its stream, and to each row alone."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speculative.decoding import Decoding, Output, Params, autoregressive, random_draws, reference
from speculative.decoding import speculative as fast
from speculative.decoding.speculative import Step
from speculative.drafts import (
    Draft,
    NgramDraft,
    TransformerDraft,
    UniformDraft,
    count_ngrams,
    ngram_params,
)
from speculative.sampling import Sampling
from speculative.types import PyTree
from tests import ngrams, numpy_t5, tiny, toy

NEVER = -1
"""An end token that no model says."""

ROWS = 4
LENGTH = 40

ITSELF = TransformerDraft(tiny.TARGET)
SMALL = TransformerDraft(tiny.DRAFT)
SAMPLED = Decoding(tiny.VOCABULARY, Sampling(1.0), gamma=4, max_length=LENGTH, eos_id=7)

TOY = toy.MarkovModel()
TOY_DRAFT = TransformerDraft(TOY)  # pyright: ignore[reportArgumentType]


def trigram_params() -> PyTree:
    return ngram_params(count_ngrams(ngrams.texts(tiny.VOCABULARY), 3, tiny.VOCABULARY), 3)


def decode(
    draft: Draft | None, draft_params: PyTree, config: Decoding, seed: int = 0, **other: Any
) -> Output:
    """By the device loop, with the tiny target unless `other` names another."""
    target = other.get("target", tiny.TARGET)
    params = other.get("params", tiny.target_params())
    inputs = jnp.asarray(other.get("inputs", tiny.sources(ROWS)))
    draws = random_draws(seed, np.arange(len(inputs)), config.capacity)
    if draft is None:
        output = autoregressive.generate(target, params, inputs, draws, config)
    else:
        both = Params(params, draft_params)
        output = fast.generate(target, draft, both, inputs, draws, config)
    return jax.tree.map(np.asarray, output)


@functools.cache
def float64_greedy() -> np.ndarray:
    """Argmax by argmax with T5 in float64, without ends: [ROWS, LENGTH]."""
    output = np.zeros((ROWS, LENGTH + 1), np.int32)
    for row, source in enumerate(tiny.sources(ROWS)):
        for i in range(LENGTH):
            logits = numpy_t5.logits(
                tiny.stored_params(), tiny.TARGET.config, source[source != 0], output[row, : i + 1]
            )
            output[row, i + 1] = logits[-1, : tiny.VOCABULARY].argmax()
    return output[:, 1:]


@functools.cache
def greedy(gamma: int) -> Decoding:
    """At temperature 0, with an end token that ends some rows early and not others."""
    tokens = float64_greedy()
    said = np.array([(tokens == t).any(axis=1) for t in range(tiny.VOCABULARY)])
    some = said.any(axis=1) & ~said.all(axis=1)
    end = next(t for t in np.flatnonzero(some) if not (tokens[:, :4] == t).any())
    return Decoding(tiny.VOCABULARY, Sampling(0.0), gamma, LENGTH, int(end))


def expected_greedy() -> tuple[np.ndarray, np.ndarray]:
    """Tokens and lengths, each row cut at its end."""
    tokens, ends = float64_greedy().copy(), float64_greedy() == greedy(0).eos_id
    lengths = np.where(ends.any(axis=1), ends.argmax(axis=1) + 1, LENGTH)
    tokens[np.arange(LENGTH) >= lengths[:, None]] = 0
    return tokens, lengths


def test_the_baseline_is_argmax_by_argmax() -> None:
    output = decode(None, (), greedy(0))
    tokens, lengths = expected_greedy()
    np.testing.assert_array_equal(output.tokens, tokens)
    np.testing.assert_array_equal(output.lengths, lengths)
    np.testing.assert_array_equal(output.target_calls, lengths)
    assert (output.tested == 0).all()
    assert (output.accepted == 0).all()
    assert output.finite.all()
    assert min(lengths) < max(lengths) == LENGTH


@pytest.mark.parametrize(
    ("draft", "params", "gamma"),
    [
        (ITSELF, tiny.target_params, 1),
        (ITSELF, tiny.target_params, 4),
        (ITSELF, tiny.target_params, 7),
        (ITSELF, tiny.near_params, 1),
        (ITSELF, tiny.near_params, 4),
        (ITSELF, tiny.near_params, 7),
        (SMALL, tiny.draft_params, 4),
        (UniformDraft(), tuple, 4),
        (NgramDraft(3), trigram_params, 4),
    ],
)
def test_at_temperature_0_the_output_is_the_baseline_s(
    draft: Draft, params: Callable[[], PyTree], gamma: int
) -> None:
    output = decode(draft, params(), greedy(gamma))
    tokens, lengths = expected_greedy()
    np.testing.assert_array_equal(output.tokens, tokens)
    np.testing.assert_array_equal(output.lengths, lengths)
    assert output.finite.all()


@pytest.mark.parametrize("config", [greedy(1), greedy(4), greedy(7), SAMPLED], ids=str)
def test_a_target_that_drafts_for_itself_is_always_accepted(config: Decoding) -> None:
    """The all-accepted corner: had the draft missed its own last guess, it would stray."""
    output = decode(ITSELF, tiny.target_params(), config)
    np.testing.assert_array_equal(output.target_calls, -(-output.lengths // (config.gamma + 1)))
    np.testing.assert_array_equal(output.accepted, output.tested)
    bonus = output.lengths // (config.gamma + 1)
    np.testing.assert_array_equal(output.accepted, output.lengths - bonus)


def check_stream(output: Output, steps: list[Step], config: Decoding) -> None:
    """The steps add up to the output, token by token and counter by counter."""
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(steps))
    for row in range(len(output.lengths)):
        tokens, calls, tested, accepted = [], 0, 0, 0
        for step in steps:
            emitted = step.tokens[row, : step.count[row]].tolist()
            if not emitted:
                assert step.finished[row]
                continue
            calls += 1
            tokens += emitted
            # Where the row ended inside the block, the guesses behind its end never counted.
            standing = min(int(step.accepted[row]), len(emitted))
            assert emitted[:standing] == step.guesses[row, :standing].tolist()
            accepted += standing
            tested += standing + (standing < config.gamma and standing < len(emitted))
            ended = emitted[-1] == config.eos_id or len(tokens) == config.max_length
            assert step.finished[row] == ended
        length = output.lengths[row]
        assert len(tokens) == length
        assert output.tokens[row].tolist() == tokens + [0] * (config.max_length - length)
        assert output.target_calls[row] == calls
        assert output.tested[row] == tested
        assert output.accepted[row] == accepted
    assert steps[-1].finished.all()
    assert not any(step.finished.all() for step in steps[:-1])


@pytest.mark.parametrize(
    ("draft", "params", "config"),
    [
        (ITSELF, tiny.near_params, SAMPLED),
        (
            UniformDraft(),
            tuple,
            Decoding(tiny.VOCABULARY, Sampling(0.7), 2, max_length=90, eos_id=NEVER),
        ),
        (None, tuple, greedy(0)),
    ],
    ids=["ends", "caches grow", "baseline"],
)
def test_the_stream_is_the_generation_and_adds_up_to_its_counters(
    draft: Draft | None, params: Callable[[], PyTree], config: Decoding
) -> None:
    output = decode(draft, params(), config)
    draws = random_draws(0, np.arange(ROWS), config.capacity)
    both = Params(tiny.target_params(), params())
    inputs = jnp.asarray(tiny.sources(ROWS))
    steps = list(fast.stream(tiny.TARGET, draft, both, inputs, draws, config))
    check_stream(output, steps, config)
    assert len(set(output.lengths.tolist())) > 1 or config.eos_id == NEVER
    if config is SAMPLED:
        assert 0 < output.accepted.sum() < output.tested.sum()


@pytest.mark.parametrize("table", [toy.near_table, toy.target_table])
def test_caches_of_target_and_draft_grow_together(table: Callable[[], np.ndarray]) -> None:
    """Across two sizes; the reference, whose caches never grow, says the same.

    Drafting for itself, the target fills every block, so that no row lags behind the others.
    """
    config = Decoding(toy.VOCABULARY, Sampling(1.0), gamma=2, max_length=300, eos_id=NEVER)
    assert len(config.cache_lengths()) == 3
    params = Params(toy.params(toy.target_table()), toy.params(table()))
    inputs = jnp.ones((3, 1), jnp.int32)
    output = decode(
        TOY_DRAFT, params.draft, config, target=TOY, params=params.target, inputs=inputs
    )
    draws = random_draws(0, np.arange(3), config.capacity)
    steps = list(fast.stream(TOY, TOY_DRAFT, params, inputs, draws, config))
    check_stream(output, steps, config)
    for row in range(3):
        trace = reference.generate(
            TOY, TOY_DRAFT, params, np.ones(1), np.asarray(draws[row]), config
        )
        assert trace.tokens == output.tokens[row].tolist()


def test_a_row_of_a_batch_is_what_it_is_alone() -> None:
    together = decode(ITSELF, tiny.near_params(), SAMPLED)
    both = Params(tiny.target_params(), tiny.near_params())
    for row in range(ROWS):
        draws = random_draws(0, np.array([row]), SAMPLED.capacity)
        source = jnp.asarray(tiny.sources(ROWS)[row : row + 1])
        alone = fast.generate(tiny.TARGET, ITSELF, both, source, draws, SAMPLED)
        for one, many in zip(jax.tree.leaves(alone), jax.tree.leaves(together), strict=True):
            np.testing.assert_array_equal(one[0], many[row])


def run_chain(*said: int, config: Decoding | None = None) -> Output:
    """A target, its own draft, that says these tokens round and round and nothing else."""
    table = np.full((toy.PADDED,) * 3, -30.0)
    walk = [0, 0, *said, *said]
    for before, last, following in zip(walk, walk[1:], walk[2:], strict=False):
        table[before, last] = -30.0
        table[before, last, following] = 30.0
    config = config or Decoding(toy.VOCABULARY, Sampling(1.0), 4, max_length=7, eos_id=toy.EOS)
    params, inputs = toy.params(table), np.ones((2, 1), np.int32)
    return decode(TOY_DRAFT, params, config, target=TOY, params=params, inputs=inputs)


def test_an_end_inside_an_accepted_block_ends_the_row_there() -> None:
    output = run_chain(2, 3, 1)
    assert output.tokens.tolist() == [[2, 3, 1, 0, 0, 0, 0]] * 2
    assert output.lengths.tolist() == output.tested.tolist() == output.accepted.tolist() == [3, 3]
    assert output.target_calls.tolist() == [1, 1]


def test_an_end_that_is_the_bonus_token_ends_the_row() -> None:
    output = run_chain(2, 2, 3, 3, 1)
    assert output.tokens.tolist() == [[2, 2, 3, 3, 1, 0, 0]] * 2
    assert output.tested.tolist() == output.accepted.tolist() == [4, 4]
    assert output.target_calls.tolist() == [1, 1]


def test_the_limit_cuts_inside_a_block() -> None:
    output = run_chain(2, 3)
    assert output.tokens.tolist() == [[2, 3, 2, 3, 2, 3, 2]] * 2
    assert output.lengths.tolist() == [7, 7]
    assert output.target_calls.tolist() == [2, 2]
    # Four and the bonus, then two of the second block's four.
    assert output.tested.tolist() == output.accepted.tolist() == [6, 6]


def test_a_limit_of_one_token() -> None:
    config = Decoding(toy.VOCABULARY, Sampling(0.0), gamma=4, max_length=1, eos_id=toy.EOS)
    output = run_chain(2, 3, config=config)
    assert output.tokens.tolist() == [[2]] * 2
    assert output.target_calls.tolist() == output.accepted.tolist() == [1, 1]


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
@pytest.mark.parametrize("draft", [None, UniformDraft()])
def test_logits_that_are_not_finite_are_told_by_row(draft: Draft | None, wrong: float) -> None:
    """A source token that no guess can be has a broken embedding; one row has it."""
    inputs = tiny.sources(ROWS)
    inputs[2, 0] = tiny.VOCABULARY + 3
    packed = tiny.target_params()
    embedding = packed["params"]["token_embedder"]["embedding"]
    broken = {"embedding": embedding.at[tiny.VOCABULARY + 3].set(wrong)}
    params = packed | {"params": packed["params"] | {"token_embedder": broken}}
    output = decode(draft, (), greedy(4 if draft else 0), params=params, inputs=inputs)
    assert output.finite.tolist() == [True, True, False, True]
    # The others are what they are without it.
    tokens, _ = expected_greedy()
    np.testing.assert_array_equal(output.tokens[[0, 1, 3]], tokens[[0, 1, 3]])


@pytest.mark.parametrize("gamma", [63, 64, 300])
def test_a_large_gamma_decodes(gamma: int) -> None:
    config = Decoding(tiny.VOCABULARY, Sampling(0.0), gamma, max_length=10, eos_id=-1)
    draws = random_draws(0, np.arange(1), config.capacity)
    both, source = Params(tiny.target_params()), jnp.asarray(tiny.sources(1))
    output = fast.generate(tiny.TARGET, UniformDraft(), both, source, draws, config)
    assert output.lengths.tolist() == [10]


def test_too_few_draws_are_told() -> None:
    """Reading beyond them would silently shift back and use numbers twice."""
    config = Decoding(tiny.VOCABULARY, Sampling(1.0), gamma=4, max_length=40, eos_id=7)
    draws = random_draws(0, np.arange(4), config.capacity - 1)
    both, source = Params(tiny.target_params()), jnp.asarray(tiny.sources(4))
    with pytest.raises(ValueError, match=f"{config.capacity - 1}.*{config.capacity}"):
        fast.generate(tiny.TARGET, UniformDraft(), both, source, draws, config)
