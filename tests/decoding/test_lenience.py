"""Lenient decoding (appendix A.5) has the law that its closed form says, and keeps its bound.

Every check draws 100,000 outputs from enumerable models and compares them with enumerations in
float64. Seeds are fixed; for the family of all checks here a correct program would fail with
probability 1e-4 at most (Bonferroni).
"""

from collections import Counter
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from scipy import stats

from speculative import verification
from speculative.decoding import Decoding, Params, random_draws
from speculative.decoding import speculative as fast
from speculative.drafts import Draft
from speculative.sampling import Sampling
from tests import toy
from tests.decoding.test_exactness import MODEL_DRAFT, decode, outputs, recompiled
from tests.decoding.test_reference import ROWS, TOY, TOY_DRAFT, check_same_tokens

__all__ = ["recompiled"]

THRESHOLD = 1e-4 / 50
"""A share of the family's 1e-4, for more checks than there are here."""

LENGTHS = {1: 5, 4: 7}
"""Tokens an output may have, by gamma."""


def settings(lenience: float, gamma: int, temperature: float = 1.0) -> Decoding:
    sampling = Sampling(temperature)
    return Decoding(toy.VOCABULARY, sampling, gamma, LENGTHS[gamma], toy.EOS, lenience=lenience)


def excess(found: Counter[tuple[int, ...]], p: np.ndarray, lenience: float) -> float:
    """The p-value of all next tokens together being at most p / l, from one-sided binomials.

    Given the text so far, outputs are independent, and so counts are binomial; Bonferroni takes
    the smallest p-value times the number of texts and tokens.
    """
    follow: dict[tuple[int, ...], np.ndarray] = {}
    for text, count in found.items():
        for place, token in enumerate(text):
            counts = follow.setdefault(text[:place], np.zeros(toy.VOCABULARY))
            counts[token] += count
    counts = np.array(list(follow.values()))
    bound = np.array([p[(0, 0, *prefix)[-2:]] for prefix in follow]) / lenience
    tails = stats.binom.sf(counts - 1, counts.sum(axis=1, keepdims=True), np.minimum(bound, 1))
    return float(tails.min() * tails.size)


@pytest.mark.parametrize(
    ("table", "lenience", "gamma"),
    [
        (toy.near_table, 0.5, 4),
        (toy.far_table, 0.5, 1),
        (toy.far_table, 0.5, 4),
        (toy.far_table, 0.2, 1),
        (toy.far_table, 0.2, 4),
    ],
)
def test_the_law_is_the_closed_form(
    table: Callable[[], np.ndarray], lenience: float, gamma: int
) -> None:
    config = settings(lenience, gamma)
    output = decode(MODEL_DRAFT, toy.params(table()), config)
    p = toy.distribution(toy.target_table(), config.sampling)
    q = toy.distribution(table(), config.sampling)
    found, calls = outputs(output), Counter((n,) for n in output.target_calls.tolist())
    of_outputs, of_calls = toy.lenient_law(p, q, lenience, gamma, config.max_length)
    assert toy.p_value(found, of_outputs) > THRESHOLD
    assert toy.p_value(calls, of_calls) > THRESHOLD
    assert excess(found, p, lenience) > THRESHOLD
    # These checks can fail: the law is not the target's, and a tighter bound does not hold.
    assert toy.p_value(found, toy.sequence_law(p, config.max_length)) < THRESHOLD
    assert excess(found, p, 1.0) < THRESHOLD


def test_the_closed_form_at_1_is_the_targets_law() -> None:
    p, q = (toy.distribution(t(), Sampling()) for t in (toy.target_table, toy.disjoint_table))
    of_outputs, of_calls = toy.lenient_law(p, q, 1.0, 4, 6)
    for law, want in (
        (of_outputs, toy.sequence_law(p, 6)),
        (of_calls, toy.calls_law(p, q, 4, 6)),
    ):
        assert law.keys() == want.keys()
        np.testing.assert_allclose([law[k] for k in want], list(want.values()), atol=1e-12)


