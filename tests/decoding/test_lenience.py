"""Lenient decoding (appendix A.5) has the distribution of its closed form, and keeps its bound.

Every check draws 20,000 outputs, and one 100,000, from enumerable models and compares them with
enumerations in float64. Seeds are fixed; for the family of all checks here a correct program would
fail with probability 1e-4 at most (Bonferroni).
"""

from collections import Counter
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from scipy import stats

from speculative.decoding import Decoding, Params, rule, rules
from speculative.drafts import Draft
from speculative.sampling import Sampling
from tests import toy
from tests.decoding.test_exactness import FEWER, MODEL_DRAFT, decode, outputs
from tests.decoding.test_exactness import ROWS as MANY
from tests.decoding.test_tracing import ROWS, TOY, TOY_DRAFT, check_same_tokens

THRESHOLD = 1e-4 / 50
"""A share of the family's 1e-4, for more checks than there are here."""

LENGTHS = {1: 5, 4: 7}
"""Tokens an output may have, by gamma."""


def settings(lenience: float, gamma: int, temperature: float = 1.0) -> Decoding:
    sampling = Sampling(temperature)
    return Decoding(
        toy.VOCABULARY, sampling, gamma, LENGTHS[gamma], toy.ENDS, rules.Token(lenience)
    )


def excess(found: Counter[tuple[int, ...]], p: np.ndarray, lenience: float) -> float:
    """The p-value of all next tokens together being at most p / l, from one-sided binomials.

    Given the text so far, outputs are independent, and so counts are binomial; Bonferroni takes
    the smallest p-value times the number of texts and tokens.
    """
    follow: dict[tuple[int, ...], np.ndarray] = {}
    for text, count in found.items():
        for position, token in enumerate(text):
            counts = follow.setdefault(text[:position], np.zeros(toy.VOCABULARY))
            counts[token] += count
    counts = np.array(list(follow.values()))
    bound = np.array([p[(0, 0, *prefix)[-2:]] for prefix in follow]) / lenience
    tails = stats.binom.sf(counts - 1, counts.sum(axis=1, keepdims=True), np.minimum(bound, 1))
    return float(tails.min() * tails.size)


@pytest.mark.parametrize(
    ("table", "lenience", "gamma"),
    [
        (toy.near_table, 0.5, 4),
        pytest.param(toy.far_table, 0.5, 1, marks=pytest.mark.long),
        pytest.param(toy.far_table, 0.5, 4, marks=pytest.mark.long),
        (toy.far_table, 0.2, 1),
        (toy.far_table, 0.2, 4),
    ],
)
def test_the_distribution_is_the_closed_form(
    table: Callable[[], np.ndarray], lenience: float, gamma: int
) -> None:
    config = settings(lenience, gamma)
    rows = MANY if table is toy.near_table else FEWER
    output = decode(MODEL_DRAFT, toy.params(table()), config, rows)
    p = toy.distribution(toy.target_table(), config.sampling)
    q = toy.distribution(table(), config.sampling)
    found, calls = outputs(output), Counter((n,) for n in output.target_calls.tolist())
    of_outputs, of_calls = toy.lenient_probabilities(p, q, lenience, gamma, config.max_length)
    assert toy.p_value(found, of_outputs) > THRESHOLD
    assert toy.p_value(calls, of_calls) > THRESHOLD
    assert excess(found, p, lenience) > THRESHOLD
    # The checks can fail: the distribution is not the target's, and a tighter bound does not hold.
    assert toy.p_value(found, toy.output_probabilities(p, config.max_length)) < THRESHOLD
    assert excess(found, p, 1.0) < THRESHOLD


def test_the_closed_form_at_1_is_the_targets_distribution() -> None:
    p, q = (toy.distribution(t(), Sampling()) for t in (toy.target_table, toy.disjoint_table))
    of_outputs, of_calls = toy.lenient_probabilities(p, q, 1.0, 4, 6)
    for got, want in (
        (of_outputs, toy.output_probabilities(p, 6)),
        (of_calls, toy.calls_probabilities(p, q, 4, 6)),
    ):
        assert got.keys() == want.keys()
        np.testing.assert_allclose([got[k] for k in want], list(want.values()), atol=1e-12)


def residual_of_q(p: Array, q: Array) -> Array:
    """The correction is drawn from p - q instead of from p - l q, at l = 0.5."""
    return TRUE_RESIDUAL(p, q / 0.5)


def never_rejected(accepted: Array) -> Array:
    """No guess is ever rejected."""
    return jnp.full(accepted.shape[0], accepted.shape[1], jnp.int32)


TRUE_RESIDUAL = rule.residual


@pytest.mark.usefixtures("recompiled")
@pytest.mark.parametrize(
    ("name", "fault", "beyond_bound"),
    [("residual", residual_of_q, False), ("leading", never_rejected, True)],
)
def test_a_planted_fault_is_found(
    monkeypatch: pytest.MonkeyPatch, name: str, fault: Callable[..., Array], beyond_bound: bool
) -> None:
    monkeypatch.setattr(rule, name, fault)
    config = settings(0.5, 4)
    found = outputs(decode(MODEL_DRAFT, toy.params(toy.far_table()), config, FEWER))
    p = toy.distribution(toy.target_table(), config.sampling)
    q = toy.distribution(toy.far_table(), config.sampling)
    want, _ = toy.lenient_probabilities(p, q, 0.5, 4, config.max_length)
    assert toy.p_value(found, want) < THRESHOLD
    assert (excess(found, p, 0.5) < THRESHOLD) == beyond_bound


@pytest.mark.parametrize("sampling", [Sampling(0.0), Sampling(1.3, top_p=0.8)], ids=str)
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_reference_loop_emits_the_same_tokens(deterministic: bool, sampling: Sampling) -> None:
    config = Decoding(toy.VOCABULARY, sampling, 4, 20, toy.ENDS, rules.Token(0.3))
    draft: Draft = toy.CertainDraft() if deterministic else TOY_DRAFT
    draft_params = (
        jax.device_put(toy.certain_table()) if deterministic else toy.params(toy.far_table())
    )
    params = Params(toy.params(toy.target_table()), draft_params)
    for seed in range(3):
        check_same_tokens(TOY, draft, params, np.ones((ROWS, 1), np.int32), config, seed)


@pytest.mark.parametrize("lenience", [0.5, 0.2])
def test_greedy_tokens_are_almost_the_most_probable(lenience: float) -> None:
    """Every token has p(x) >= l max p, p being the softmax; some are not the argmax."""
    config = settings(lenience, 4, temperature=0.0)
    p = toy.distribution(toy.target_table(), Sampling())
    drafts = [toy.params(toy.far_table() + shift) for shift in np.eye(toy.PADDED)[:4]]
    shares = []
    for draft_params in drafts:
        output = decode(TOY_DRAFT, draft_params, config, rows=1)
        text = [0, 0, *output.tokens[0, : output.lengths[0]].tolist()]
        for before, last, token in zip(text, text[1:], text[2:], strict=False):
            shares.append(p[before, last, token] / p[before, last].max())
    assert min(shares) >= lenience * (1 - 1e-6)
    assert min(shares) < 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_lenience_just_below_1_changes_nothing(temperature: float) -> None:
    exact, nearly = (
        decode(TOY_DRAFT, toy.params(toy.near_table()), settings(lenience, 4, temperature), rows=1)
        for lenience in (1.0, 1 - 1e-6)
    )
    jax.tree.map(np.testing.assert_array_equal, nearly, exact)
