"""The closed forms against simulation, against sums written out, and against the paper."""

import math
from collections.abc import Callable
from typing import cast

import numpy as np
import pytest
from scipy import stats

from speculative import paper, theory


@pytest.mark.parametrize(("alpha", "gamma"), [(0.0, 4), (0.3, 1), (0.62, 7), (0.9, 3), (1.0, 5)])
def test_expected_tokens_is_the_mean_of_simulated_steps(alpha: float, gamma: int) -> None:
    accepted = np.random.default_rng(7).random((200_000, gamma)) < alpha
    tokens = np.cumprod(accepted, axis=1).sum(axis=1) + 1
    error = tokens.std() / math.sqrt(len(tokens))
    assert theory.expected_tokens(alpha, gamma) == pytest.approx(tokens.mean(), abs=4 * error)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.75, 0.99])
@pytest.mark.parametrize("gamma", [0, 1, 7, 40])
def test_expected_tokens_is_equation_1(alpha: float, gamma: int) -> None:
    printed = (1 - alpha ** (gamma + 1)) / (1 - alpha)
    assert theory.expected_tokens(alpha, gamma) == pytest.approx(printed, rel=1e-12)


@pytest.mark.parametrize("gamma", [1, 4, 16])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.99, 1.0])
def test_the_acceptance_rate_of_expected_tokens(alpha: float, gamma: int) -> None:
    tokens = theory.expected_tokens(alpha, gamma)
    assert theory.acceptance_rate(tokens, gamma) == pytest.approx(alpha, abs=1e-12)
    for wrong in (0.9, gamma + 1.1):
        with pytest.raises(ValueError, match=f"yields 1 to {gamma + 1} tokens, not {wrong}"):
            theory.acceptance_rate(wrong, gamma)


def test_expected_tokens_is_continuous_at_one() -> None:
    assert theory.expected_tokens(1.0, 7) == 8.0
    assert theory.expected_tokens(1 - 1e-15, 7) == pytest.approx(8.0, rel=1e-12)


def test_oracle_is_the_limit_of_many_guesses() -> None:
    assert theory.oracle_tokens(0.8) == pytest.approx(theory.expected_tokens(0.8, 400), rel=1e-12)
    assert theory.oracle_tokens(1.0) == math.inf


def test_table_1_where_the_draft_is_free() -> None:
    assert len(paper.TABLE_1) == 6
    for row in paper.TABLE_1:
        assert round(theory.operations(row.alpha, row.gamma, 0.0), 2) == row.operations, row
        assert round(theory.speedup(row.alpha, row.gamma, 0.0), 2) == row.speedup, row


def test_table_4_within_the_rounding_of_its_inputs() -> None:
    assert len(paper.TABLES_2_AND_4) == 12
    for row in paper.TABLES_2_AND_4:
        low = theory.speedup(row.alpha - 0.005, row.gamma, row.c + 0.005)
        high = theory.speedup(row.alpha + 0.005, row.gamma, row.c - 0.005)
        assert low - 0.05 <= row.speedup_expected <= high + 0.05, row


def test_paper_rows_are_found_by_setting() -> None:
    """Tables 3 and 4 print the same acceptance rates, and three rows outrun Eq. 1 itself."""
    beyond_ceiling = []
    for task in ("ende", "cnndm"):
        for draft in ("small", "base", "large"):
            for temperature in (0, 1):
                row = paper.find(
                    paper.TABLES_2_AND_4, task=task, draft=draft, temperature=temperature
                )
                rate = paper.find(paper.TABLE_3, task=task, draft=draft, temperature=temperature)
                assert row is not None and rate is not None
                assert (row.alpha, rate.target) == (rate.alpha, "t5_xxl")
                if row.speedup > theory.expected_tokens(row.alpha + 0.005, row.gamma):
                    beyond_ceiling.append(row.speedup)
    assert beyond_ceiling == [3.1, 2.3, 2.2]
    assert paper.find(paper.TABLES_2_AND_4, task="ende", draft="bigram", temperature=0) is None
    assert paper.find(paper.TABLE_3, task="debian_ende", draft="small", temperature=0) is None


