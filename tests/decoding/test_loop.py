"""The loop on the device: equal to the baseline, to its stream, and to each row alone."""

import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speculative.backends import prepack
from speculative.decoding import Decoding, Output, Params, Token, queue
from speculative.decoding import loop as fast
from speculative.decoding.loop import Step
from speculative.drafts import (
    CopyDraft,
    Draft,
    NgramDraft,
    Proposal,
    TransformerDraft,
    UniformDraft,
    count_ngrams,
    ngram_params,
)
from speculative.measurement.exactness import compare_greedy
from speculative.ragged import write_rows
from speculative.sampling import Sampling
from speculative.types import PyTree
from tests import ngrams, numpy_models, tiny, toy
from tests.decoding.test_exactness import outputs
from tests.decoding.test_tracing import TOY, TOY_DRAFT, check_same_tokens

"""An end token that no model emits."""

ROWS = 4
LENGTH = 40

ITSELF = TransformerDraft(tiny.TARGET)
SMALL = TransformerDraft(tiny.DRAFT)
SAMPLED = Decoding(tiny.VOCABULARY, Sampling(1.0), gamma=4, max_length=LENGTH, eos_ids=(7,))


def trigram_params() -> PyTree:
    return ngram_params(count_ngrams(ngrams.texts(tiny.VOCABULARY), 3, tiny.VOCABULARY), 3)


def decode(
    draft: Draft | None, draft_params: PyTree, config: Decoding, seed: int = 0, **other: Any
) -> Output:
    """By the device loop, with the tiny target unless `other` names another."""
    target = other.get("target", tiny.TARGET)
    params = other.get("params", tiny.target_params())
    inputs = jnp.asarray(other.get("inputs", tiny.sources(ROWS)))
    draws, both = config.draws(seed, np.arange(len(inputs))), Params(params, draft_params)
    return jax.device_get(fast.generate(target, draft, both, inputs, draws, config))


@functools.cache
def float64_greedy() -> np.ndarray:
    """Greedy decoding by a T5 in float64, without end tokens: [ROWS, LENGTH]."""
    output = np.zeros((ROWS, LENGTH + 1), np.int32)
    for row, source in enumerate(tiny.sources(ROWS)):
        for i in range(LENGTH):
            logits = numpy_models.logits(
                tiny.stored_params(), tiny.TARGET.config, source[source >= 0], output[row, : i + 1]
            )
            output[row, i + 1] = logits[-1, : tiny.VOCABULARY].argmax()
    return output[:, 1:]


@functools.cache
def greedy(gamma: int) -> Decoding:
    """Settings at temperature 0, with an end token that ends only some rows early."""
    tokens = float64_greedy()
    said = np.array([(tokens == t).any(axis=1) for t in range(tiny.VOCABULARY)])
    some = said.any(axis=1) & ~said.all(axis=1)
    end = next(t for t in np.flatnonzero(some) if not (tokens[:, :4] == t).any())
    return Decoding(tiny.VOCABULARY, Sampling(0.0), gamma, LENGTH, (int(end),))


def expected_greedy() -> tuple[np.ndarray, np.ndarray]:
    """Tokens and lengths, each row cut after its end token."""
    tokens, ends = float64_greedy().copy(), float64_greedy() == greedy(0).eos_ids[0]
    lengths = np.where(ends.any(axis=1), ends.argmax(axis=1) + 1, LENGTH)
    tokens[np.arange(LENGTH) >= lengths[:, None]] = 0
    return tokens, lengths


def test_autoregressive_decoding_is_greedy_in_float64() -> None:
    output = decode(None, (), greedy(0))
    tokens, lengths = expected_greedy()
    np.testing.assert_array_equal(output.tokens[:, :LENGTH], tokens)
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
def test_at_temperature_0_the_output_is_the_autoregressive_one(
    draft: Draft, params: Callable[[], PyTree], gamma: int
) -> None:
    output = decode(draft, params(), greedy(gamma))
    tokens, lengths = expected_greedy()
    np.testing.assert_array_equal(output.tokens[:, :LENGTH], tokens)
    np.testing.assert_array_equal(output.lengths, lengths)
    assert output.finite.all()


