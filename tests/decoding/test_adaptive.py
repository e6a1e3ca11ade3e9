"""An adaptive gamma: its picks, and the distribution of outputs.

The seed is fixed; a correct program would fail the chi-square test of 20,000 outputs with
probability 1e-4 at most. Most tests decode the same 12 rows, to share compiled programs.
"""

import dataclasses
import math
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speculative.decoding import Adaptive, Decoding, Params, random_draws, stream
from speculative.decoding import loop as fast
from speculative.drafts import TransformerDraft
from speculative.sampling import Sampling
from tests import toy

TARGET = toy.MarkovModel()
DRAFT = TransformerDraft(TARGET)
PARAMS = Params(toy.params(toy.target_table()), toy.params(toy.near_table()))
RULE = Adaptive((1, 2, 4), (1.2, 1.35, 1.9), alpha=0.6, strength=2.0, memory=0.8, stride=1)
MANY, ROWS, LENGTH = 20_000, 12, 6
INPUTS = jnp.ones((ROWS, 1), jnp.int32)


def settings(temperature: float, adaptive: Adaptive | None = RULE, gamma: int = 4) -> Decoding:
    sampling = Sampling(temperature)
    return Decoding(toy.VOCABULARY, sampling, gamma, LENGTH, toy.EOS, adaptive=adaptive)


def numbers(rows: int = ROWS) -> jax.Array:
    return random_draws(3, np.arange(rows), settings(1.0).capacity)


def pick(rule: Adaptive, counts: jax.Array) -> int:
    """The gamma of a single row."""
    (gamma,) = rule.choose(counts, jax.device_put(np.array(rule.costs, np.float32))).tolist()
    return gamma


def test_the_pick_is_equation_1s_where_all_positions_are_alike() -> None:
    """For any counts, if each position's share of accepted guesses is that of the prior."""
    for alpha in np.linspace(0.05, 0.95, 19):
        rule = Adaptive(RULE.gammas, RULE.costs, alpha=alpha)
        tokens = [(1 - alpha ** (gamma + 1)) / (1 - alpha) for gamma in rule.gammas]
        want = rule.gammas[int(np.argmax(np.divide(tokens, rule.costs)))]
        for tested in ([0, 0, 0, 0], [9, 5, 2, 1], [400, 3, 0, 0]):
            counts = np.multiply.outer(tested, [1, alpha])
            assert pick(rule, jax.device_put(counts[None])) == want


@pytest.mark.parametrize(
    ("rates", "best"),
    [((0.9, 0.0, 0.9, 0.9), 0), ((0.6, 0.8, 0.0, 0.9), 1), ((0.45, 0.9, 0.99, 0.99), 2)],
)
def test_the_pick_follows_the_rates_of_the_positions(rates: tuple[float, ...], best: int) -> None:
    """A block's tokens by enumeration: guess j is the first rejected one, or none is."""
    counts = jnp.array([[[1e7, 1e7 * rate] for rate in rates]])
    yields = []
    for gamma in RULE.gammas:
        chances = [float(np.prod(rates[:j])) * (1 - rates[j]) for j in range(gamma)]
        chances.append(float(np.prod(rates[:gamma])))
        yields.append(np.dot(chances, np.arange(1, gamma + 2)))
    assert int(np.argmax(np.divide(yields, RULE.costs))) == best
    assert pick(RULE, counts) == RULE.gammas[best]


def test_a_position_without_counts_takes_the_rate_of_all() -> None:
    """By hand: 8 of 10 first guesses were accepted, and no others were tested."""
    counts = jnp.array([[[10.0, 8.0], [0, 0], [0, 0], [0, 0]]])
    pooled = (2 * 0.6 + 8) / (2 + 10)
    first = (2 * pooled + 8) / (2 + 10)
    tokens = 1 + first * np.cumsum(pooled ** np.arange(4))
    costs = tokens[[0, 1, 3]]
    for best in range(3):
        times = tuple(cost * (0.999 if i == best else 1) for i, cost in enumerate(costs))
        rule = Adaptive((1, 2, 4), times, alpha=0.6, strength=2.0)
        assert pick(rule, counts) == rule.gammas[best]


def test_each_row_picks_by_its_own_counts() -> None:
    counts = np.array([[[20.0, 0.0]] * 4, [[20.0, 20.0]] * 4])
    assert jax.jit(RULE.choose)(counts, np.array(RULE.costs)).tolist() == [1, 4]


