"""The audit: samples of exact programs pass, those of wrong ones fail. The toy has four tokens.

Of 10 audits of exact samples at a false-alarm rate of 0.001, one fails with probability 0.01 at
most; seeds are fixed.
"""

import dataclasses
import functools
import json
import math
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speculative.decoding import Decoding, Params, rules
from speculative.decoding import loop as fast
from speculative.drafts import TransformerDraft, UniformDraft
from speculative.measurement import goodness, teacher_forced
from speculative.pair import Pair
from speculative.sampling import Sampling
from speculative.studies import power
from speculative.studies.audit import (
    AGREEMENT,
    FEWEST,
    SPREAD,
    Audit,
    _least_kept,
    _scores,
    audit,
    require_enough,
)
from speculative.studies.power import KeyedByPosition
from speculative.studies.samples import Sample, read
from tests import tiny, toy
from tests.decoding.test_block import P, Q, of_two
from tests.measurement.pairs import MODEL_DRAFT, toy_pair

TEXTS, SEEDS = 500, 10
OWN = Sampling()


def pair_of(table: np.ndarray | None = None) -> Pair:
    return toy_pair(MODEL_DRAFT, toy.params(toy.far_table()), table)


PAIR = pair_of()


def samples(
    rule: rules.Rule,
    seed: int,
    sampling: Sampling = OWN,
    draft: np.ndarray | None = None,
    target: np.ndarray | None = None,
    count: int = TEXTS,
    gamma: int = 4,
    length: int = 16,
) -> list[Sample]:
    """Texts that speculative decoding makes with a rule, by one program however many they are."""
    config = Decoding(toy.VOCABULARY, sampling, gamma, length, toy.ENDS, rule=rule)
    tables = (
        (toy.target_table() if target is None else target),
        (toy.far_table() if draft is None else draft),
    )
    params = Params(*map(toy.params, tables))
    inputs, found = jnp.ones((TEXTS, 1), jnp.int32), []
    for begin in range(0, count, TEXTS):
        draws = config.draws(seed, begin + np.arange(TEXTS))
        output = fast.generate(toy.MarkovModel(), MODEL_DRAFT, params, inputs, draws, config)
        tokens, lengths = jax.device_get((output.tokens, output.lengths))
        found += [text[:n] for text, n in zip(tokens.tolist(), lengths.tolist(), strict=True)]
    return [Sample(line, (1,), text) for line, text in enumerate(found[:count], 1)]


def caught(found: list[list[Sample]], sampling: Sampling = OWN, pair: Pair = PAIR) -> float:
    """The share of audits that fail."""
    audits = [audit(pair, one, sampling, 0.001, seed=seed) for seed, one in enumerate(found)]
    return float(np.mean([not one.passed for one in audits]))


@pytest.mark.parametrize(
    "sampling",
    [Sampling(), pytest.param(Sampling(0.7), marks=pytest.mark.long), Sampling(1.0, top_p=0.9)],
    ids=str,
)
@pytest.mark.parametrize("rule", [rules.Token(), rules.Block()], ids=["token", "block"])
def test_exact_samples_pass(rule: rules.Rule, sampling: Sampling) -> None:
    found = [samples(rule, seed, sampling) for seed in range(SEEDS)]
    assert caught(found, sampling) == 0


@pytest.mark.parametrize(
    ("rule", "own"),
    [
        (rules.Token(), Sampling(0.85)),
        (power.Faulty(fault=power.FROM_TARGET), OWN),
        (power.Faulty(fault=power.DROPPED), OWN),
        (power.Faulty(fault=power.IGNORED), OWN),
        (power.Faulty(fault=power.UNTRUNCATED), Sampling(1.0, top_p=0.9)),
    ],
    ids=str,
)
def test_a_fault_is_caught(rule: rules.Rule, own: Sampling) -> None:
    found = [samples(rule, seed, own) for seed in range(SEEDS)]
    assert caught(found, dataclasses.replace(own, temperature=1.0)) == 1