@pytest.mark.parametrize("layout", [prepack, lambda params: params], ids=["kernels", "XLA"])
def test_greedy_outputs_in_bfloat16_are_the_targets_own(layout: Callable[..., PyTree]) -> None:
    """By our kernels token for token; by others but for near ties."""
    target = tiny.in_dtype(tiny.TARGET, "bfloat16")
    stored = tiny.stored_params(), tiny.near(tiny.stored_params())
    params, of_draft = (layout(tiny.rounded(one, "bfloat16")) for one in stored)
    given: dict[str, Any] = {"target": target, "params": params, "inputs": tiny.sources(32)}
    found = decode(TransformerDraft(target), of_draft, greedy(4), **given)
    alone = decode(None, (), greedy(0), **given)
    assert found.finite.all() and 0 < found.accepted.sum() < found.tested.sum()
    differing = np.flatnonzero((found.tokens != alone.tokens).any(axis=1))
    assert layout is not prepack or not len(differing)
    vocabulary = types.SimpleNamespace(size=tiny.VOCABULARY)
    pair: Any = types.SimpleNamespace(target=target, params=Params(params), vocabulary=vocabulary)
    for row in differing:
        texts = [x.tokens[row, : x.lengths[row]].tolist() for x in (alone, found)]
        source = jnp.asarray(given["inputs"][row : row + 1])
        difference = compare_greedy(pair, source, texts[0], texts[1])
        assert difference is not None and difference.near_tie


@pytest.mark.parametrize("gamma", [1, 4, 7, None])
def test_a_target_that_drafts_for_itself_is_always_accepted(gamma: int | None) -> None:
    """With all guesses accepted: a draft that had not read its last guess would go wrong."""
    config = greedy(gamma) if gamma else SAMPLED
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
            # If the row ended inside the block, the guesses after its end do not count.
            standing = min(int(step.accepted[row]), len(emitted))
            assert emitted[:standing] == step.guesses[row, :standing].tolist()
            accepted += standing
            tested += standing + (standing < step.guesses.shape[1] and standing < len(emitted))
            ended = emitted[-1] in config.eos_ids or len(tokens) == config.max_length
            assert step.finished[row] == ended
        length = output.lengths[row]
        assert len(tokens) == length
        assert output.tokens[row].tolist() == tokens + [0] * (config.longest - length)
        assert output.target_calls[row] == calls
        # A path of a tree may end where no guess follows.
        assert output.tested[row] <= tested if config.tree else output.tested[row] == tested
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
            Decoding(tiny.VOCABULARY, Sampling(0.7), 2, max_length=90, eos_ids=()),
        ),
        (None, tuple, None),
    ],
    ids=["ends", "caches grow", "autoregressive"],
)
def test_the_stream_is_the_generation_and_adds_up_to_its_counters(
    draft: Draft | None, params: Callable[[], PyTree], config: Decoding | None
) -> None:
    config = config or greedy(0)
    output = decode(draft, params(), config)
    draws = config.draws(0, np.arange(ROWS))
    both = Params(tiny.target_params(), params())
    inputs = jax.device_put(tiny.sources(ROWS))
    steps = list(fast.stream(tiny.TARGET, draft, both, inputs, draws, config))
    check_stream(output, steps, config)
    assert len(set(output.lengths.tolist())) > 1 or not config.eos_ids
    if config is SAMPLED:
        assert 0 < output.accepted.sum() < output.tested.sum()


