"""Exact decoders pass, wrong ones are found out."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speculative.decoding import Decoding, Output, rule
from speculative.measurement.goodness import g_statistic, g_test
from speculative.pair import Pair, Result
from speculative.rows.config import RowConfig
from speculative.rows.workload import Workload
from speculative.studies.verify import verify
from speculative.tasks.prompts import Prompt
from tests import toy
from tests.measurement.pairs import MODEL_DRAFT, SOURCE, toy_pair

NOTHING = lambda what, share: None  # noqa: E731


class Pieces:
    """Numbers as words, for the toy's four tokens."""

    size, eos_ids = toy.VOCABULARY, toy.ENDS

    def decode(self, tokens: list[int], special: bool = False) -> str:
        return " ".join(map(str, tokens))


def work(temperature: float, draft: np.ndarray | None = None) -> Workload:
    table = toy.near_table() if draft is None else draft
    pair = toy_pair(MODEL_DRAFT, toy.params(table))
    object.__setattr__(pair, "vocabulary", Pieces())
    config = RowConfig(
        task="debian_ende",
        target="toy",
        draft="toy",
        temperature=temperature,
        max_length=24,
        dtype="float32",
    )
    count = 40
    return Workload(pair, config, [Prompt("x", "y")] * count, jnp.repeat(SOURCE, count, axis=0))


@pytest.mark.long
def test_an_exact_decoder_passes_at_both_temperatures() -> None:
    found = verify(work(0.0), 3, 128, 128, 0.001, NOTHING)
    assert (found.texts, found.near_ties, found.tests) == (40, 0, [])
    assert found.verdict().startswith("PASSED: 40 texts of 1 prompt, ")
    found = verify(work(1.0), 3, 256, 128, 0.001, NOTHING)
    assert found.passed
    assert found.tests[0].name == "first tokens"
    assert found.tests[0].count == 40 * 257


def residual_from_p(p, q):
    return p


@pytest.mark.usefixtures("recompiled")
def test_a_wrong_decoder_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Corrections come from p: p-values fall below 1e-50; `test_audit` has more faults."""
    monkeypatch.setattr(rule, "residual", residual_from_p)
    found = verify(work(1.0, draft=toy.far_table()), 3, 64, 128, 0.001, NOTHING)
    assert not found.passed
    assert found.verdict().startswith("FAILED")


def test_a_greedy_decoder_that_leaves_the_argmax_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One token of one text is another: the verdict names both."""
    decode = Pair.results

    def wrong(self: Pair, output: Output) -> list[Result]:
        [result] = decode(self, output)
        changed.append(result)
        if len(changed) != 3:
            return [result]
        return [dataclasses.replace(result, tokens=[3, *result.tokens[1:]])]

    changed: list[Result] = []
    monkeypatch.setattr(Pair, "results", wrong)
    found = verify(work(0.0), 3, 128, 128, 0.001, NOTHING)
    assert not found.passed
    assert (3, 1) in found.impossible
    assert found.verdict().startswith("FAILED")
    assert "are not the argmax, first token 1 of text 3" in found.verdict()


def test_too_few_samples_are_refused_before_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Workload, "decode", lambda *given: pytest.fail("It decodes."))
    few = work(1.0)
    few = dataclasses.replace(few, sources=few.sources[:2], prompts=few.prompts[:2])
    said = r"1 beginnings of 2 prompts are too few .* at most 54 tokens, and it takes 360"
    with pytest.raises(ValueError, match=said):
        verify(few, 3, 1, 8, 0.001, NOTHING)


def test_no_two_samples_share_a_random_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of one prompt, nor of two, nor beginnings with whole texts."""
    seen: list[np.ndarray] = []
    draws = Decoding.draws

    def noted(self: Decoding, seed: int, examples: np.ndarray) -> jax.Array:
        found = draws(self, seed, examples)
        seen.extend(np.asarray(found)[:, 0])
        return found

    monkeypatch.setattr(Decoding, "draws", noted)
    verify(work(1.0), 3, 30, 8, 0.001, NOTHING)
    assert len(seen) == 40 + 40 * 30
    assert len(np.unique(seen, axis=0)) == len(seen)


def test_g_against_its_distribution() -> None:
    """Of draws from a skewed distribution, about 5% exceed chi-square's 95th percentile."""
    rng = np.random.default_rng(1)
    p = np.append(np.array([0.4, 0.3, 0.15, 0.1, 0.03]), np.full(20, 0.001))
    above = 0
    for _ in range(2000):
        statistic, degrees = g_statistic(rng.multinomial(500, p).astype(float), 500 * p)
        assert degrees == 5  # Five cells of their own, the rest together.
        above += statistic > 11.0705
    assert 0.035 < above / 2000 < 0.065


def test_the_sum_over_many_prompts_keeps_its_distribution() -> None:
    """A thousand prompts of 25 cells, some with but five expected: G's mean is its degrees."""
    rng = np.random.default_rng(2)
    p = np.sort(rng.dirichlet(np.full(25, 0.7)))[::-1]
    p = np.maximum(p, 5.5 / 1024)
    p /= p.sum()
    total, degrees = 0.0, 0
    for _ in range(1000):
        g, d = g_statistic(rng.multinomial(1024, p).astype(float), 1024 * p)
        total, degrees = total + g, degrees + d
    # Within three standard deviations of the sum; without the correction it is 4 above.
    assert abs(total - degrees) < 3 * np.sqrt(2 * degrees)


def test_a_token_that_cannot_be() -> None:
    statistic, _ = g_statistic(np.array([99.0, 1.0]), np.array([100.0, 0.0]))
    assert math.isinf(statistic)
    assert g_test("x", 100, statistic, 1).p_value == 0
