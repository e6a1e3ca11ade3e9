"""Targets in int8: outputs are their own, whatever guesses, and the traced loop's."""

import pathlib

import pytest

from speculative import Pair, load
from speculative.backends.cpu import kernels
from speculative.types import QUANTIZE

TEXTS = ["A small editor for plain text.", "An archive", "b c d e", "A map, and more"]
LENGTH = 24


@pytest.fixture(scope="module", params=QUANTIZE[1:])
def pair(request: pytest.FixtureRequest, saved_pair: tuple[pathlib.Path, pathlib.Path]) -> Pair:
    target = str(saved_pair[0])  # It guesses for itself, in other numbers.
    return load(target, target, quantize=request.param)


@pytest.mark.long
@pytest.mark.skipif(not kernels.native(), reason="XLA's passes of other widths round otherwise")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_are_the_targets_own(pair: Pair, temperature: float) -> None:
    given = {"temperature": temperature, "verification": "coupled", "max_length": LENGTH}
    own = [one.tokens for one in pair.generate(TEXTS, gamma=0, batch_size=1, **given)]
    assert len({*map(tuple, own)}) > 1
    for gamma, tree in ((3, 0), (3, 12)):
        for size in (1, 3):
            found = pair.generate(TEXTS, gamma=gamma, tree=tree, batch_size=size, **given)
            assert [one.tokens for one in found] == own
            assert sum(one.target_calls for one in found) < sum(map(len, own))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_fast_loop_is_the_reference_loop(pair: Pair, temperature: float) -> None:
    trace = pair.check(TEXTS[0], gamma=3, temperature=temperature, max_length=LENGTH, seed=3)
    assert 1 <= len(trace.tokens) <= LENGTH


def test_it_is_another_model(pair: Pair, saved_pair: tuple[pathlib.Path, pathlib.Path]) -> None:
    """Log-probabilities differ, by little."""
    given = {"gamma": 0, "max_length": LENGTH, "logprobs": True}
    target = str(saved_pair[0])
    whole = load(target, target)
    one, other = (each.generate(TEXTS[0], **given).logprobs for each in (whole, pair))
    assert one and other and 0 < abs(one[0] - other[0]) < 0.5
