"""Block verification: exact on enumerable models, and accepted as Sun et al. (2403.10444) say.

Every p-value is of a chi-square test against an enumeration in float64. Seeds are fixed; a correct
program would fail any check here with probability 1e-4 at most (Bonferroni).
"""

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from speculative.decoding import Decoding, Output, Params, block, rules
from speculative.decoding import loop as fast
from speculative.drafts import Draft, TransformerDraft
from speculative.sampling import Sampling
from speculative.studies.power import KeyedByPosition
from speculative.types import PyTree
from tests import toy
from tests.decoding.test_exactness import LENGTHS, OPTIMIZED, outputs

ROWS, FEWER, STEPS = 100_000, 20_000, 20_000
THRESHOLD = 1e-4 / 100
"""There are fewer p-values than 100 here."""

BLOCK, TOKEN = rules.Block(), rules.Token()
TARGET = toy.MarkovModel()
DRAFT = TransformerDraft(TARGET)
TABLES = {
    "near": toy.near_table,
    "far": toy.far_table,
    "equal": toy.target_table,
    "disjoint": toy.disjoint_table,
}
SAMPLINGS = {1: Sampling(1.3, min_p=0.15), 2: Sampling(0.7, top_k=2), 4: Sampling(), 7: Sampling()}


def settings(gamma: int, rule: rules.Rule = BLOCK, length: int | None = None) -> Decoding:
    length = length or LENGTHS.get(gamma, 5)
    return Decoding(toy.VOCABULARY, SAMPLINGS[gamma], gamma, length, toy.ENDS, rule=rule)


@functools.cache
def numbers(begin: int, config: Decoding) -> Array:
    return config.draws(2403, begin + np.arange(FEWER))


def decode(
    draft: Draft,
    draft_params: PyTree,
    config: Decoding,
    table: np.ndarray | None = None,
    rows: int = FEWER,
) -> Output:
    """`FEWER` rows at a time, so that there is one program to compile."""
    sources = jnp.ones((FEWER, 1), jnp.int32)
    params = Params(toy.params(toy.target_table() if table is None else table), draft_params)
    outputs = [
        fast.generate(TARGET, draft, params, sources, numbers(begin, config), config)
        for begin in range(0, rows, FEWER)
    ]
    return jax.tree.map(lambda *parts: np.concatenate(parts), *outputs)


def p_value(output: Output, config: Decoding, table: np.ndarray | None = None) -> float:
    p = toy.distribution(toy.target_table() if table is None else table, config.sampling)
    return toy.p_value(outputs(output), toy.output_probabilities(p, config.max_length))


@OPTIMIZED
@pytest.mark.parametrize("gamma", [1, 2, 4, pytest.param(7, marks=pytest.mark.long)])
@pytest.mark.parametrize("table", TABLES)
def test_outputs_are_the_targets(table: str, gamma: int) -> None:
    config = settings(gamma)
    rows = ROWS if (table, gamma) == ("near", 4) else FEWER
    output = decode(DRAFT, toy.params(TABLES[table]()), config, rows=rows)
    assert p_value(output, config) > THRESHOLD
    if table == "equal":  # All guesses are accepted, but for those after the end.
        np.testing.assert_array_equal(output.accepted, output.tested)
    if table == "near" and gamma == 7:  # The end token is among accepted guesses.
        assert (output.lengths == output.accepted + output.target_calls - 1).mean() > 0.1


@OPTIMIZED
def test_deterministic_proposals_are_verified_by_token() -> None:
    config = settings(4)
    output = decode(toy.CertainDraft(), jax.device_put(toy.certain_table()), config, rows=ROWS)
    assert p_value(output, config) > THRESHOLD
    by_token = toy.calls_probabilities(
        toy.distribution(toy.target_table(), config.sampling), toy.certain_distribution(), 4,
        config.max_length,
    )  # fmt: skip
    calls = Counter((n,) for n in output.target_calls.tolist())
    assert toy.p_value(calls, by_token) > THRESHOLD


# The law of the accepted guesses, enumerated.


def enumerated(p: np.ndarray, q: np.ndarray, gamma: int) -> np.ndarray:
    """P(tau = 0 .. gamma) in the first step, over all blocks of guesses; p, q are [V, V, V]."""
    law = np.zeros(gamma + 1)
    for guesses in itertools.product(range(len(p)), repeat=gamma):
        before, last, chance, whole = 0, 0, 1.0, [1.0]
        rows = []
        for guess in guesses:
            rows.append((p[before, last], q[before, last]))
            chance *= q[before, last, guess]
            if chance == 0:
                break
            whole.append(min(1.0, whole[-1] * p[before, last, guess] / q[before, last, guess]))
            before, last = last, guess
        if chance == 0:
            continue
        rest = chance
        for i in range(gamma, 0, -1):
            z = whole[i] if i == gamma else np.maximum(whole[i] * rows[i][0] - rows[i][1], 0).sum()
            h = whole[i] if i == gamma else z / (z + 1 - whole[i]) if z + 1 > whole[i] else 1.0
            law[i] += rest * h
            rest *= 1 - h
        law[0] += rest
    return law


def first_steps(rule: rules.Rule, table: np.ndarray, gamma: int) -> fast.Step:
    config = dataclasses.replace(settings(gamma, rule, 9), sampling=Sampling(), eos_ids=())
    models = fast.Models(TARGET, DRAFT)
    params = Params(toy.params(toy.target_table()), toy.params(table))
    sources, draws = jnp.ones((STEPS, 1), jnp.int32), config.draws(2403, np.arange(STEPS))
    begun = fast.begin(models, params, sources, config, config.capacity)
    return fast.one_step(models, params, begun, draws, config)[1]


