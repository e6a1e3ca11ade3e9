"""An adaptive gamma: what it picks, and that outputs stay the target's own.

20,000 outputs, each decoded alone, so that each picks by its own past. The seed is fixed; a
correct program would fail the chi-square tests here with probability 1e-4 at most.
"""

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
RULE = Adaptive((1, 2, 4), (1.2, 1.35, 1.9), alpha=0.6, strength=2.0, memory=0.8)
ROWS, LENGTH = 20_000, 6


def settings(temperature: float, adaptive: Adaptive | None = RULE, gamma: int = 4) -> Decoding:
    sampling = Sampling(temperature)
    return Decoding(toy.VOCABULARY, sampling, gamma, LENGTH, toy.EOS, adaptive=adaptive)


def rate(alpha: float, gamma: int, cost: float) -> float:
    """Equation 1 over the cost of a step."""
    return (1 - alpha ** (gamma + 1)) / (1 - alpha) / cost


@pytest.mark.parametrize(("tested", "accepted"), [(0, 0), (5, 0), (5, 5), (9, 4), (40, 36)])
def test_the_pick_has_the_largest_rate(tested: float, accepted: float) -> None:
    alpha = (0.6 * 2 + accepted) / (2 + tested)
    rates = [rate(alpha, g, cost) for g, cost in zip(RULE.gammas, RULE.costs, strict=True)]
    got = RULE.choose(jnp.array([[tested, accepted]], jnp.float32), jnp.array([True]))
    assert int(got) == int(np.argmax(rates))


def test_every_gamma_can_be_picked() -> None:
    alive = jnp.array([True])
    counts = [jnp.array([[20.0, share]]) for share in (0.0, 11.0, 20.0)]
    assert [int(RULE.choose(count, alive)) for count in counts] == [0, 1, 2]


def test_rows_that_ended_have_no_say() -> None:
    counts = jnp.array([[20.0, 0.0], [20.0, 20.0]])
    assert int(RULE.choose(counts, jnp.array([True, False]))) == 0
    assert int(RULE.choose(counts, jnp.array([False, True]))) == 2


def test_counts_fade() -> None:
    counts = RULE.count(jnp.array([[10.0, 5.0]]), jnp.array([3]), jnp.array([2]))
    np.testing.assert_allclose(counts, [[11.0, 6.0]], rtol=1e-6)


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
    np.testing.assert_array_equal(counts, np.stack([tested, accepted], axis=1))


@pytest.mark.parametrize(("share", "gamma"), [(0.0, 1), (1.0, 4)])
def test_a_text_begins_by_the_counts_of_earlier_ones(share: float, gamma: int) -> None:
    """After a great many guesses one text changes no mind: gamma stays the one that is best."""
    draws = random_draws(3, np.arange(8), settings(1.0).capacity)
    counts = jnp.full((8, 2), 1e6) * jnp.array([1, share])
    rule = Adaptive(RULE.gammas, RULE.costs, memory=1.0)
    inputs = jnp.ones((8, 1))
    got = fast.generate(TARGET, DRAFT, PARAMS, inputs, draws, settings(1.0, rule), counts)
    want = fast.generate(TARGET, DRAFT, PARAMS, inputs, draws, settings(1.0, None, gamma))
    np.testing.assert_array_equal(got.target_calls, want.target_calls)
    np.testing.assert_array_equal(got.tested, want.tested)
    np.testing.assert_array_equal(got.tokens, want.tokens)


def test_counts_of_another_batch_are_refused() -> None:
    config = settings(1.0)
    draws = random_draws(3, np.arange(2), config.capacity)
    with pytest.raises(ValueError, match=r"counts must be \[2, 2\], not \[1, 2\]"):
        fast.generate(TARGET, DRAFT, PARAMS, jnp.ones((2, 1)), draws, config, jnp.zeros((1, 2)))


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
    ],
)
def test_wrong_rules_are_refused(changes: dict[str, Any], said: str) -> None:
    fields: dict[str, Any] = {"gammas": (1, 2, 4), "costs": (1.0, 1.2, 1.4)} | changes
    with pytest.raises(ValueError, match=said):
        Adaptive(**fields)


def test_gamma_is_the_most_that_may_be_picked() -> None:
    with pytest.raises(ValueError, match="must be the most"):
        settings(1.0, gamma=5)
