"""Speculative decoding samples the target's distribution: chi-square on enumerable models.

Every check compares two distributions with enumerations in float64: that of whole outputs, which
is the target's (Theorem A.1), and that of the number of target calls, which shows that guesses are
tested against the right distributions and that accepted blocks end with a bonus token. A model's
draft decodes 100,000 outputs once and 20,000 in all other settings, as other drafts do: that is
enough for every planted fault.
Seeds are fixed; a correct program would fail any check here with probability 1e-4 at most
(Bonferroni).
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

from speculative.backends import prepack
from speculative.decoding import Decoding, Output, Params, rule, rules
from speculative.decoding import loop as fast
from speculative.drafts import (
    CopyDraft,
    Draft,
    HiddenDraft,
    MixedDraft,
    NgramDraft,
    TransformerDraft,
    UniformDraft,
    count_ngrams,
    ngram_params,
)
from speculative.drafts.translated import Tables, Translated
from speculative.measurement import teacher_forced
from speculative.models import T5, T5Config
from speculative.models.interface import Extended
from speculative.models.reads import Reads
from speculative.sampling import Sampling, categorical
from speculative.types import PyTree
from tests import ngrams, numpy_models, saved, tiny, toy

LONG = pytest.mark.long
OPTIMIZED = pytest.mark.usefixtures("optimized")

ROWS, FEWER = 100_000, 20_000
CHECKS = 100
"""More p-values than all tests here compute together."""
THRESHOLD = 1e-4 / CHECKS

SAMPLINGS = {
    "temperature 1": Sampling(),
    "top_k": Sampling(temperature=0.7, top_k=2),
    "top_p": Sampling(temperature=1.3, top_p=0.8),
}
LENGTHS = {1: 5, 4: 8, 7: 9}
"""Tokens an output may have, by gamma: a bonus token fits, and in most cases another step."""

EACH = [
    ("temperature 1", 1),
    pytest.param("temperature 1", 4, marks=LONG),
    ("temperature 1", 7),
    ("top_k", 4),
    ("top_p", 7),
]
"""Ways of sampling and gammas: what is standardised does not depend on gamma."""

ONCE = [("temperature 1", 4), ("top_k", 1), pytest.param("top_p", 7, marks=LONG)]
"""Each of them once, for what decodes by the same program but for the guesses."""

TARGET = toy.MarkovModel()
MODEL_DRAFT = TransformerDraft(TARGET)


def settings(sampling: str, gamma: int) -> Decoding:
    return Decoding(toy.VOCABULARY, SAMPLINGS[sampling], gamma, LENGTHS[gamma], toy.ENDS)


def rows(sampling: str, gamma: int) -> int:
    return ROWS if (sampling, gamma) == ("temperature 1", 4) else FEWER


@functools.cache
def draws(rows: int, config: Decoding) -> Array:
    return config.draws(2211, np.arange(rows))


def decode(draft: Draft | None, draft_params: PyTree, config: Decoding, rows: int = ROWS) -> Output:
    """So many outputs of the target, alone where there is no draft."""
    sources = jnp.ones((rows, 1), jnp.int32)
    config = config if draft else dataclasses.replace(config, gamma=0)
    params = Params(toy.params(toy.target_table()), draft_params)
    output = fast.generate(TARGET, draft, params, sources, draws(rows, config), config)
    return jax.tree.map(np.asarray, output)


def outputs(output: Output) -> Counter[tuple[int, ...]]:
    """How often each sequence came out."""
    tokens, lengths = output.tokens, output.lengths
    places = toy.VOCABULARY ** np.arange(tokens.shape[1])
    codes = (tokens @ places) * (tokens.shape[1] + 1) + lengths
    _, first, counts = np.unique(codes, return_index=True, return_counts=True)
    pairs = zip(first, counts.tolist(), strict=True)
    return Counter({tuple(tokens[i, : lengths[i]].tolist()): count for i, count in pairs})


def p_values(output: Output, q: np.ndarray, config: Decoding) -> tuple[float, float]:
    """Of the distributions of outputs and of target calls, given the draft's q [V, V, V]."""
    p = toy.distribution(toy.target_table(), config.sampling)
    calls = Counter((n,) for n in output.target_calls.tolist())
    return (
        toy.p_value(outputs(output), toy.output_probabilities(p, config.max_length)),
        toy.p_value(calls, toy.calls_probabilities(p, q, config.gamma, config.max_length)),
    )