def test_speedup_and_operations_are_ratios_of_simulated_clocks() -> None:
    alpha, gamma, c, verify_cost = 0.7, 4, 0.1, 1.3
    accepted = np.random.default_rng(3).random((200_000, gamma)) < alpha
    tokens = np.cumprod(accepted, axis=1).sum() + len(accepted)
    time = len(accepted) * (gamma * c + verify_cost)
    assert theory.speedup(alpha, gamma, c, verify_cost) == pytest.approx(tokens / time, rel=5e-3)
    # Every position of draft and target counts, accepted or not.
    spent = len(accepted) * (gamma * c + gamma + 1)
    assert theory.operations(alpha, gamma, c) == pytest.approx(spent / tokens, rel=5e-3)


def test_no_guesses_is_plain_decoding() -> None:
    assert theory.speedup(0.7, 0, 0.1) == theory.operations(0.7, 0, 0.1) == 1.0


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: theory.expected_tokens(1.01, 3), "alpha .* 1.01"),
        (lambda: theory.expected_tokens(math.nan, 3), "alpha .* nan"),
        (lambda: theory.oracle_tokens(-0.1), "alpha .* -0.1"),
        (lambda: theory.expected_tokens(0.5, -1), "gamma .* -1"),
        (lambda: theory.expected_tokens(0.5, cast(int, 2.5)), "gamma .* 2.5"),
        (lambda: theory.expected_tokens(0.5, cast(int, math.nan)), "gamma .* nan"),
        (lambda: theory.speedup(0.5, 3, -0.1), "^c .* -0.1"),
        (lambda: theory.speedup(0.5, 3, math.inf), "^c .* inf"),
        (lambda: theory.speedup(0.5, 3, 0.1, 0.0), "verify_cost .* 0.0"),
        (lambda: theory.operations(0.5, 3, math.nan), "c_hat .* nan"),
        (lambda: theory.expected_calls(1.1, 3, 5), "alpha .* 1.1"),
        (lambda: theory.expected_calls(0.5, -1, 5), "gamma .* -1"),
        (lambda: theory.expected_calls(0.5, 3, -1), "length .* -1"),
        (lambda: theory.predicted_speedup(0.5, 3, 0.1, 1.0, []), "at least one text"),
        (lambda: theory.predicted_speedup(0.5, 3, 0.1, 1.0, [5], prefill=-1.0), "prefill .* -1.0"),
        (lambda: theory.predicted_speedup(0.5, 3, 0.1, 0.0, [5]), "verify_cost .* 0.0"),
    ],
)
def test_bad_values_are_named(call: Callable[[], object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        call()


FALSE_ALARM = 1e-6
"""Of each simulation below: how often a correct program would fail, were its seed not fixed."""


@pytest.mark.parametrize(
    ("alpha", "gamma", "length"), [(0.0, 3, 9), (0.62, 5, 12), (0.75, 7, 40), (0.9, 2, 1)]
)
def test_expected_calls_is_the_mean_of_simulated_texts(
    alpha: float, gamma: int, length: int
) -> None:
    """Algorithm 1 with a coin for each guess, 50,000 texts at once."""
    rng = np.random.default_rng(17)
    held, calls = np.zeros(50_000, int), np.zeros(50_000, int)
    while (held < length).any():
        accepted = rng.random((len(held), gamma)) < alpha
        calls += held < length
        held += np.cumprod(accepted, axis=1).sum(axis=1) + 1
    error = stats.norm.isf(FALSE_ALARM / 2) * calls.std() / math.sqrt(len(calls))
    assert theory.expected_calls(alpha, gamma, length) == pytest.approx(calls.mean(), abs=error)


@pytest.mark.parametrize(
    ("alpha", "gamma", "length", "calls"),
    [
        (1.0, 4, 10, 2),
        (1.0, 4, 11, 3),
        (0.0, 4, 11, 11),
        (0.7, 0, 6, 6),
        (0.7, 4, 0, 0),
        # The second token needs a call of its own where the first guess is rejected.
        (0.7, 4, 2, 1.3),
    ],
)
def test_expected_calls_in_closed_form(alpha: float, gamma: int, length: int, calls: float) -> None:
    assert theory.expected_calls(alpha, gamma, length) == pytest.approx(calls)


@pytest.mark.parametrize(("alpha", "gamma"), [(0.5, 3), (0.75, 7)])
def test_expected_calls_grow_as_equation_1_says(alpha: float, gamma: int) -> None:
    longer = theory.expected_calls(alpha, gamma, 500) - theory.expected_calls(alpha, gamma, 400)
    assert 100 / longer == pytest.approx(theory.expected_tokens(alpha, gamma), rel=1e-9)


def test_a_predicted_speedup_written_out() -> None:
    """At alpha = 1 and gamma = 3, 8 tokens take 2 calls, 9 take 3, each of 3 c + v = 1.6 steps."""
    autoregressive = 2 * 4 + 8 + 9
    guessed = 2 * (4 + 2) + (2 + 3) * 1.6
    found = theory.predicted_speedup(1.0, 3, 0.1, 1.3, [8, 9], prefill=4, prefill_draft=2)
    assert found == pytest.approx(autoregressive / guessed)


def test_the_predicted_speedup_of_long_texts_is_the_speedup() -> None:
    found = theory.predicted_speedup(0.75, 7, 0.05, 1.4, [20_000], prefill=5, prefill_draft=1)
    assert found == pytest.approx(theory.speedup(0.75, 7, 0.05, 1.4), rel=1e-3)


def grown(shares: list[float], nodes: int, depth: int, width: int) -> list[tuple[float, int]]:
    """The likeliest nodes of a tree in which so many nodes of a level have successors."""
    level, found = [1.0], list[tuple[float, int]]()
    for at in range(1, depth + 1):
        above = sorted(level, reverse=True)[:width]
        level = [likely * share for likely in above for share in shares]
        found += [(likely, at) for likely in level]
    return sorted(found, reverse=True)[:nodes]


@pytest.mark.parametrize("width", [2, 8, 1000])
@pytest.mark.parametrize(("nodes", "depth"), [(1, 1), (3, 3), (7, 4), (15, 3), (40, 6)])
def test_the_best_tree_is_the_likeliest_nodes(nodes: int, depth: int, width: int) -> None:
    shares = [0.62, 0.17, 0.08, 0.03]
    accepted = theory.best_tree(shares, nodes, depth, width)
    best = grown(shares, nodes, depth, width)
    assert theory.tree_tokens(accepted) == pytest.approx(1 + sum(likely for likely, _ in best))
    reached = np.cumprod(accepted)
    for at in range(1, depth + 1):
        expected = sum(likely for likely, own in best if own == at)
        assert reached[at - 1] == pytest.approx(expected)


def test_a_chain_is_a_tree_of_first_choices() -> None:
    assert theory.tree_tokens([0.7] * 5) == pytest.approx(theory.expected_tokens(0.7, 5))
    with pytest.raises(ValueError, match="alpha must lie in"):
        theory.tree_tokens([1.2])


def test_shares_by_rank_leave_what_the_first_choice_leaves() -> None:
    first, second, third, fourth = theory.shares_by_rank(0.75, greedy=True)
    assert (first, second) == (0.75, pytest.approx(0.25 * 0.515))
    assert third == pytest.approx(0.25 * 0.485 * 0.33)
    assert fourth == pytest.approx(0.25 * 0.485 * 0.67 * 0.24)
    assert theory.shares_by_rank(0.62, greedy=False)[0] == pytest.approx(0.954 * 0.62)
