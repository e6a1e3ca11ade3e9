"""Logits processors and stop strings, on enumerable models and against the traced loop.

P-values are of chi-square tests against an enumeration in float64 that shares no code with the
package. Seeds are fixed; a correct program would fail any check here with probability 1e-4 at most
(Bonferroni).
"""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from speculative.decoding import Decoding, Params, queue, rules
from speculative.decoding.queue import Request
from speculative.drafts import Draft, NgramDraft, count_ngrams, ngram_params
from speculative.processors import History, RepetitionPenalty
from speculative.sampling import Sampling
from speculative.types import PyTree
from tests import ngrams, toy
from tests.decoding.test_exactness import MODEL_DRAFT, TARGET, decode, outputs
from tests.decoding.test_tracing import check_same_tokens

ROWS = 20_000
THRESHOLD = 1e-4 / 100
"""There are fewer p-values than 100 here."""

PENALTY = RepetitionPenalty(1.7)
OWN = Sampling()


@dataclasses.dataclass(frozen=True)
class NoPairTwice:
    """Forbids a token that followed the newest one before, but for the end; at first the 3."""

    def __call__(self, logits: Array, text: Array, length: Array) -> Array:
        newest = text[jnp.maximum(length - 1, 0)]
        follows = jnp.where((text[:-1] == newest) & (length > 0), text[1:], -1)
        forbidden = (follows[:, None] == jnp.arange(len(logits))).any(axis=0)
        forbidden = forbidden | ((jnp.arange(len(logits)) == 3) & (length == 0))
        return jnp.where(forbidden.at[toy.EOS].set(False), -jnp.inf, logits)


def penalised(logits: np.ndarray, prefix: tuple[int, ...]) -> np.ndarray:
    """`PENALTY` in float64."""
    changed = logits.copy()
    for token in set(prefix):
        changed[token] *= 1 / 1.7 if logits[token] > 0 else 1.7
    return changed


def without_pairs(logits: np.ndarray, prefix: tuple[int, ...]) -> np.ndarray:
    """`NoPairTwice` in float64."""
    pairs = set(zip(prefix, prefix[1:], strict=False))
    changed = logits.copy()
    for token in range(len(logits)):
        if token != toy.EOS and (
            (prefix and (prefix[-1], token) in pairs) or (3, ()) == (token, prefix)
        ):
            changed[token] = -np.inf
    return changed


InNumPy = Callable[[np.ndarray, tuple[int, ...]], np.ndarray]
PROCESSORS = {
    "penalty": ((PENALTY,), (penalised,)),
    "no pair twice": ((NoPairTwice(),), (without_pairs,)),
    "both": ((PENALTY, NoPairTwice()), (penalised, without_pairs)),
}


def law(changes: tuple[InNumPy, ...], sampling: Sampling, length: int) -> toy.Probabilities:
    """The distribution of whole outputs of the target with processed logits."""
    table = toy.target_table()

    def next_token(prefix: tuple[int, ...]) -> np.ndarray:
        logits = table[(0, 0, *prefix)[-2:]][: toy.VOCABULARY]
        for change in changes:
            logits = change(logits, prefix)
        return toy.standardise(logits, sampling)

    return toy.enumerated(next_token, length)