@pytest.mark.parametrize("table", [toy.near_table, toy.target_table])
def test_caches_of_target_and_draft_grow_together(table: Callable[[], np.ndarray]) -> None:
    """The reference, whose caches never grow, emits the same tokens.

    If the target drafts for itself, every block is full, so that all rows have equal lengths.
    """
    config = Decoding(toy.VOCABULARY, Sampling(1.0), gamma=2, max_length=130, eos_ids=())
    assert len(config.cache_lengths()) == 2
    params = Params(toy.params(toy.target_table()), toy.params(table()))
    inputs = jnp.ones((2, 1), jnp.int32)
    output = decode(
        TOY_DRAFT, params.draft, config, target=TOY, params=params.target, inputs=inputs
    )
    draws = config.draws(0, np.arange(2))
    steps = list(fast.stream(TOY, TOY_DRAFT, params, inputs, draws, config))
    check_stream(output, steps, config)
    check_same_tokens(TOY, TOY_DRAFT, params, np.ones((2, 1), np.int32), config, seed=0)


def test_a_row_of_a_batch_is_what_it_is_alone() -> None:
    together = decode(ITSELF, tiny.near_params(), SAMPLED)
    both = Params(tiny.target_params(), tiny.near_params())
    for row in range(ROWS):
        draws = SAMPLED.draws(0, np.array([row]))
        source = jax.device_put(tiny.sources(ROWS)[row : row + 1])
        alone = fast.generate(tiny.TARGET, ITSELF, both, source, draws, SAMPLED)
        for one, many in zip(jax.tree.leaves(alone), jax.tree.leaves(together), strict=True):
            np.testing.assert_array_equal(one[0], many[row])


@pytest.mark.parametrize(
    ("said", "tokens", "accepted", "calls"),
    [
        # An end inside an accepted block, and one that is the bonus token.
        ((2, 3, 1), [2, 3, 1, 0, 0, 0, 0], 3, 1),
        ((2, 2, 3, 3, 1), [2, 2, 3, 3, 1, 0, 0], 4, 1),
        # The limit: after four guesses and the bonus token, two of the second block's four guesses.
        ((2, 3), [2, 3, 2, 3, 2, 3, 2], 6, 2),
        ((2, 3), [2], 1, 1),
    ],
)
def test_where_a_row_ends(said: list[int], tokens: list[int], accepted: int, calls: int) -> None:
    """A target, which is its own draft, repeats what is said and emits nothing else."""
    table = np.full((toy.PADDED,) * 3, -30.0)
    walk = [0, 0, *said, *said]
    for before, last, following in zip(walk, walk[1:], walk[2:], strict=False):
        table[before, last] = -30.0
        table[before, last, following] = 30.0
    config = Decoding(toy.VOCABULARY, Sampling(1.0), 4, max_length=len(tokens), eos_ids=toy.ENDS)
    params, inputs = toy.params(table), np.ones((2, 1), np.int32)
    output = decode(TOY_DRAFT, params, config, target=TOY, params=params, inputs=inputs)
    assert output.tokens[:, : len(tokens)].tolist() == [tokens] * 2
    assert not output.tokens[:, len(tokens) :].any()
    assert output.lengths.tolist() == [len(tokens) - tokens.count(0)] * 2
    assert output.tested.tolist() == output.accepted.tolist() == [accepted] * 2
    assert output.target_calls.tolist() == [calls] * 2


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
@pytest.mark.parametrize("draft", [None, UniformDraft()])
def test_logits_that_are_not_finite_are_reported_by_row(draft: Draft | None, wrong: float) -> None:
    """One row's source has a token, outside the vocabulary, with a broken embedding."""
    inputs = tiny.sources(ROWS)
    inputs[2, 0] = tiny.VOCABULARY + 3
    params = tiny.stored_params()
    embedding = jnp.asarray(params["token_embedder"]["embedding"])
    broken = {"embedding": embedding.at[tiny.VOCABULARY + 3].set(wrong)}
    params = prepack(params | {"token_embedder": broken})
    output = decode(draft, (), greedy(4 if draft else 0), params=params, inputs=inputs)
    assert output.finite.tolist() == [True, True, False, True]
    # The other rows are unchanged.
    tokens, _ = expected_greedy()
    np.testing.assert_array_equal(output.tokens[[0, 1, 3], :LENGTH], tokens[[0, 1, 3]])


