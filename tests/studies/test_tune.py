"""Which gamma pays, by numbers written by hand, and why none does."""

import dataclasses
import re

import pytest

from speculative.measurement.timing import Costs
from speculative.studies.tune import TreeTuning, Tuning


def tuning(
    alpha: float,
    verify: float,
    guess: float,
    prefill: float = 0.0,
    length: int = 200,
    gammas: tuple[int, ...] = (1, 3, 7),
) -> Tuning:
    """Costs in target steps of 2 ms; a wide pass costs `verify` steps, a guess `guess` steps."""
    costs = Costs(
        2 * prefill,
        2 * prefill,
        2.0,
        {gamma: 2 * verify for gamma in gammas},
        {gamma: 2 * guess * gamma for gamma in gammas},
    )
    return Tuning(alpha, [length], costs)


def test_the_best_gamma_and_its_speed_ups() -> None:
    found = tuning(0.8, 1.25, 0.05)
    # Eq. 1 at gamma 7: (1 - 0.8^8) / 0.2 = 4.161; over 7 * 0.05 + 1, and + 1.25.
    assert found.gammas == [1, 3, 7]
    assert found.gamma == 7
    assert found.expected(7) == pytest.approx(4.1611392 / 1.35)
    assert found.predicted(7) == pytest.approx(4.1611392 / 1.6, rel=0.02)
    assert found.why_not() is None


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (tuning(0.2, 1.1, 0.3), r"too slow or too weak.*c = 0\.30.*alpha = 0\.20"),
        (
            tuning(0.5, 2.5, 0.05),
            r"wide pass costs too much.* 3 .* v = 2\.50 .* 1\.88 tokens",
        ),
        (tuning(0.8, 1.1, 0.05, prefill=40, length=3), "too short: 3 tokens.*160.0 ms or 80.0"),
        (tuning(0.4, 1.1, 0.3, gammas=(3, 7)), "Too few guesses are accepted"),
        # Two tokens a pass that costs 1.992 steps: 1.004 times as fast.
        (tuning(1.0, 1.892, 0.1, gammas=(1,)), r"wide pass costs too much.* v = 1\.89"),
    ],
)
def test_why_speculation_does_not_pay(found: Tuning, said: str) -> None:
    assert round(found.predicted(found.gamma), 2) <= 1
    reason = found.why_not()
    assert reason is not None
    assert re.search(said, reason), reason


def test_a_tree_is_best_if_it_promises_more_than_every_chain() -> None:
    found = tuning(0.8, 1.25, 0.05)
    chain = found.predicted(found.gamma)
    worse = TreeTuning(15, 4, 4.0, 0.05, 3.0, chain - 0.1)
    better = TreeTuning(63, 7, 5.4, 0.05, 1.15, chain + 0.5)
    assert found.tree is None
    assert dataclasses.replace(found, trees=(worse,)).tree is None
    assert dataclasses.replace(found, trees=(worse, better)).tree == better