def settings(
    name: str, gamma: int, rule: str = "token", sampling: Sampling = OWN, length: int = 6
) -> Decoding:
    return Decoding(
        toy.VOCABULARY, sampling, gamma, length, toy.ENDS, rules.select(rule),
        processors=PROCESSORS[name][0],
    )  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "table", "gamma", "rule", "sampling"),
    [
        ("penalty", toy.near_table, 4, "token", OWN),
        ("no pair twice", toy.near_table, 4, "block", OWN),
        ("both", toy.near_table, 1, "token", Sampling(1.3, min_p=0.2)),
        # Here some draft's q has nothing left that is not forbidden.
        ("both", toy.disjoint_table, 4, "token", OWN),
        ("both", toy.disjoint_table, 4, "block", OWN),
    ],
    ids=["penalty", "no pair twice", "min-p too", "disjoint", "disjoint, block"],
)
def test_outputs_are_the_processed_targets(
    name: str, table: Callable[[], np.ndarray], gamma: int, rule: str, sampling: Sampling
) -> None:
    config = settings(name, gamma, rule, sampling)
    output = decode(MODEL_DRAFT, toy.params(table()), config, ROWS)
    expected = law(PROCESSORS[name][1], sampling, config.max_length)
    assert toy.p_value(outputs(output), expected) > THRESHOLD


def test_guesses_are_of_processed_logits_too() -> None:
    """A draft that is the target has all its guesses accepted, at every position of a block."""
    config = settings("both", 4, length=9)
    output = decode(MODEL_DRAFT, toy.params(toy.target_table()), config, ROWS)
    np.testing.assert_array_equal(output.accepted, output.tested)
    assert (output.accepted > 0).mean() > 0.9


@pytest.mark.parametrize(
    ("kind", "rule", "sampling"),
    [
        ("model", "token", Sampling(0.0)),
        pytest.param("model", "token", Sampling(0.8), marks=pytest.mark.long),
        ("n-gram", "block", Sampling(0.8)),
        ("certain", "token", Sampling(0.8)),
    ],
    ids=str,
)
def test_the_reference_loop_says_the_same(kind: str, rule: str, sampling: Sampling) -> None:
    texts = ngrams.texts(toy.VOCABULARY)
    drafts: dict[str, tuple[Draft, PyTree]] = {
        "model": (MODEL_DRAFT, toy.params(toy.near_table())),
        "n-gram": (NgramDraft(2), ngram_params(count_ngrams(texts, 2, toy.VOCABULARY), 2)),
        "certain": (toy.CertainDraft(), jax.device_put(toy.certain_table())),
    }
    draft, draft_params = drafts[kind]
    config = settings("both", 3, rule, sampling, length=12)
    params = Params(toy.params(toy.target_table()), draft_params)
    check_same_tokens(TARGET, draft, params, np.ones((12, 1), np.int32), config, seed=17)
    if sampling.greedy:  # And so does the target alone.
        output = decode(draft, draft_params, config, rows=1)
        np.testing.assert_array_equal(output.tokens, decode(None, (), config, rows=1).tokens)


