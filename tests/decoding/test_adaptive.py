"""An adaptive gamma: what it picks, and that outputs stay the target's own.

20,000 outputs, each decoded alone, so that each picks by its own past. The seed is fixed; a
correct program would fail the chi-square tests here with probability 1e-4 at most.
"""

import dataclasses
import math
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speculative.decoding import Adaptive, Decoding, Params, autoregressive, random_draws, stream
from speculative.decoding import speculative as fast
from speculative.drafts import TransformerDraft
from speculative.sampling import Sampling
from tests import toy

TARGET = toy.MarkovModel()
DRAFT = TransformerDraft(TARGET)  # pyright: ignore[reportArgumentType]
PARAMS = Params(toy.params(toy.target_table()), toy.params(toy.near_table()))
RULE = Adaptive((1, 2, 4), (1.2, 1.35, 1.9), alpha=0.6, strength=2.0, memory=0.8, stride=1)
ROWS, LENGTH = 20_000, 6


def settings(temperature: float, adaptive: Adaptive | None = RULE, gamma: int = 4) -> Decoding:
    sampling = Sampling(temperature)
    return Decoding(toy.VOCABULARY, sampling, gamma, LENGTH, toy.EOS, adaptive=adaptive)


def pick(rule: Adaptive, counts: jax.Array, *live: bool) -> int:
    """The place of the gamma, for one live row unless told of more."""
    return int(rule.choose(counts, jnp.asarray(rule.costs), jnp.array(live or [True])))


def test_the_pick_is_equation_1s_where_all_positions_are_alike() -> None:
    """Whatever the counts' number, if each position accepts the same share as the prior says."""
    for alpha in np.linspace(0.05, 0.95, 19):
        rule = Adaptive(RULE.gammas, RULE.costs, alpha=alpha)
        tokens = [(1 - alpha ** (gamma + 1)) / (1 - alpha) for gamma in rule.gammas]
        want = int(np.argmax(np.divide(tokens, rule.costs)))
        for tested in ([0, 0, 0, 0], [9, 5, 2, 1], [400, 3, 0, 0]):
            counts = np.multiply.outer(tested, [1, alpha])
            assert pick(rule, jnp.asarray(counts)[None]) == want


@pytest.mark.parametrize(
    ("rates", "place"),
    [((0.9, 0.0, 0.9, 0.9), 0), ((0.6, 0.8, 0.0, 0.9), 1), ((0.45, 0.9, 0.99, 0.99), 2)],
)
def test_the_pick_follows_the_rates_of_the_positions(rates: tuple[float, ...], place: int) -> None:
    """A block's tokens by enumeration: guess j is the first to fail, or none is."""
    counts = jnp.array([[[1e7, 1e7 * rate] for rate in rates]])
    yields = []
    for gamma in RULE.gammas:
        chances = [float(np.prod(rates[:j])) * (1 - rates[j]) for j in range(gamma)]
        chances.append(float(np.prod(rates[:gamma])))
        yields.append(np.dot(chances, np.arange(1, gamma + 2)))
    assert int(np.argmax(np.divide(yields, RULE.costs))) == place
    assert pick(RULE, counts) == place


def test_a_position_without_counts_takes_the_rate_of_all() -> None:
    """By hand: 8 of 10 first guesses stood, and none else was tested."""
    counts = jnp.array([[[10.0, 8.0], [0, 0], [0, 0], [0, 0]]])
    pooled = (2 * 0.6 + 8) / (2 + 10)
    first = (2 * pooled + 8) / (2 + 10)
    tokens = 1 + first * np.cumsum(pooled ** np.arange(4))
    costs = tokens[[0, 1, 3]]
    for place in range(3):
        times = tuple(cost * (0.999 if i == place else 1) for i, cost in enumerate(costs))
        rule = Adaptive((1, 2, 4), times, alpha=0.6, strength=2.0)
        assert pick(rule, counts) == place


def test_rows_that_ended_have_no_say() -> None:
    counts = jnp.array([[[20.0, 0.0]] * 4, [[20.0, 20.0]] * 4])
    assert pick(RULE, counts, True, False) == 0
    assert pick(RULE, counts, False, True) == 2