@pytest.mark.parametrize(("stride", "temperature"), [(1, 1.0), (3, 0.0)])
def test_a_row_of_a_batch_decodes_as_it_would_alone(stride: int, temperature: float) -> None:
    """It has the same tokens, picks and counts, whatever gamma other rows take."""
    config = settings(temperature, dataclasses.replace(RULE, stride=stride))
    draws = numbers()
    shares = np.stack([np.ones(ROWS), np.linspace(0, 1, ROWS)], axis=1)
    counts = jnp.full((ROWS, 4, 2), 20.0) * shares[:, None]
    together = fast.generate(TARGET, DRAFT, PARAMS, INPUTS, draws, config, counts)
    for row in range(ROWS):
        one = slice(row, row + 1)
        alone = fast.generate(TARGET, DRAFT, PARAMS, INPUTS[one], draws[one], config, counts[one])
        for name in ("tokens", "lengths", "target_calls", "drafted", "by_position"):
            np.testing.assert_array_equal(getattr(together, name)[one], getattr(alone, name))
        np.testing.assert_allclose(together.counts[one], alone.counts, rtol=1e-6)
    assert len(set(together.target_calls.tolist())) > 1


def test_counts_fade() -> None:
    """A step that tests three guesses and accepts two."""
    counts = jnp.array([[[10.0, 5.0], [5.0, 4.0], [4.0, 1.0], [1.0, 1.0]]])
    got = RULE.count(counts, jnp.array([[[1, 1], [1, 1], [1, 0], [0, 0]]]))
    want = [[[9.0, 5.0], [5.0, 4.2], [4.2, 0.8], [0.8, 0.8]]]
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_outputs_have_the_targets_distribution_and_gamma_varies() -> None:
    """The mean number of target calls lies between those of the smallest and the largest gamma."""
    config = settings(1.0)
    draws = random_draws(77, np.arange(MANY), config.capacity)
    inputs = jnp.ones((MANY, 1), jnp.int32)
    output = jax.tree.map(np.asarray, fast.generate(TARGET, DRAFT, PARAMS, inputs, draws, config))
    found = Counter(
        tuple(row[:length].tolist())
        for row, length in zip(output.tokens, output.lengths, strict=True)
    )
    p = toy.distribution(toy.target_table(), config.sampling)
    assert toy.p_value(found, toy.output_probabilities(p, LENGTH)) > 1e-4
    q = toy.distribution(toy.near_table(), config.sampling)
    most, least = (
        sum(
            calls * chance
            for (calls,), chance in toy.calls_probabilities(p, q, gamma, LENGTH).items()
        )
        for gamma in (1, 4)
    )
    assert least < output.target_calls.mean() < most


begin = jax.jit(fast.start, static_argnums=(0, 3, 4))
step = jax.jit(fast.step, static_argnums=(0, 4, 5))


@pytest.mark.parametrize("stride", [1, 2, 3])
def test_a_pick_holds_for_a_stride(stride: int) -> None:
    """Against steps that are dispatched one by one; each pick changes the fading counts."""
    config = settings(1.0, dataclasses.replace(RULE, stride=stride))
    models, inputs = fast.Models(TARGET, DRAFT), INPUTS[:1]
    counts, picks = jnp.zeros((1, 4, 2)), set()
    for number in range(20):
        draws = random_draws(3, np.array([number]), config.capacity)
        progress = begin(models, PARAMS, inputs, settings(1.0), config.capacity, counts)
        gamma = steps = 0
        while not progress.finished[0]:
            if steps % stride == 0:
                gamma = pick(RULE, progress.counts)
                picks.add(gamma)
            # A step itself knows no stride: all strides share its programs.
            progress, _ = step(models, PARAMS, progress, draws, settings(1.0), gamma)
            steps += 1
        got = fast.generate(TARGET, DRAFT, PARAMS, inputs, draws, config, counts)
        assert int(got.target_calls[0]) == steps
        np.testing.assert_allclose(got.counts, progress.counts, rtol=1e-6)
        length = int(progress.lengths[0])
        np.testing.assert_array_equal(got.tokens[:, :length], progress.tokens[:, :length])
        counts = got.counts
    assert len(picks) > 1


def test_greedy_outputs_are_the_targets_own() -> None:
    got = fast.generate(TARGET, DRAFT, PARAMS, INPUTS, numbers(), settings(0.0))
    alone = settings(0.0, None, gamma=0)
    want = fast.generate(TARGET, None, Params(PARAMS.target), INPUTS, numbers(), alone)
    np.testing.assert_array_equal(got.tokens, want.tokens)