@pytest.mark.long
def test_random_numbers_keyed_by_position_are_caught_by_beginnings_alone() -> None:
    """On the paper's toy, with texts of 8 tokens; first tokens do not tell."""
    given: dict[str, Any] = {"draft": of_two(Q), "target": of_two(P), "gamma": 2, "length": 8}
    given["count"] = 1000
    pair = pair_of(of_two(P))
    wrong = [samples(KeyedByPosition(), seed, **given) for seed in range(SEEDS)]
    assert caught(wrong, pair=pair) == 1
    first = [audit(pair, one, Sampling(), 0.001).tests[0] for one in wrong]
    assert all(test.name == "first tokens" and test.p_value > 0.001 for test in first)
    right = [samples(rules.Block(), seed, **given) for seed in range(SEEDS)]
    assert caught(right, pair=pair) == 0


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(0.7, top_k=3), Sampling(1.3, top_p=0.8)], ids=str
)
@pytest.mark.parametrize("drafts", ["model", "certain"])
def test_the_agreement_with_a_draft_is_that_of_tables(sampling: Sampling, drafts: str) -> None:
    """Against float64 tables: the sum of w(x) - E[w] over tokens, squared, over that of Var[w]."""
    p, q = (toy.distribution(x, sampling) for x in (toy.target_table(), toy.far_table()))
    pair = PAIR
    if drafts == "certain":
        pair = toy_pair(toy.CertainDraft(), jax.device_put(toy.certain_table()))
        q = toy.certain_distribution()
    w = np.minimum(1, np.divide(q, p, where=p > 0, out=np.zeros_like(p)))
    mean = (p * w).sum(axis=-1, keepdims=True)
    variance = (p * (w - mean) ** 2).sum(axis=-1)
    found = samples(rules.Token(), 0, sampling)
    excess = spread = 0.0
    for sample in found:
        for before, last, token in zip(
            *([0, 0, *sample.tokens][at:] for at in range(3)), strict=False
        ):
            excess += (w - mean)[before, last, token]
            spread += variance[before, last]
    (test,) = (x for x in audit(pair, found, sampling, 0.001).tests if x.name == AGREEMENT)
    assert test.statistic == pytest.approx(excess**2 / spread, rel=1e-3, abs=1e-4)
    assert (test.count, test.degrees) == (sum(len(x.tokens) for x in found), 1)


def test_texts_that_share_sources_agree_with_the_draft_by_their_own() -> None:
    """Texts of two sources in turn, against both transformers' logits, read one by one."""
    sources, sampling = tiny.sources(2), Sampling(2.0, top_k=25)
    pair = dataclasses.replace(
        toy_pair(TransformerDraft(tiny.DRAFT), ()),
        target=tiny.TARGET,
        params=Params(tiny.target_params(), tiny.draft_params()),
    )
    pair.vocabulary.size = tiny.VOCABULARY  # pyright: ignore[reportAttributeAccessIssue]
    texts = np.random.default_rng(3).integers(2, tiny.VOCABULARY, (4, 9))
    batch = [
        Sample(i, tuple(sources[i % 2][sources[i % 2] > 0].tolist()), text.tolist())
        for i, text in enumerate(texts)
    ]
    scores = _scores(pair, batch, sampling)
    for i, text in enumerate(texts):
        models = (tiny.TARGET, pair.params.target), (tiny.DRAFT, pair.params.draft)
        p, q = (
            toy.standardise(
                np.asarray(
                    teacher_forced.logits(model, params, sources[[i % 2]], jnp.asarray(text[None]))
                )[0, :, : tiny.VOCABULARY].astype(np.float64),
                sampling,
            )
            for model, params in models
        )
        w = np.minimum(1, np.divide(q, p, where=p > 0, out=q))
        mean = (p * w).sum(axis=-1, keepdims=True)
        there = p[np.arange(9), text] > 0  # Others are impossible, and not tested.
        assert there.sum() > 2
        excess = (w - mean)[np.arange(9), text]
        np.testing.assert_allclose(scores.agreement[i, :9][there], excess[there], atol=2e-5)
        variance = (p * (w - mean) ** 2).sum(axis=-1)
        np.testing.assert_allclose(scores.agreement_variance[i, :9], variance, atol=2e-5)