def test_counts_fade() -> None:
    """A step of three guesses, of which two stood."""
    counts = jnp.array([[[10.0, 5.0], [5.0, 4.0], [4.0, 1.0], [1.0, 1.0]]])
    got = RULE.count(counts, jnp.array([3]), jnp.array([2]))
    want = [[[9.0, 5.0], [5.0, 4.2], [4.2, 0.8], [0.8, 0.8]]]
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_outputs_follow_the_targets_law_and_gamma_varies() -> None:
    config = settings(1.0)
    draws = random_draws(77, np.arange(ROWS), config.capacity)

    def alone(numbers: jax.Array) -> Any:
        return fast.generate(TARGET, DRAFT, PARAMS, jnp.ones((1, 1)), numbers[None], config)

    output = jax.tree.map(lambda x: np.asarray(x)[:, 0], jax.vmap(alone)(draws))
    found = Counter(
        tuple(row[:length].tolist())
        for row, length in zip(output.tokens, output.lengths, strict=True)
    )
    p = toy.distribution(toy.target_table(), config.sampling)
    assert toy.p_value(found, toy.sequence_law(p, LENGTH)) > 1e-4
    fixed = [
        fast.generate(
            TARGET, DRAFT, PARAMS, jnp.ones((ROWS, 1)), draws, settings(1.0, None, gamma)
        ).target_calls.mean()
        for gamma in RULE.gammas
    ]
    assert min(fixed) < output.target_calls.mean() < max(fixed)


@pytest.mark.parametrize("stride", [1, 2, 3])
def test_a_pick_holds_for_a_stride(stride: int) -> None:
    """Beside steps that are dispatched one by one; counts fade, so that each pick shows in them."""
    config = settings(1.0, dataclasses.replace(RULE, stride=stride))
    models, inputs = fast.Models(TARGET, DRAFT), jnp.ones((1, 1))
    counts, picks = jnp.zeros((1, 4, 2)), set()
    for number in range(20):
        draws = random_draws(3, np.array([number]), config.capacity)
        progress = fast.start(models, PARAMS, inputs, config, config.capacity, counts)
        gamma = steps = 0
        while not progress.finished[0]:
            if steps % stride == 0:
                gamma = RULE.gammas[pick(RULE, progress.counts)]
                picks.add(gamma)
            progress, _ = fast.step(models, PARAMS, progress, draws, config, gamma)
            steps += 1
        got = fast.generate(TARGET, DRAFT, PARAMS, inputs, draws, config, counts)
        assert int(got.target_calls[0]) == steps
        np.testing.assert_allclose(got.counts, progress.counts, rtol=1e-6)
        length = int(progress.lengths[0])
        np.testing.assert_array_equal(got.tokens[:, :length], progress.tokens[:, :length])
        counts = got.counts
    assert len(picks) > 1


def test_greedy_outputs_are_the_targets_own() -> None:
    config = settings(0.0)
    sources = jnp.ones((5, 1), jnp.int32)
    draws = random_draws(3, np.arange(5), config.capacity)
    got = fast.generate(TARGET, DRAFT, PARAMS, sources, draws, config)
    want = autoregressive.generate(TARGET, PARAMS.target, sources, draws, config)
    np.testing.assert_array_equal(got.tokens, want.tokens)


def test_counts_go_on_from_text_to_text() -> None:
    """A rule that forgets nothing has counted every guess of both."""
    rule = Adaptive((1, 2, 4), (1.2, 1.35, 1.9), alpha=0.6, strength=2.0, memory=1.0)
    config, counts, outputs = settings(1.0, rule), None, []
    for first in (0, 8):
        draws = random_draws(3, np.arange(first, first + 8), config.capacity)
        output = fast.generate(TARGET, DRAFT, PARAMS, jnp.ones((8, 1)), draws, config, counts)
        counts = output.counts
        outputs.append(output)
    tested, accepted = (sum(getattr(o, name) for o in outputs) for name in ("tested", "accepted"))
    assert counts is not None
    np.testing.assert_array_equal(counts.sum(axis=1), np.stack([tested, accepted], axis=1))