@OPTIMIZED
@pytest.mark.parametrize(("sampling", "gamma"), EACH)
@pytest.mark.parametrize(
    "table",
    [toy.near_table, *(pytest.param(x, marks=LONG) for x in (toy.far_table, toy.disjoint_table))],
)
def test_a_model_draft_is_exact(table: Callable[[], np.ndarray], sampling: str, gamma: int) -> None:
    config = settings(sampling, gamma)
    output = decode(MODEL_DRAFT, toy.params(table()), config, rows(sampling, gamma))
    q = toy.distribution(table(), config.sampling)
    assert min(p_values(output, q, config)) > THRESHOLD


@dataclasses.dataclass(frozen=True)
class NarrowModel(toy.MarkovModel):
    """Whose logits are of three of the four tokens, none of them the end."""

    draft_vocabulary = np.array([0, 2, 3])

    def extend(self, *given: Any, **more: Any) -> Extended:
        found = super().extend(*given, **more)
        return found._replace(logits=found.logits[..., self.draft_vocabulary])


@OPTIMIZED
@pytest.mark.parametrize(("sampling", "gamma"), ONCE)
def test_a_draft_that_guesses_some_tokens_alone_is_exact(sampling: str, gamma: int) -> None:
    config = settings(sampling, gamma)
    given = TransformerDraft(NarrowModel()), toy.params(toy.near_table()), config
    output = decode(*given, rows(sampling, gamma))
    logits = toy.near_table()
    logits[..., toy.EOS] = -np.inf
    q = toy.distribution(logits, config.sampling)
    assert min(p_values(output, q, config)) > THRESHOLD


@OPTIMIZED
@pytest.mark.parametrize(("sampling", "gamma"), ONCE)
def test_a_draft_of_another_vocabulary_is_exact(sampling: str, gamma: int) -> None:
    """Six tokens, of which three are the target's; it reads the fourth as one of its own."""
    read_as, place, count = np.array([0, 2, 4, 5]), np.array([0, 6, 4, 5]), 6
    inner = np.random.default_rng(21).normal(0, 1.5, (count,) * 3).astype(np.float32)
    given = jnp.asarray(inner), Tables(jnp.asarray(read_as), jnp.asarray(place))
    draft = TransformerDraft(Translated(TARGET))  # pyright: ignore
    config = settings(sampling, gamma)
    output = decode(draft, given, config, rows(sampling, gamma))
    known = inner[read_as][:, read_as]
    logits = np.concatenate([known, np.full((4, 4, 1), -np.inf)], axis=-1)[..., place]
    q = toy.distribution(logits, config.sampling)
    assert min(p_values(output, q, config)) > THRESHOLD


@OPTIMIZED
@pytest.mark.parametrize(("sampling", "gamma"), ONCE)
def test_a_deterministic_draft_is_exact(sampling: str, gamma: int) -> None:
    config = settings(sampling, gamma)
    table = jax.device_put(toy.certain_table())
    output = decode(toy.CertainDraft(), table, config, rows(sampling, gamma))
    assert min(p_values(output, toy.certain_distribution(), config)) > THRESHOLD


@OPTIMIZED
def test_a_uniform_draft_is_exact() -> None:
    config = settings("top_k", 4)
    q = np.full((toy.VOCABULARY,) * 3, 1 / toy.VOCABULARY)
    assert min(p_values(decode(UniformDraft(), (), config, FEWER), q, config)) > THRESHOLD