def residual_of_q(p: Array, q: Array) -> Array:
    """The correction is drawn from p - q instead of from p - l q, at l = 0.5."""
    return TRUE_RESIDUAL(p, q / 0.5)


def never_rejected(accepted: Array) -> Array:
    """No guess is ever rejected."""
    return jnp.full(accepted.shape[0], accepted.shape[1], jnp.int32)


TRUE_RESIDUAL = verification.residual


@pytest.mark.usefixtures("recompiled")
@pytest.mark.parametrize(
    ("name", "fault", "beyond_bound"),
    [("residual", residual_of_q, False), ("leading", never_rejected, True)],
)
def test_a_planted_fault_is_found(
    monkeypatch: pytest.MonkeyPatch, name: str, fault: Callable[..., Array], beyond_bound: bool
) -> None:
    monkeypatch.setattr(verification, name, fault)
    config = settings(0.5, 4)
    found = outputs(decode(MODEL_DRAFT, toy.params(toy.far_table()), config))
    p = toy.distribution(toy.target_table(), config.sampling)
    q = toy.distribution(toy.far_table(), config.sampling)
    law, _ = toy.lenient_law(p, q, 0.5, 4, config.max_length)
    assert toy.p_value(found, law) < THRESHOLD
    assert (excess(found, p, 0.5) < THRESHOLD) == beyond_bound


@pytest.mark.parametrize("sampling", [Sampling(0.0), Sampling(1.3, top_p=0.8)], ids=str)
@pytest.mark.parametrize("certain", [False, True])
def test_the_host_loop_emits_the_same_tokens(certain: bool, sampling: Sampling) -> None:
    config = Decoding(toy.VOCABULARY, sampling, 4, 20, toy.EOS, lenience=0.3)
    draft: Draft = toy.CertainDraft() if certain else TOY_DRAFT
    draft_params = jnp.asarray(toy.certain_table()) if certain else toy.params(toy.far_table())
    params = Params(toy.params(toy.target_table()), draft_params)
    for seed in range(3):
        check_same_tokens(TOY, draft, params, np.ones((ROWS, 1), np.int32), config, seed)


@pytest.mark.parametrize("lenience", [0.5, 0.2])
def test_greedy_tokens_are_nearly_the_likeliest(lenience: float) -> None:
    """p(x) >= l max p of every token, p being the softmax; some are not the argmax."""
    config = settings(lenience, 4, temperature=0.0)
    p = toy.distribution(toy.target_table(), Sampling())
    drafts = [toy.params(toy.far_table() + shift) for shift in np.eye(toy.PADDED)[:4]]
    shares = []
    for draft_params in drafts:
        tokens, lengths = _greedy(draft_params, config)
        text = [0, 0, *tokens[: lengths[0]].tolist()]
        for before, last, token in zip(text, text[1:], text[2:], strict=False):
            shares.append(p[before, last, token] / p[before, last].max())
    assert min(shares) >= lenience * (1 - 1e-6)
    assert min(shares) < 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_lenience_just_below_1_changes_nothing(temperature: float) -> None:
    exact, nearly = (settings(lenience, 4, temperature) for lenience in (1.0, 1 - 1e-6))
    for got, want in zip(
        _greedy(toy.params(toy.near_table()), nearly),
        _greedy(toy.params(toy.near_table()), exact),
        strict=True,
    ):
        np.testing.assert_array_equal(got, want)


def _greedy(draft_params: Array, config: Decoding) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and lengths of an output."""
    params = Params(toy.params(toy.target_table()), draft_params)
    draws = random_draws(3, np.arange(1), config.capacity)
    sources = jnp.ones((1, 1), jnp.int32)
    output = jax.tree.map(np.asarray, fast.generate(TOY, TOY_DRAFT, params, sources, draws, config))
    return output.tokens[0], output.lengths