def test_the_agreement_finds_what_other_tests_miss() -> None:
    """A wrong correction with a good draft in 400 texts: without the draft, few audits find it."""
    near = toy.near_table()
    pair = dataclasses.replace(PAIR, params=Params(PAIR.params.target, toy.params(near)))
    wrong = power.Faulty(fault=power.FROM_TARGET)
    found = [samples(wrong, seed, draft=near, count=400) for seed in range(SEEDS)]
    assert caught(found, pair=pair) >= 0.9
    assert caught(found, pair=toy_pair(UniformDraft(), ())) <= 0.3
    right = [samples(rules.Token(), seed, draft=near, count=400) for seed in range(SEEDS)]
    assert caught(right, pair=pair) == 0


def test_no_agreement_is_tested_where_it_tells_nothing() -> None:
    """With a uniform draft, and with one that is the target itself."""
    right = samples(rules.Token(), 0)
    for pair in (
        toy_pair(UniformDraft(), ()),
        dataclasses.replace(PAIR, params=Params(PAIR.params.target, PAIR.params.target)),
    ):
        result = audit(pair, right, OWN, 0.001)
        assert result.passed and AGREEMENT not in {test.name for test in result.tests}


def test_a_draft_that_is_not_finite_is_refused() -> None:
    table = toy.far_table()
    table[2, :, 0] = np.nan
    pair = toy_pair(MODEL_DRAFT, toy.params(table))
    with pytest.raises(ValueError, match="toy draft are not finite.*--draft uniform audits"):
        audit(pair, samples(rules.Token(), 0), OWN, 0.001)


def test_a_pair_of_neighbours_tells_what_each_alone_does_not() -> None:
    rng = np.random.default_rng(0)
    free = [rng.random(7) for _ in range(400)]
    tied = [np.tile(rng.random(), 7) for _ in range(400)]
    assert goodness.of_pairs("", free).p_value > 0.001
    assert goodness.of_pairs("", tied).p_value < 1e-9
    # A text that ends by what its last token is leaves the next token's distribution alone.
    ended = [text[: int(np.argmax(text > 0.8)) + 1 if (text > 0.8).any() else 7] for text in free]
    assert goodness.of_pairs("", ended).p_value > 0.001


def test_beginnings_that_are_rare_or_never_seen_are_counted_together() -> None:
    """Of 45 beginnings as likely as each other 60 texts have some 33, few of them twice."""
    rng = np.random.default_rng(5)
    even = np.full((toy.PADDED,) * 3, -np.inf)
    even[..., : toy.VOCABULARY] = 0.0
    pair = pair_of(even)
    for _ in range(SEEDS):
        drawn = rng.integers(0, toy.VOCABULARY, (60, 16))
        texts = [text[: int(np.argmax(np.append(text, toy.ENDS) == toy.EOS)) + 1] for text in drawn]
        found = [Sample(1, (1,), text.tolist()) for text in texts]
        assert audit(pair, found, OWN, 0.001).passed


def test_greedy_samples_are_the_argmax() -> None:
    found = samples(rules.Token(), 0, Sampling(0.0), count=8)
    require_enough(found, Sampling(0.0))  # They are few, but each token tells.
    passed = audit(PAIR, found, Sampling(0.0), 0.001)
    assert (passed.passed, passed.near_ties, passed.impossible) == (True, 0, [])
    other = dataclasses.replace(found[3], tokens=[3, *found[3].tokens[1:]])
    failed = audit(PAIR, [*found[:3], other], Sampling(0.0), 0.001)
    assert (4, 1) in failed.impossible and not failed.passed
    assert "first token 1 of text 4" in failed.verdict()