@OPTIMIZED
def test_a_bigram_draft_is_exact() -> None:
    config = settings("top_p", 4)
    texts = ngrams.texts(toy.VOCABULARY)
    table = ngram_params(count_ngrams(texts, 2, toy.VOCABULARY), 2)
    rows = [ngrams.row(texts, [last], toy.VOCABULARY) for last in range(toy.VOCABULARY)]
    output = decode(NgramDraft(2), table, config, FEWER)
    q = toy.standardise(np.broadcast_to(np.log(rows), (toy.VOCABULARY,) * 3), config.sampling)
    assert min(p_values(output, q, config)) > THRESHOLD


LAYERS = ("decoder/layers_0", "decoder/decoder_norm")
SMALL_T5 = T5(T5Config(toy.PADDED, 8, 2, 4, 16, 1, 1))
READS_IT = T5(T5Config(toy.PADDED, 8, 1, 4, 16, 0, 1, reads=Reads(8, LAYERS)))
OF_T5 = Decoding(toy.VOCABULARY, Sampling(0.7), 3, 6, toy.ENDS)


@functools.cache
def t5_params() -> PyTree:
    params = saved.random(SMALL_T5.config, 2)
    params["decoder"]["logits_dense"]["kernel"] *= 3
    return params


def of_t5_alone(target: T5, params: PyTree) -> toy.Probabilities:
    """The distribution of the outputs of a T5 of four tokens, by its passes over whole texts."""
    texts = np.array([*itertools.product(range(toy.VOCABULARY), repeat=OF_T5.max_length)])
    sources = np.tile(np.array([2, 3], np.int32), (len(texts), 1))
    logits = np.asarray(teacher_forced.logits(target, params, sources, texts))
    places = toy.VOCABULARY ** np.arange(OF_T5.max_length)[::-1]

    def next_token(prefix: tuple[int, ...]) -> np.ndarray:
        text = int(np.array(prefix, int) @ places[: len(prefix)])
        return toy.standardise(logits[text, len(prefix), : toy.VOCABULARY], OF_T5.sampling)

    return toy.enumerated(next_token, OF_T5.max_length)


@functools.cache
def of_t5() -> toy.Probabilities:
    """Likewise by float64 T5."""

    def next_token(prefix: tuple[int, ...]) -> np.ndarray:
        fed = np.array([0, *prefix])
        logits = numpy_models.logits(t5_params(), SMALL_T5.config, np.array([2, 3]), fed)
        return toy.standardise(logits[-1, : toy.VOCABULARY], OF_T5.sampling)

    return toy.enumerated(next_token, OF_T5.max_length)


@pytest.mark.parametrize(
    ("mixed", "rule", "dtype"),
    [
        (False, rules.Token(), "float32"),
        pytest.param(False, rules.Block(), "float32", marks=LONG),
        (True, rules.Block(), "float32"),
        pytest.param(True, rules.Token(), "float32", marks=LONG),
        pytest.param(False, rules.Token(), "bfloat16", marks=LONG),
        pytest.param(True, rules.Block(), "bfloat16", marks=LONG),
    ],
    ids=str,
)
def test_a_draft_that_reads_hidden_states_is_exact(
    mixed: bool, rule: rules.Rule, dtype: str
) -> None:
    config = dataclasses.replace(OF_T5, rule=rule)
    target, reads_it = (tiny.in_dtype(model, dtype) for model in (SMALL_T5, READS_IT))
    of_target, of_draft = (
        prepack(tiny.rounded(stored, dtype))
        for stored in (t5_params(), saved.random(READS_IT.config, 10))
    )
    draft: Draft = HiddenDraft(reads_it)
    if mixed:  # It copies after a token that stood before, which the model reads too.
        draft, of_draft = MixedDraft(HiddenDraft(reads_it), CopyDraft(longest=1)), (of_draft, ())
    params = Params(of_target, of_draft)
    sources = jax.device_put(np.tile(np.array([2, 3], np.int32), (FEWER, 1)))
    numbers = config.draws(5, np.arange(FEWER))
    found = fast.generate(target, draft, params, sources, numbers, config)
    found = jax.tree.map(np.asarray, found)
    assert 0.1 < found.accepted.sum() / found.drafted.sum() < 0.95
    law = of_t5() if dtype == "float32" else of_t5_alone(target, params.target)
    assert toy.p_value(outputs(found), law) > THRESHOLD


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_the_baseline_samples_the_target(sampling: str) -> None:
    config = settings(sampling, 4)
    output = decode(None, (), config, rows(sampling, 4))
    p = toy.distribution(toy.target_table(), config.sampling)
    assert toy.p_value(outputs(output), toy.output_probabilities(p, config.max_length)) > THRESHOLD
    np.testing.assert_array_equal(output.target_calls, output.lengths)