@pytest.mark.usefixtures("recompiled")
def test_a_text_that_lags_behind_the_block_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: all of a block is processed as if it came after the text before the block."""

    def lagging(self: History, logits: Array, *_: Any) -> Array:
        return jax.vmap(self.process, in_axes=1, out_axes=1)(logits)

    monkeypatch.setattr(History, "process_block", lagging)
    config = settings("both", 4)
    output = decode(MODEL_DRAFT, toy.params(toy.near_table()), config, ROWS)
    assert toy.p_value(outputs(output), law(PROCESSORS["both"][1], Sampling(), 6)) < THRESHOLD


def test_log_probabilities_are_of_processed_logits() -> None:
    config = dataclasses.replace(settings("both", 4), logprobs=True)
    output = decode(MODEL_DRAFT, toy.params(toy.near_table()), config, rows=300)
    expected = law(PROCESSORS["both"][1], Sampling(), config.max_length)
    for tokens, length, own in zip(output.tokens, output.lengths, output.logprobs, strict=True):
        assert own[:length].sum() == pytest.approx(
            np.log(expected[tuple(tokens[:length].tolist())]), abs=1e-4
        )


@pytest.mark.long
@pytest.mark.parametrize("rule", rules.RULES)
def test_stops_cut_the_targets_outputs(rule: str) -> None:
    """In a batch that texts enter as others end: the law is that of outputs, each cut at a 2, 3."""
    count, config = 6000, settings("penalty", 3, rule)
    params = Params(toy.params(toy.target_table()), toy.params(toy.near_table()))
    source = jnp.ones((1, 1), jnp.int32)
    texts = ((i, Request(source, config, 23, i)) for i in range(count))

    def cut(tokens: list[int]) -> tuple[int, ...]:
        pairs = list(zip(tokens, tokens[1:], strict=False))
        return tuple(tokens[: pairs.index((2, 3)) + 2] if (2, 3) in pairs else tokens)

    given = TARGET, MODEL_DRAFT, params, texts, config.sampling.kinds, 512
    found = Counter(
        cut(output.tokens[0, : output.lengths[0]].tolist())
        for _, output in queue.generate(*given, lambda _, tokens: len(cut(tokens)) < len(tokens))
    )
    expected: toy.Probabilities = defaultdict(float)
    for text, chance in law((penalised,), Sampling(), config.max_length).items():
        expected[cut(list(text))] += chance
    assert found.total() == count
    assert toy.p_value(found, expected) > THRESHOLD


@dataclasses.dataclass(frozen=True)
class Wrong:
    """Gives something of another shape, or NaN."""

    kind: str

    def __call__(self, logits: Array, text: Array, length: Array) -> Array:
        return {"short": logits[1:], "one": logits.max(), "nan": logits * jnp.nan}[self.kind]


@pytest.mark.parametrize(("kind", "shape"), [("short", r"\(3,\)"), ("one", r"\(\)")])
def test_a_processor_of_another_shape_is_refused(kind: str, shape: str) -> None:
    config = dataclasses.replace(settings("both", 2), processors=(Wrong(kind),))
    with pytest.raises(ValueError, match=rf"Wrong\(kind='{kind}'\) makes logits of shape {shape}"):
        decode(MODEL_DRAFT, toy.params(toy.near_table()), config, rows=2)


def test_nan_of_a_processor_is_told() -> None:
    config = dataclasses.replace(settings("both", 2), processors=(Wrong("nan"),))
    assert not decode(MODEL_DRAFT, toy.params(toy.near_table()), config, rows=2).finite.any()


@dataclasses.dataclass(frozen=True)
class OnlyThrees:
    """Forbids all but the 0 and the 3, and every token of a text that has another."""

    def __call__(self, logits: Array, text: Array, length: Array) -> Array:
        lost = ((text == 1) | (text == 2)).any()
        allowed = jnp.isin(jnp.arange(len(logits)), jnp.array([0, 3]))
        return jnp.where(allowed & ~lost, logits, -jnp.inf)


@pytest.mark.parametrize("gamma", [0, 4])
def test_texts_that_are_not_to_be_may_be_forbidden_altogether(gamma: int) -> None:
    """Of a draft that guesses without processors; what comes after its guesses is not emitted."""
    config = dataclasses.replace(settings("both", gamma), processors=(OnlyThrees(),))
    draft = toy.CertainDraft() if gamma else None
    output = decode(draft, jax.device_put(toy.certain_table()), config, rows=200)
    assert output.finite.all() and (output.lengths == config.max_length).all()
    assert set(output.tokens.ravel().tolist()) == {0, 3}


@dataclasses.dataclass(frozen=True)
class WithList(OnlyThrees):
    """Cannot be hashed."""

    tokens: list[int] = dataclasses.field(default_factory=list)


@pytest.mark.parametrize("wrong", ["x", [], {}, WithList()], ids=str)
def test_what_is_no_processor_is_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match="processor must be a function"):
        dataclasses.replace(settings("both", 2), processors=(wrong,))


@pytest.mark.parametrize("penalty", [0, -1, float("inf"), "2", None])
def test_a_penalty_is_a_positive_number(penalty: object) -> None:
    with pytest.raises(ValueError, match="penalty must be a positive number"):
        RepetitionPenalty(penalty)  # pyright: ignore[reportArgumentType]