@pytest.mark.parametrize("gamma", [63, 64, 300])
def test_a_large_gamma_decodes(gamma: int) -> None:
    config = Decoding(tiny.VOCABULARY, Sampling(0.0), gamma, max_length=10, eos_ids=())
    draws = config.draws(0, np.arange(1))
    both, source = Params(tiny.target_params()), jax.device_put(tiny.sources(1))
    output = fast.generate(tiny.TARGET, UniformDraft(), both, source, draws, config)
    np.testing.assert_array_equal(output.tokens[:, :10], float64_greedy()[:1, :10])


@pytest.mark.parametrize(
    ("draft", "params"),
    [(SMALL, tiny.draft_params), (CopyDraft(), tuple)],
    ids=["model", "copy"],
)
def test_a_row_may_begin_another_text_at_any_time(
    draft: Draft, params: Callable[[], PyTree]
) -> None:
    """A text put in after three steps decodes as it would alone, and so do the other rows."""
    models, both = fast.Models(tiny.TARGET, draft), Params(tiny.target_params(), params())
    config = dataclasses.replace(SAMPLED, max_length=24)
    draws = config.draws(0, np.arange(ROWS + 1))
    sources = jax.device_put(tiny.sources(ROWS + 1))
    begin = jax.jit(lambda x: fast.start(models, both, x, config, config.capacity))
    step = jax.jit(lambda progress, draws: fast.step(models, both, progress, draws, config)[0])
    progress = begin(sources[:ROWS])
    for _ in range(3):
        progress = step(progress, draws[:ROWS])
    rows = np.array([0, ROWS, 2, 3])  # A fifth text takes the place of the second.
    put = progress, draws[:ROWS], 1, begin(sources[ROWS:]), draws[ROWS:]
    progress, of_rows = queue.put_row(*put)
    np.testing.assert_array_equal(of_rows, draws[rows])
    for _ in range(config.max_length):
        progress = step(progress, of_rows)
    alone = jax.device_get(fast.generate(tiny.TARGET, draft, both, sources, draws, config))
    progress = jax.device_get(progress)
    for name in ("lengths", "target_calls", "tested", "accepted"):
        np.testing.assert_array_equal(getattr(progress, name), getattr(alone, name)[rows])
    for row, other in enumerate(rows.tolist()):
        length = int(progress.lengths[row])
        np.testing.assert_array_equal(progress.tokens[row, :length], alone.tokens[other, :length])


@dataclasses.dataclass(frozen=True)
class Reader(Draft):
    """Keeps the hidden states of accepted positions [B, T], and their number [B]."""

    @property
    def layers(self) -> tuple[str, ...]:
        return ("fed",)

    def start(self, params, inputs, cache_length, target) -> Any:
        batch = inputs.shape[0]
        return jnp.zeros((batch, cache_length), jnp.int32), jnp.zeros(batch, jnp.int32)

    def propose(self, params, state, last, numbers, sampling, vocab_size, history=None) -> Proposal:
        return Proposal((numbers * vocab_size).astype(jnp.int32), None, state)

    def commit(self, params, proposal, accepted, hidden) -> Any:
        read, count = proposal.state
        return write_rows(read, hidden["fed"][..., 0], count, axis=1), count + accepted + 1