def test_log_probabilities_excuse_rounding_alone() -> None:
    """Of a program whose model is a little off; of another that says so and samples wrongly too."""
    rounded = toy.target_table() + np.random.default_rng(2).normal(0, 0.06, (toy.PADDED,) * 3)
    said = functools.partial(said_by, toy.distribution(rounded, OWN))
    # Rounding explains so much where logits are large: added to all, this changes no distribution.
    pair = pair_of(toy.target_table() + 60)
    right = [samples(rules.Token(), seed, target=rounded, count=4000) for seed in range(2)]
    assert caught(right, pair=pair) == 1
    assert caught([said(one) for one in right], pair=pair) == 0
    wrong = [
        samples(power.Faulty(fault=power.IGNORED), seed, target=rounded, count=4000)
        for seed in range(2)
    ]
    assert caught([said(one) for one in wrong], pair=pair) == 1
    assert audit(PAIR, said(right[0]), OWN, 0.001).unexplained
    found = audit(pair, said(right[0]), OWN, 0.001)
    assert found.largest_difference is not None
    assert 0.05 < found.largest_difference < 0.4
    assert audit(PAIR, right[0], OWN, 0.001).largest_difference is None


CLAIMS = {
    "none": lambda said: None,
    "honest": lambda said: said,
    "zero": lambda said: [0.0 for _ in said],
    "infinite": lambda said: [-math.inf for _ in said],
    "NaN": lambda said: [math.nan for _ in said],
}


@pytest.mark.parametrize("own", [Sampling(0.6), Sampling(0.8), Sampling(1.0, top_k=2)], ids=str)
def test_no_log_probabilities_excuse_another_distribution(own: Sampling) -> None:
    """Of samplers with other settings, which say what they sampled, or something else."""
    p = toy.distribution(toy.target_table(), own)
    made = said_by(p, samples(rules.Token(), 3, own, count=1000))
    for claim, said in CLAIMS.items():
        found = [dataclasses.replace(one, logprobs=said(one.logprobs or [])) for one in made]
        result = audit(PAIR, found, OWN, 0.001)
        assert not result.passed
        # The samples tell alone.
        assert any(test.p_value < 0.001 / 5 for test in result.tests), claim
        assert bool(result.unexplained) == (claim != "none")
        if claim in ("infinite", "NaN"):
            assert len(result.unexplained) == result.tokens
            assert "that of token 1 of text 1 is not finite" in result.verdict()
        json.dumps(result.fields(), allow_nan=False)


@pytest.mark.parametrize(
    "own", [Sampling(), Sampling(0.7), Sampling(1.0, top_p=0.9), Sampling(0.9, min_p=0.2)], ids=str
)
def test_rounded_log_probabilities_pass(own: Sampling) -> None:
    """A program whose logits are rounded to the eight significant bits of bfloat16."""
    table = np.asarray(jnp.asarray(toy.target_table(), jnp.bfloat16), np.float64)
    table[..., toy.VOCABULARY :] = toy.target_table()[..., toy.VOCABULARY :]
    p = toy.distribution(table, own)
    found = [
        said_by(p, samples(rules.Token(), seed, own, target=table, count=1000)) for seed in range(4)
    ]
    assert caught(found, own) == 0


def test_log_probabilities_excuse_tokens_at_the_edge() -> None:
    """Of top-p 0.9, where the likeliest token has a little more, and less where it is rounded."""
    own, rounded = (
        np.log(np.broadcast_to([0.03, end, likely, 0.0195, 1e-9], (toy.PADDED,) * 3))
        for likely, end in ((0.9005, 0.05), (0.8995, 0.051))
    )
    sampling = Sampling(1.0, top_p=0.9)
    found = samples(rules.Token(), 0, sampling, target=rounded)
    assert any(toy.EOS in one.tokens for one in found)
    result = audit(pair_of(own), found, sampling, 0.001)
    assert result.impossible and not result.passed
    said = said_by(toy.distribution(rounded, sampling), found)
    result = audit(pair_of(own), said, sampling, 0.001)
    assert result.passed and result.edges == sum(toy.EOS in one.tokens for one in found)
    assert result.largest_difference == pytest.approx(-math.log(0.8995 / 0.9505), rel=1e-4)