@pytest.mark.parametrize(("share", "gamma"), [(0.0, 1), (1.0, 4)])
def test_a_text_begins_by_the_counts_of_earlier_ones(share: float, gamma: int) -> None:
    """After a great many guesses one text changes no mind: gamma stays the one that is best."""
    draws = random_draws(3, np.arange(8), settings(1.0).capacity)
    counts = jnp.full((8, 4, 2), 1e6) * jnp.array([1, share])
    rule = Adaptive(RULE.gammas, RULE.costs, memory=1.0)
    inputs = jnp.ones((8, 1))
    got = fast.generate(TARGET, DRAFT, PARAMS, inputs, draws, settings(1.0, rule), counts)
    want = fast.generate(TARGET, DRAFT, PARAMS, inputs, draws, settings(1.0, None, gamma))
    np.testing.assert_array_equal(got.target_calls, want.target_calls)
    np.testing.assert_array_equal(got.tested, want.tested)
    np.testing.assert_array_equal(got.tokens, want.tokens)


def test_rules_of_other_costs_share_a_program() -> None:
    """Each keeps to the only gamma of a finite cost."""
    draws, inputs = random_draws(3, np.arange(8), settings(1.0).capacity), jnp.ones((8, 1))

    def decode(adaptive: Adaptive | None, gamma: int = 4) -> tuple[np.ndarray, ...]:
        config = settings(1.0, adaptive, gamma)
        got = fast.generate(TARGET, DRAFT, PARAMS, inputs, draws, config)
        return tuple(map(np.asarray, (got.tokens, got.target_calls, got.tested)))

    want = [decode(None, gamma) for gamma in RULE.gammas]
    decode(RULE)
    programs = fast._generate._cache_size()  # pyright: ignore[reportAttributeAccessIssue]
    for gamma, fixed in zip(RULE.gammas, want, strict=True):
        costs = tuple(1.0 if other == gamma else math.inf for other in RULE.gammas)
        for kept, wanted in zip(decode(dataclasses.replace(RULE, costs=costs)), fixed, strict=True):
            np.testing.assert_array_equal(kept, wanted)
    assert fast._generate._cache_size() == programs  # pyright: ignore[reportAttributeAccessIssue]


def test_counts_of_another_batch_are_refused() -> None:
    config = settings(1.0)
    draws = random_draws(3, np.arange(2), config.capacity)
    with pytest.raises(ValueError, match=r"counts must be \[2, 4, 2\], not \[1, 4, 2\]"):
        fast.generate(TARGET, DRAFT, PARAMS, jnp.ones((2, 1)), draws, config, jnp.zeros((1, 4, 2)))


def test_streaming_needs_a_fixed_gamma() -> None:
    config = settings(0.0)
    draws = random_draws(3, np.arange(1), config.capacity)
    with pytest.raises(ValueError, match="fixed gamma"):
        next(stream(TARGET, DRAFT, PARAMS, jnp.ones((1, 1)), draws, config))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"gammas": ()}, "ascending"),
        ({"gammas": (0, 2), "costs": (1.0, 1.0)}, "ascending"),
        ({"gammas": (3, 2), "costs": (1.0, 1.0)}, "ascending"),
        ({"costs": (1.0,)}, "each of 3 gammas"),
        ({"costs": (1.0, 0.0, 1.0)}, "positive"),
        ({"costs": (1.0, float("nan"), 1.0)}, "positive"),
        ({"alpha": 1.0}, "alpha must lie in"),
        ({"strength": 0.0}, "strength be positive"),
        ({"memory": 1.5}, "memory lie in"),
        ({"stride": 0}, "at least 1 step"),
    ],
)
def test_wrong_rules_are_refused(changes: dict[str, Any], said: str) -> None:
    fields: dict[str, Any] = {"gammas": (1, 2, 4), "costs": (1.0, 1.2, 1.4)} | changes
    with pytest.raises(ValueError, match=said):
        Adaptive(**fields)


def test_gamma_is_the_most_that_may_be_picked() -> None:
    with pytest.raises(ValueError, match="must be the most"):
        settings(1.0, gamma=5)