@pytest.mark.parametrize("table", ["near", pytest.param("far", marks=pytest.mark.long), "disjoint"])
def test_accepted_guesses_have_the_papers_law(table: str) -> None:
    gamma = 4
    draft = TABLES[table]()
    p, q = (toy.distribution(x, Sampling()) for x in (toy.target_table(), draft))
    law = enumerated(p, q, gamma)
    accepted = np.asarray(first_steps(BLOCK, draft, gamma).accepted)
    counts = Counter((n,) for n in accepted.tolist())
    wanted = {(n,): chance for n, chance in enumerate(law.tolist())}
    assert toy.p_value(counts, wanted) > THRESHOLD
    by_token = np.asarray(first_steps(TOKEN, draft, gamma).accepted).mean()
    assert law @ np.arange(gamma + 1) >= by_token - 5 * gamma / np.sqrt(STEPS)


P, Q = np.array([1 / 3, 2 / 3]), np.array([2 / 3, 1 / 3])
chances_of = jax.jit(lambda rule, *block: rule.chances(*block), static_argnums=(0, 4))


def test_expected_guesses_of_the_papers_toy() -> None:
    """Sun et al., section 2: 11/9 guesses of 2 are accepted in a block, 10/9 one by one."""
    guesses = np.array(list(itertools.product((0, 1), repeat=2)), np.int32)
    logits = np.broadcast_to(np.log(P), (4, 3, 2)).astype(np.float32)
    q = np.broadcast_to(Q, (4, 2, 2)).astype(np.float32)
    weights = Q[guesses].prod(axis=1)
    for rule, wanted in ((BLOCK, 11 / 9), (TOKEN, 10 / 9)):
        chances = np.asarray(chances_of(rule, guesses, logits, q, Sampling()))
        np.testing.assert_allclose(chances.sum(axis=1), 1, rtol=1e-6)
        assert weights @ chances @ np.arange(3) == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("rule", [BLOCK, TOKEN], ids=["block", "token"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_chances_are_the_share_of_random_numbers(rule: rules.Rule, deterministic: bool) -> None:
    """20,000 verifications of each of 8 blocks; chi-square."""
    rng = np.random.default_rng(3)
    rows, count = 8, 20_000
    logits = rng.normal(size=(rows, 5, 6)).astype(np.float32)
    q = rng.dirichlet(np.ones(6), (rows, 4)).astype(np.float32)
    guesses = rng.integers(0, 6, (rows, 4)).astype(np.int32)
    block: tuple[Any, Any, Any] = jax.device_put((guesses, logits, None if deterministic else q))
    chances = np.asarray(chances_of(rule, *block, Sampling()))

    def verified(uniforms: Array) -> Array:
        return rule.verify(*block, Sampling(), uniforms)[0]

    uniforms = rng.random((count, rows, 5, 3)).astype(np.float32)
    accepted = np.asarray(jax.jit(jax.vmap(verified))(uniforms))
    np.testing.assert_allclose(chances.sum(axis=1), 1, rtol=1e-6)
    for row, law in enumerate(chances.astype(np.float64)):
        counts = Counter((n,) for n in accepted[:, row].tolist())
        wanted = {(n,): x for n, x in enumerate(law / law.sum()) if x or counts[n,]}
        assert toy.p_value(counts, wanted) > THRESHOLD


# The checks must be able to fail: faults are planted one at a time.


def of_two(chances: np.ndarray) -> np.ndarray:
    """The table of a model that says token 2 or 3, whatever came before."""
    logits = np.full(toy.PADDED, -np.inf)
    logits[2:4] = np.log(chances)
    return np.broadcast_to(logits, (toy.PADDED,) * 3)


@pytest.mark.parametrize("rule", [BLOCK, KeyedByPosition()], ids=["step", "position"])
def test_random_numbers_keyed_by_position_are_found(rule: rules.Rule) -> None:
    """On the paper's toy the texts tell, and the first tokens alone do not."""
    config = dataclasses.replace(settings(2, rule, 3), sampling=Sampling())
    output = decode(DRAFT, toy.params(of_two(Q)), config, of_two(P))
    fine = p_value(output, config, of_two(P))
    assert fine > THRESHOLD if rule is BLOCK else fine < THRESHOLD
    first = Counter((token,) for token in output.tokens[:, 0].tolist())
    assert toy.p_value(first, {(2,): 1 / 3, (3,): 2 / 3}) > THRESHOLD


def zero_over_zero_is_zero(*given: Any) -> tuple[Array, Array]:
    kept, passes = TRUE_KEPT(*given)
    return kept, jnp.where((kept == 1) & (passes == 1), 0.0, passes)


TRUE_KEPT = block.kept


@pytest.mark.usefixtures("recompiled")
@pytest.mark.parametrize(
    ("where", "name", "fault"),
    [
        (block, "largest", rules.leading),  # Stops at the first failure.
        (rules, "residual", lambda p, q: p),
    ],
)
def test_a_planted_fault_is_found(
    monkeypatch: pytest.MonkeyPatch, where: Any, name: str, fault: Callable[..., Any]
) -> None:
    monkeypatch.setattr(where, name, fault)
    config = settings(4)
    assert p_value(decode(DRAFT, toy.params(toy.near_table()), config), config) < THRESHOLD


@pytest.mark.usefixtures("recompiled")
def test_equal_models_need_zero_over_zero_to_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block, "kept", zero_over_zero_is_zero)
    config = settings(4)
    output = decode(DRAFT, toy.params(toy.target_table()), config, rows=1000)
    assert output.accepted.sum() < output.tested.sum()