def test_tokens_that_rounding_lets_in_are_no_others() -> None:
    """Of top-p and min-p, whose limits lie between tokens of very different probabilities."""
    logits = np.log([0.9, 0.06, 0.03, 0.01])
    for sampling, reached in (
        (Sampling(1.0, top_p=0.9 - 1e-9), 1),
        (Sampling(1.0, top_p=0.8), 0),
        (Sampling(1.0, min_p=0.06 / 0.9 + 1e-9), 1),
        (Sampling(1.0, min_p=0.5), 0),
        (Sampling(1.0, top_k=1), 0),
    ):
        rows, change = jnp.asarray(logits[None]), jnp.full(1, 1e-3)
        least = _least_kept(rows, sampling, change)
        assert np.asarray(rows >= least)[0].tolist() == [at <= reached for at in range(4)]
        # What it cannot take away: the first, unless the limit is its own probability.
        assert (
            np.asarray(rows >= _least_kept(rows, sampling, -change))[0].tolist()[1:] == [False] * 3
        )


def said_by(p: np.ndarray, found: list[Sample]) -> list[Sample]:
    """Samples with the log-probabilities of the tables' distributions [V, V, V]."""
    log_p = np.log(p, where=p > 0, out=np.full_like(p, -np.inf))
    texts = [[0, 0, *sample.tokens] for sample in found]
    return [
        dataclasses.replace(sample, logprobs=[float(log_p[*here]) for here in zip(*[
            text[at:] for at in range(3)
        ], strict=False)])
        for sample, text in zip(found, texts, strict=True)
    ]  # fmt: skip


def lines(tmp_path: pathlib.Path, *found: Any) -> list[Sample]:
    file = tmp_path / "samples.jsonl"
    file.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in found))
    return read(file, lambda text: np.array([7, 1]), Decoding(100, OWN, max_length=4))


def test_a_file_of_samples(tmp_path: pathlib.Path) -> None:
    found = lines(
        tmp_path, {"prompt": "a", "tokens": [5, 1], "top_p": 1, "seconds": 3}, "",
        {"prompt_tokens": [2, 1], "tokens": [9, 9, 9, 9], "logprobs": [-1, -2, 0, -0.5]},
        {"prompt": "a", "tokens": [5, 1], "logprobs": [-math.inf, math.inf]},
    )  # fmt: skip
    assert found.pop() == Sample(4, (7, 1), [5, 1], [-math.inf, math.inf])
    assert found == [Sample(1, (7, 1), [5, 1]), Sample(3, (2, 1), [9, 9, 9, 9], [-1, -2, 0, -0.5])]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "Line 2 of .* is no sample"),
        ([1], "it is no JSON object"),
        ({"tokens": [1]}, "neither a prompt, a text, nor prompt_tokens"),
        ({"prompt": "a"}, "tokens must be a list of whole numbers"),
        ({"prompt": "a", "tokens": [100, 1]}, "tokens has 100; the target's tokens are 0 to 99"),
        ({"prompt": "a", "tokens": []}, "has 0 tokens; there must be 1 to 4"),
        ({"prompt": "a", "tokens": [2, 2, 2, 2, 1]}, "has 5 tokens; there must be 1 to 4"),
        ({"prompt": "a", "tokens": [1, 2]}, "1 tokens follow the end of sequence, 1"),
        ({"prompt": "a", "tokens": [2, 2]}, "stops after 2 tokens without the end of sequence"),
        ({"prompt": "a", "tokens": [1], "logprobs": [-1, -2]}, "logprobs must be a number"),
        ({"prompt": "a", "tokens": [1], "logprobs": [0.1]}, "logprobs must be a number of at most"),
        ({"prompt": "a", "tokens": [1], "logprobs": [-(10**400)]}, "int too large"),
        ({"prompt_tokens": ["a"], "tokens": [1]}, "prompt_tokens must be a list of whole numbers"),
        (
            {"prompt_tokens": [2] * 100_001, "tokens": [1]},
            "its prompt has 100001 tokens, the limit",
        ),
        (
            {"prompt": "a", "tokens": [1], "temperature": 0.7},
            "its temperature is 0.7, but the audit's is 1.0 (--temperature)",
        ),
    ],
)
def test_a_line_that_is_no_sample(tmp_path: pathlib.Path, line: Any, said: str) -> None:
    with pytest.raises(ValueError, match=f"{said if said.startswith('Line') else re.escape(said)}"):
        lines(tmp_path, {"prompt": "a", "tokens": [1]}, line)


