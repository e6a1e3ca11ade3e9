"""The loop on the device: equal to the baseline, to its stream, and to each row alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speculative.decoding import Decoding, Output, Params, autoregressive, random_draws, stream
from speculative.decoding import speculative as fast
from speculative.decoding.speculative import Step
from speculative.drafts import BigramDraft, Draft, TransformerDraft, UniformDraft
from speculative.sampling import Sampling
from speculative.types import PyTree
from tests import tiny, toy

ROWS = 4
NEVER = -1
"""An end token that no model says."""

ITSELF = TransformerDraft(tiny.TARGET)
SMALL = TransformerDraft(tiny.DRAFT)


def bigram_params() -> PyTree:
    table = np.random.default_rng(4).normal(0.0, 2.0, (tiny.VOCABULARY, tiny.VOCABULARY))
    return {"log_counts": jnp.asarray(table, jnp.float16)}


def generate(draft: Draft, params: PyTree, config: Decoding, seed: int = 0) -> Output:
    draws = random_draws(seed, np.arange(ROWS), config.capacity)
    both = Params(tiny.target_params(), params)
    output = fast.generate(tiny.TARGET, draft, both, tiny.sources(ROWS), draws, config)
    return jax.tree.map(np.asarray, output)


def steps_of(draft: Draft | None, params: PyTree, config: Decoding, seed: int = 0) -> list[Step]:
    draws = random_draws(seed, np.arange(ROWS), config.capacity)
    both = Params(tiny.target_params(), params)
    return list(stream(tiny.TARGET, draft, both, tiny.sources(ROWS), draws, config))


@functools.cache
def baseline(config: Decoding, seed: int = 0) -> Output:
    draws = random_draws(seed, np.arange(ROWS), config.capacity)
    arguments = (tiny.target_params(), tiny.sources(ROWS), draws, config)
    return jax.tree.map(np.asarray, autoregressive.generate(tiny.TARGET, *arguments))


def greedy(gamma: int, eos_id: int = NEVER) -> Decoding:
    return Decoding(tiny.VOCABULARY, Sampling(0.0), gamma, max_length=40, eos_id=eos_id)


def an_end_token() -> int:
    """A token that ends some greedy rows early, and not at their first step."""
    tokens = baseline(greedy(0)).tokens
    return next(
        int(t)
        for t in np.unique(tokens[:, 5:30])
        if not (tokens[:, :4] == t).any() and 0 < (tokens == t).any(axis=1).sum()
    )


def test_the_baseline_is_argmax_by_argmax() -> None:
    """Each token is the argmax of teacher forcing on those before it, among the pieces."""
    output = baseline(greedy(0))
    fed = np.pad(output.tokens[:, :-1], ((0, 0), (1, 0)))
    logits = tiny.TARGET.forward(tiny.target_params(), tiny.sources(ROWS), fed)
    np.testing.assert_array_equal(
        output.tokens, np.asarray(logits)[..., : tiny.VOCABULARY].argmax(axis=-1)
    )
    # The padded rows would have been chosen, had they been allowed to.
    assert (np.asarray(logits).argmax(axis=-1) >= tiny.VOCABULARY).any()
    assert (output.lengths == 40).all()
    assert (output.target_calls == 40).all()
    assert output.finite.all()


@pytest.mark.parametrize("ends", [False, True], ids=["to the limit", "with ends"])
@pytest.mark.parametrize(
    ("draft", "params", "gamma"),
    [
        (ITSELF, tiny.target_params, 1),
        (ITSELF, tiny.target_params, 4),
        (ITSELF, tiny.near_params, 1),
        (ITSELF, tiny.near_params, 4),
        (ITSELF, tiny.near_params, 7),
        (SMALL, tiny.draft_params, 4),
        (UniformDraft(), tuple, 4),
        (BigramDraft(), bigram_params, 7),
    ],
)
def test_at_temperature_0_the_output_is_the_baseline_s(draft, params, gamma, ends) -> None:
    config = greedy(gamma, an_end_token() if ends else NEVER)
    output, expected = generate(draft, params(), config), baseline(greedy(0, config.eos_id))
    np.testing.assert_array_equal(output.tokens, expected.tokens)
    np.testing.assert_array_equal(output.lengths, expected.lengths)
    assert (output.lengths < 40).any() == ends
    assert output.finite.all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_target_that_drafts_for_itself_is_always_accepted(temperature: float) -> None:
    """The all-accepted corner: had the draft missed its own last guess, it would stray."""
    config = Decoding(tiny.VOCABULARY, Sampling(temperature), 4, max_length=40, eos_id=NEVER)
    output = generate(ITSELF, tiny.target_params(), config)
    assert (output.target_calls == 8).all()
    assert (output.tested == 32).all()
    assert (output.accepted == 32).all()


@pytest.mark.parametrize(
    ("draft", "params", "config"),
    [
        (
            ITSELF,
            tiny.near_params,
            Decoding(tiny.VOCABULARY, Sampling(1.0), 4, max_length=40, eos_id=7),
        ),
        (
            SMALL,
            tiny.draft_params,
            Decoding(tiny.VOCABULARY, Sampling(0.0), 4, max_length=40, eos_id=NEVER),
        ),
        (
            ITSELF,
            tiny.near_params,
            Decoding(tiny.VOCABULARY, Sampling(0.7), 4, max_length=90, eos_id=NEVER),
        ),
        (
            None,
            tuple,
            Decoding(tiny.VOCABULARY, Sampling(1.0), 0, max_length=40, eos_id=7),
        ),
    ],
    ids=["ends", "temperature 0", "caches grow", "baseline"],
)
def test_the_stream_is_the_generation_and_adds_up_to_its_counters(draft, params, config) -> None:
    output = generate(draft, params(), config) if draft else baseline(config)
    steps = steps_of(draft, params(), config)
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(steps))
    for row in range(ROWS):
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
            rejected_one = step.accepted[row] < config.gamma and len(emitted) > standing
            tested += standing + rejected_one
            ended = config.eos_id in emitted or len(tokens) == config.max_length
            assert step.finished[row] == ended
        length = output.lengths[row]
        assert len(tokens) == length
        assert output.tokens[row].tolist() == tokens + [0] * (config.max_length - length)
        assert output.target_calls[row] == calls
        assert output.tested[row] == tested
        assert output.accepted[row] == accepted


def test_ends_were_met_and_rows_had_different_lengths() -> None:
    """What the case above called "ends" did meet."""
    config = Decoding(tiny.VOCABULARY, Sampling(1.0), 4, max_length=40, eos_id=7)
    output = generate(ITSELF, tiny.near_params(), config)
    assert len(set(output.lengths.tolist())) > 1
    assert 0 < output.accepted.sum() < output.tested.sum()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_of_a_batch_is_what_it_is_alone(temperature: float) -> None:
    config = Decoding(tiny.VOCABULARY, Sampling(temperature), 4, max_length=40, eos_id=7)
    together = generate(ITSELF, tiny.near_params(), config, seed=3)
    both = Params(tiny.target_params(), tiny.near_params())
    for row in range(ROWS):
        draws = random_draws(3, np.array([row]), config.capacity)
        source = tiny.sources(ROWS)[row : row + 1]
        alone = fast.generate(tiny.TARGET, ITSELF, both, source, draws, config)
        for one, many in zip(jax.tree.leaves(alone), jax.tree.leaves(together), strict=True):
            np.testing.assert_array_equal(one[0], many[row])


def test_more_draws_than_needed_change_nothing() -> None:
    config = Decoding(tiny.VOCABULARY, Sampling(1.0), 4, max_length=40, eos_id=7)
    both = Params(tiny.target_params(), tiny.near_params())
    draws = random_draws(0, np.arange(ROWS), 2 * config.capacity)
    output = fast.generate(tiny.TARGET, ITSELF, both, tiny.sources(ROWS), draws, config)
    expected = generate(ITSELF, tiny.near_params(), config)
    np.testing.assert_array_equal(output.tokens, expected.tokens)


# A chain that only ever says 2, 3, 0, 2, 3, 0 ... and 1 where it is told to end.


def chain(*said: int) -> jnp.ndarray:
    """A table [V, V, V] by which, after the start, `said` follows, round and round."""
    table = np.full((toy.PADDED,) * 3, -30.0)
    walk = [0, *said, said[0]]
    for last, following in zip(walk, walk[1:], strict=False):
        table[:, last, following] = 30.0
    return toy.params(table)


def run_chain(table: jnp.ndarray, gamma: int, max_length: int, temperature: float) -> Output:
    config = Decoding(toy.VOCABULARY, Sampling(temperature), gamma, max_length, toy.EOS)
    model = toy.MarkovModel()
    draft = TransformerDraft(model)  # pyright: ignore[reportArgumentType]
    draws = random_draws(0, np.arange(2), config.capacity)
    source = np.ones((2, 1), np.int32)
    output = fast.generate(model, draft, Params(table, table), source, draws, config)
    return jax.tree.map(np.asarray, output)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_end_inside_an_accepted_block_ends_the_row_there(temperature: float) -> None:
    output = run_chain(chain(2, 3, 1), gamma=7, max_length=20, temperature=temperature)
    assert output.tokens.tolist() == [[2, 3, 1] + [0] * 17] * 2
    assert output.lengths.tolist() == output.tested.tolist() == output.accepted.tolist() == [3, 3]
    assert output.target_calls.tolist() == [1, 1]


def test_an_end_that_is_the_bonus_token_ends_the_row() -> None:
    output = run_chain(chain(2, 3, 1), gamma=2, max_length=20, temperature=1.0)
    assert output.tokens.tolist() == [[2, 3, 1] + [0] * 17] * 2
    assert output.tested.tolist() == output.accepted.tolist() == [2, 2]
    assert output.target_calls.tolist() == [1, 1]


def test_the_limit_cuts_inside_a_block() -> None:
    output = run_chain(chain(2, 3), gamma=4, max_length=7, temperature=1.0)
    assert output.tokens.tolist() == [[2, 3, 2, 3, 2, 3, 2]] * 2
    assert output.lengths.tolist() == [7, 7]
    assert output.target_calls.tolist() == [2, 2]
    # Four and the bonus, then two of the second block's four.
    assert output.tested.tolist() == output.accepted.tolist() == [6, 6]


def test_a_limit_of_one_token() -> None:
    output = run_chain(chain(2, 3), gamma=4, max_length=1, temperature=1.0)
    assert output.tokens.tolist() == [[2]] * 2
    assert output.target_calls.tolist() == output.accepted.tolist() == [1, 1]


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
@pytest.mark.parametrize("gamma", [0, 4])
def test_logits_that_are_not_finite_are_told_by_row(wrong: float, gamma: int) -> None:
    """One source token has a broken embedding: its row is told apart, the others are not."""
    sources = tiny.sources(ROWS)
    broken = 2
    token = int(sources[broken, 0])
    sources[np.arange(ROWS) != broken] %= token
    params = jax.tree.map(jnp.asarray, tiny.target_params())
    embedder = params["params"]["token_embedder"]
    params = params | {
        "params": params["params"]
        | {"token_embedder": {"embedding": embedder["embedding"].at[token].set(wrong)}}
    }
    config = Decoding(tiny.VOCABULARY, Sampling(0.0), gamma, max_length=5, eos_id=NEVER)
    draws = random_draws(0, np.arange(ROWS), config.capacity)
    if gamma:
        both = Params(params)
        output = fast.generate(tiny.TARGET, UniformDraft(), both, sources, draws, config)
    else:
        output = autoregressive.generate(tiny.TARGET, params, sources, draws, config)
    assert output.finite.tolist() == [row != broken for row in range(ROWS)]