@OPTIMIZED
def test_the_checks_above_meet_the_end_token_inside_a_block() -> None:
    """A row that ends with an accepted guess has one token fewer than guesses plus calls."""
    config = settings("temperature 1", 7)
    output = decode(MODEL_DRAFT, toy.params(toy.near_table()), config, FEWER)
    last = output.tokens[np.arange(FEWER), output.lengths - 1]
    inside = (last == toy.EOS) & (output.lengths == output.accepted + output.target_calls - 1)
    early = inside & (output.lengths % (config.gamma + 1) < config.gamma)
    assert early.mean() > 0.1


# The checks must be able to fail: faults are planted one at a time.


def correction_from_p(p: Array, q: Array) -> Array:
    """A rejected guess is replaced by a draw from p instead of from the residual."""
    return p


def verify_without_bonus(
    guesses: Array, p: Array, q: Array, accept_uniform: Array, correct_uniform: Array, *_: float
) -> tuple[Array, Array]:
    """The last guess is returned as the step's last token, in place of a bonus token."""
    accepted, token = TRUE_VERIFY(guesses, p, q, accept_uniform, correct_uniform)
    gamma = guesses.shape[1]
    return jnp.minimum(accepted, gamma - 1), jnp.where(accepted == gamma, guesses[:, -1], token)


def verify_with_bonus_misplaced(
    guesses: Array, p: Array, q: Array, accept_uniform: Array, correct_uniform: Array, *_: float
) -> tuple[Array, Array]:
    """The bonus token is drawn from the last guess's distribution, not from the one after it."""
    p = p.at[:, -1].set(p[:, -2])
    return TRUE_VERIFY(guesses, p, q, accept_uniform, correct_uniform)


def verify_by_q_only(
    guesses: Array, p: Array, q: Array, accept_uniform: Array, correct_uniform: Array, *_: float
) -> tuple[Array, Array]:
    """A guess is accepted with the draft's probability of it, whatever the target's is."""
    q_guess = jnp.take_along_axis(q, guesses[..., None], axis=-1)[..., 0]
    accepted = rule.leading(accept_uniform < q_guess)
    at = accepted[:, None]
    p_next = jnp.take_along_axis(p, at[..., None], axis=1)[:, 0]
    q_next = jnp.take_along_axis(jnp.pad(q, ((0, 0), (0, 1), (0, 0))), at[..., None], axis=1)[:, 0]
    uniform = jnp.take_along_axis(correct_uniform, at, axis=1)[:, 0]
    return accepted, categorical(rule.residual(p_next, q_next), uniform)


TRUE_VERIFY = rule.verify


@pytest.mark.usefixtures("recompiled")
@pytest.mark.parametrize(
    ("name", "fault", "outputs_change"),
    [
        ("residual", correction_from_p, True),
        ("verify", verify_without_bonus, False),
        ("verify", verify_with_bonus_misplaced, True),
        ("verify", verify_by_q_only, True),
    ],
)
def test_a_planted_fault_is_found(
    monkeypatch: pytest.MonkeyPatch, name: str, fault: Callable[..., object], outputs_change: bool
) -> None:
    monkeypatch.setattr(rule, name, fault)
    config = settings("temperature 1", 4)
    output = decode(MODEL_DRAFT, toy.params(toy.near_table()), config, FEWER)
    q = toy.distribution(toy.near_table(), config.sampling)
    of_outputs, of_calls = p_values(output, q, config)
    assert (of_outputs if outputs_change else of_calls) < THRESHOLD