def test_the_tests_share_the_false_alarm_rate() -> None:
    def of(p_value: float) -> Audit:
        tests = [goodness.GTest(str(i), 9, 1.0, 1, p_value if i else 0.5) for i in range(5)]
        return Audit(9, 1, 99, 0, [], [], None, tests, None, 0.01)

    assert of(0.0021).passed and not of(0.0019).passed
    assert jax.tree.leaves(of(0.5).fields())


@pytest.mark.long
def test_the_stated_power_is_a_bound_on_what_is_caught() -> None:
    """Of audits of 80 texts, 40 with each fault.

    A power of 0.8 and one of 0.001 are among those stated. If one were true, the share would be
    lower by more than 3.3 standard errors with a probability of 0.0005.
    """
    count, audits = 80, 40
    draft = toy.params(toy.far_table())
    pair = dataclasses.replace(PAIR, params=Params(PAIR.params.target, draft))
    right = samples(rules.Token(), 1, count=count)
    audited = audit(pair, right, OWN, 0.001)
    assert audited.passed
    config = Decoding(toy.VOCABULARY, OWN, 4, 16, toy.ENDS)
    stated = {one.fault: one for one in power.powers(pair, right, audited, config, texts=640)}
    wrong = power.faults(OWN)
    assert list(stated) == list(wrong)
    for name, (rule, own) in wrong.items():
        texts = samples(rule, 7, own, count=count * audits)
        parts = [texts[at : at + count] for at in range(0, len(texts), count)]
        failed = [not audit(PAIR, part, OWN, 0.001).passed for part in parts]
        least = stated[name].power
        error = math.sqrt(least * (1 - least) / audits)
        assert np.mean(failed) >= least - 3.3 * error - 1e-9, name


def test_the_texts_needed_are_enough_for_an_audit_and_for_its_test() -> None:
    """Faults so clear that one text would show them."""

    def told(name: str, spread: float) -> int | None:
        tests = [goodness.GTest(name, 4000, 1e4, 1, 0.5)]
        passed = Audit(100, 1, 4000, 0, [], [], None, tests, None, 0.001, spread)
        return power._power("", [passed], passed).texts

    assert told("tokens", 1e9) == math.ceil(100 * FEWEST / 4000)
    assert told(AGREEMENT, 2 * SPREAD) == 50


def test_power_of_one_test() -> None:
    """Against normal quantiles: with one degree of freedom, a level of 0.001 and a power of 0.9.

    The noncentrality then is (3.2905 + 1.2816)^2 = 20.90. And against tables of the Poisson
    distribution: ten seen mean at least 5.425 with confidence 95%.
    """
    test = goodness.GTest("", 100, 1.0, 1, 0.5)
    assert power.of_test(test, 20.90, 0.001)[0] == pytest.approx(0.9, abs=2e-4)
    assert power.of_test(test, 1.0, 0.001)[1] == pytest.approx(20.90, abs=0.01)
    assert power.of_test(test, 0.0, 0.001)[:2] == pytest.approx((0.001, math.inf))
    assert power.of_test(test, 1e6, 0.001)[0] == 1
    seen, times, _ = power.of_impossible(10, 2)
    assert seen == pytest.approx(1 - math.exp(-5.425 / 2), abs=1e-3)
    assert times == pytest.approx(math.log(10) / (5.425 / 2), abs=1e-3)
    assert power.of_impossible(0, 2)[:2] == (0, math.inf)
