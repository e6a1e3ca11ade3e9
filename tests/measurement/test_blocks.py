"""Expected tokens of a step, against an enumeration of all blocks of guesses."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speculative.decoding import Decoding, Params, Rule, rules
from speculative.decoding.loop import Models
from speculative.measurement.blocks import step_tokens, tokens_on_target_text
from speculative.sampling import Sampling
from tests import toy
from tests.measurement.pairs import MODEL_DRAFT, SOURCE, toy_pair

ROWS = 20_000
TEXT = [2, 3, 0, 3]
CONFIG = Decoding(toy.VOCABULARY, max_length=8, eos_ids=toy.ENDS)


def enumerated(p: np.ndarray, q: np.ndarray, before: int, last: int, gamma: int, block: bool):
    """The mean and the variance over guesses of the tokens of a step; p and q are [V, V, V]."""
    first = second = 0.0
    for guesses in itertools.product(range(toy.VOCABULARY), repeat=gamma):
        context, chance, whole, rows = (before, last), 1.0, [1.0], []
        single = [1.0]
        for guess in guesses:
            rows.append((p[context], q[context]))
            chance *= q[context][guess]
            if not chance:
                break
            ratio = p[context][guess] / q[context][guess]
            whole.append(min(1.0, whole[-1] * ratio))
            single.append(single[-1] * min(1.0, ratio))
            context = (context[1], guess)
        if not chance:
            continue
        reached = single[1:]  # At least 1, .. gamma guesses are accepted.
        if block:
            passes, none = [], 1.0
            for i in range(gamma, 0, -1):
                left = whole[i]
                if i < gamma:
                    left = np.maximum(whole[i] * rows[i][0] - rows[i][1], 0).sum()
                total = left + 1 - whole[i]
                passes.append(left / total if total else 1.0)
                none *= 1 - passes[-1]
            reached = [1 - np.prod([1 - h for h in passes[: gamma - i]]) for i in range(gamma)]
        end = guesses.index(toy.EOS) if toy.EOS in guesses else gamma
        tokens = 1 + sum(reached[:end])
        first, second = first + chance * tokens, second + chance * tokens**2
    return first, second - first**2


@pytest.mark.parametrize("rule", [rules.Token(), rules.Block()], ids=["token", "block"])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.3, top_p=0.8)], ids=str)
def test_expected_tokens_are_those_of_all_blocks(rule: Rule, sampling: Sampling) -> None:
    """The mean over 20,000 draws of guesses; within five standard errors (6e-7 by chance)."""
    target, draft = toy.target_table(), toy.near_table()
    params = Params(toy.params(target), toy.params(draft))
    uniforms = jax.random.uniform(jax.random.key(5), (len(TEXT), ROWS, 3))
    tokens = jnp.broadcast_to(jnp.array(TEXT), (ROWS, len(TEXT)))
    models, sources = Models(toy.MarkovModel(), MODEL_DRAFT), jnp.ones((ROWS, 1), jnp.int32)
    given = models, params, sources, tokens, uniforms, sampling, toy.VOCABULARY, toy.EOS
    found = np.asarray(step_tokens(*given, gammas=(1, 3), rules=(rule,)), np.float64).mean(axis=0)[
        ..., 0
    ]
    p, q = (toy.distribution(table, sampling) for table in (target, draft))
    for at, (before, last) in enumerate(itertools.pairwise([0, 0, *TEXT[:-1]])):
        for gamma, got in zip((1, 3), found[at], strict=True):
            block = isinstance(rule, rules.Block)
            mean, variance = enumerated(p, q, before, last, gamma, block)
            assert abs(got - mean) <= 5 * np.sqrt(variance / ROWS) + 1e-5


def test_blocks_yield_no_fewer_tokens_from_the_same_guesses() -> None:
    pair = toy_pair(MODEL_DRAFT, toy.params(toy.near_table()))
    given = pair, SOURCE, [2, 3, 0, 3, 3, 1], CONFIG, (1, 2, 5)
    both = rules.Token(), rules.Block()
    found = np.mean([tokens_on_target_text(*given, both, seed) for seed in range(200)], axis=0)
    token, block = np.moveaxis(found, -1, 0)
    assert token.shape == (6, 3)
    np.testing.assert_allclose(block[:, 0], token[:, 0], rtol=1e-5)  # One guess is no block.
    assert (block.mean(axis=0)[1:] > token.mean(axis=0)[1:]).all()


def test_a_draft_that_is_the_target_yields_all_guesses_before_the_end() -> None:
    pair = toy_pair(MODEL_DRAFT, toy.params(toy.target_table()))
    given = pair, SOURCE, [2, 3, 0], CONFIG, (2, 6)
    tokens = tokens_on_target_text(*given, (rules.Token(), rules.Block()))
    assert tokens.max() <= 7 and tokens.min() >= 1
    np.testing.assert_allclose(tokens, np.round(tokens), atol=1e-4)