@pytest.mark.parametrize("batch", [1, 5])
def test_a_draft_is_given_the_hidden_states_of_accepted_positions(batch: int) -> None:
    """The toy's hidden state is the token it read: all of the text but its newest token."""
    models = fast.Models(TOY, Reader())
    config = Decoding(toy.VOCABULARY, Sampling(1.0), 3, max_length=20, eos_ids=())
    both, draws = Params(toy.params(toy.target_table())), config.draws(1, np.arange(batch))
    progress = fast.begin(models, both, jnp.ones((batch, 1), jnp.int32), config, config.capacity)
    step, accepted = jax.jit(fast.step, static_argnums=(0, 4)), set()
    for _ in range(4):
        progress, done = step(models, both, progress, draws, config)
        accepted |= set(done.accepted.tolist())
        read, counts = progress.draft
        np.testing.assert_array_equal(counts, progress.lengths)
        for row, count in enumerate(counts.tolist()):
            text = [0, *progress.tokens[row].tolist()]
            assert read[row, :count].tolist() == text[:count]
    assert len(accepted) > 1


class KeyedByStep(Token):
    """Token verification, with random numbers that no two steps share."""

    keyed_by = "step"


def test_numbers_keyed_by_the_step_are_exact_and_none_is_used_twice() -> None:
    """20,000 outputs against the target's distribution; a correct program fails with p = 1e-4."""
    config = Decoding(toy.VOCABULARY, Sampling(1.0), 3, 6, toy.ENDS, KeyedByStep())
    draws = config.draws(5, np.arange(20_000))
    assert draws.shape == (20_000, 8, 4, 3)
    assert len(np.unique(np.asarray(draws[0]))) == draws[0].size
    np.testing.assert_array_equal(config.draws(5, np.array([7]))[0], draws[7])
    both = Params(toy.params(toy.target_table()), toy.params(toy.near_table()))
    sources = jnp.ones((len(draws), 1), jnp.int32)
    output = jax.device_get(fast.generate(TOY, TOY_DRAFT, both, sources, draws, config))
    p = toy.distribution(toy.target_table(), config.sampling)
    assert toy.p_value(outputs(output), toy.output_probabilities(p, 6)) > 1e-4
    check_same_tokens(TOY, TOY_DRAFT, both, np.ones((8, 1), np.int32), config, seed=5)


def test_numbers_keyed_otherwise_are_refused() -> None:
    by_step = Decoding(toy.VOCABULARY, Sampling(1.0), 3, 6, toy.ENDS, KeyedByStep())
    by_position = dataclasses.replace(by_step, rule=Token())
    source = jnp.ones((1, 1), jnp.int32)
    for config, other in ((by_step, by_position), (by_position, by_step)):
        with pytest.raises(ValueError, match=f"need .*, keyed by the {config.rule.keyed_by}"):
            fast.generate(
                TOY, UniformDraft(), Params(()), source, other.draws(0, np.zeros(1, int)), config
            )


@pytest.mark.parametrize("shape", [(4, 79, 3), (1, 80, 3), (4, 80, 2), (4, 64, 4, 3)])
def test_random_numbers_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    """Too few positions, which would be read silently shifted back, rows, numbers or offsets."""
    rule = KeyedByStep() if len(shape) == 4 else Token()
    config = dataclasses.replace(SAMPLED, rule=rule)
    both, source = Params(tiny.target_params()), jax.device_put(tiny.sources(4))
    with pytest.raises(
        ValueError, match=r"do not fit 4 rows .* gamma = 4, which need \(4, (64|80), "
    ):
        fast.generate(tiny.TARGET, UniformDraft(), both, source, jnp.zeros(shape), config)


def test_a_row_of_another_width_is_refused() -> None:
    models, both = fast.Models(tiny.TARGET, None), Params(tiny.target_params())
    config = dataclasses.replace(SAMPLED, gamma=0)
    sources = jax.device_put(tiny.sources(3))
    batch, draws = fast.begin(models, both, sources, config, 64), config.draws(0, np.arange(3))
    for source, size in ((sources[:1, :-1], 64), (sources[:1], 48)):
        with pytest.raises(ValueError, match="inputs as wide and a cache as long"):
            queue.put_row(
                batch, draws, 1, fast.begin(models, both, source, config, size), draws[:1]
            )