def test_counts_go_on_from_text_to_text() -> None:
    """Counts that do not fade are numbers of all guesses."""
    rule = Adaptive(RULE.gammas, RULE.costs, memory=1.0)
    config, counts, outputs = settings(1.0, rule), None, []
    for draws in np.split(np.asarray(numbers(2 * ROWS)), 2):
        output = fast.generate(TARGET, DRAFT, PARAMS, INPUTS, jax.device_put(draws), config, counts)
        counts = output.counts
        outputs.append(output)
    tested, accepted = (sum(getattr(o, name) for o in outputs) for name in ("tested", "accepted"))
    assert counts is not None
    np.testing.assert_array_equal(counts.sum(axis=1), np.stack([tested, accepted], axis=1))


@pytest.mark.parametrize(("share", "gamma"), [(0.0, 1), (1.0, 4)])
def test_a_text_begins_by_the_counts_of_earlier_ones(share: float, gamma: int) -> None:
    """After a million guesses one text does not change the best gamma."""
    counts = jnp.full((ROWS, 4, 2), 1e6) * jnp.array([1, share])
    rule = Adaptive(RULE.gammas, RULE.costs, memory=1.0)
    got = fast.generate(TARGET, DRAFT, PARAMS, INPUTS, numbers(), settings(1.0, rule), counts)
    want = fast.generate(TARGET, DRAFT, PARAMS, INPUTS, numbers(), settings(1.0, None, gamma))
    np.testing.assert_array_equal(got.target_calls, want.target_calls)
    np.testing.assert_array_equal(got.tested, want.tested)
    np.testing.assert_array_equal(got.tokens, want.tokens)


def test_rules_of_other_costs_share_a_program() -> None:
    """Each picks the only gamma of a finite cost."""

    def decode(adaptive: Adaptive | None, gamma: int = 4) -> tuple[np.ndarray, ...]:
        config = settings(1.0, adaptive, gamma)
        got = fast.generate(TARGET, DRAFT, PARAMS, INPUTS, numbers(), config)
        return tuple(map(np.asarray, (got.tokens, got.target_calls, got.tested)))

    want = [decode(None, gamma) for gamma in RULE.gammas]
    decode(RULE)
    decoding = fast.decode.on(fast.Models(TARGET, DRAFT))
    programs = decoding._cache_size()
    for gamma, fixed in zip(RULE.gammas, want, strict=True):
        costs = tuple(1.0 if other == gamma else math.inf for other in RULE.gammas)
        for kept, wanted in zip(decode(dataclasses.replace(RULE, costs=costs)), fixed, strict=True):
            np.testing.assert_array_equal(kept, wanted)
    assert decoding._cache_size() == programs


def test_counts_of_another_batch_are_refused() -> None:
    wrong = jnp.zeros((1, 4, 2))
    with pytest.raises(ValueError, match=r"counts must be \[12, 4, 2\], not \[1, 4, 2\]"):
        fast.generate(TARGET, DRAFT, PARAMS, INPUTS, numbers(), settings(1.0), wrong)


def test_streaming_needs_a_fixed_gamma() -> None:
    with pytest.raises(ValueError, match="fixed gamma"):
        next(stream(TARGET, DRAFT, PARAMS, INPUTS, numbers(), settings(0.0)))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"gammas": ()}, "ascending"),
        ({"gammas": (0, 2), "costs": (1.0, 1.0)}, "from 1 to 64, not 0"),
        ({"gammas": (3, 2), "costs": (1.0, 1.0)}, "ascending"),
        ({"costs": (1.0,)}, "each of 3 gammas"),
        ({"gammas": 3}, "type tuple or list, not 3"),
        ({"gammas": (1, 2.0, 4)}, r"gammas must be a whole number .* not 2\.0"),
        ({"gammas": (1, 2, 65)}, "from 1 to 64, not 65"),
        ({"costs": (1.0, "x", 1.0)}, r"Adaptive\.costs must be positive, not 'x'"),
        ({"costs": (1.0, 0.0, 1.0)}, "positive"),
        ({"costs": (1.0, float("nan"), 1.0)}, "positive"),
        ({"alpha": 1.0}, "alpha must lie in"),
        ({"strength": 0.0}, "strength must be positive"),
        ({"strength": float("inf")}, "strength must be positive, not inf"),
        ({"memory": 1.5}, "memory must lie in"),
        ({"memory": None}, "memory must lie in .* not None"),
        ({"stride": 0}, "stride must be a whole number from 1, not 0"),
        ({"stride": 1.5}, r"stride must .* not 1\.5"),
    ],
)
def test_wrong_rules_are_refused(changes: dict[str, Any], said: str) -> None:
    fields: dict[str, Any] = {"gammas": (1, 2, 4), "costs": (1.0, 1.2, 1.4)} | changes
    with pytest.raises(ValueError, match=said):
        Adaptive(**fields)


def test_gamma_is_the_most_that_may_be_picked() -> None:
    with pytest.raises(ValueError, match="must be the most"):
        settings(1.0, gamma=5)
