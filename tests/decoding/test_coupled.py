"""Coupled verification: the target's distribution, the same text by any draft and any tree.

Distributions are compared with enumerations in float64, by chi-square and binomial tests; texts are
compared token by token with those of the target alone. Seeds are fixed; a correct program would
fail any statistical check here with probability 1e-4 at most, all together.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from scipy import stats

from speculative import noise
from speculative.decoding import Decoding, Output, Params, loop, queue, rules
from speculative.drafts import Draft, TransformerDraft
from speculative.processors import History, Processor
from speculative.sampling import Kinds, Sampling, argmax, log_weights
from speculative.tree import Tree
from tests import toy
from tests.decoding.test_exactness import SAMPLINGS, THRESHOLD, outputs
from tests.decoding.test_paths import PROCESSORS

OPTIMIZED = pytest.mark.usefixtures("optimized")

ROWS, FEWER, FEW = 100_000, 20_000, 1_000
"""Texts of the target alone, whose distribution is tested; of one shape; and of all the others."""
TABLES = {"near": toy.near_table, "far": toy.far_table, "disjoint": toy.disjoint_table}
LENGTH = 8
TARGET = toy.MarkovModel()
DRAFT = TransformerDraft(TARGET)

CHAINS = [(gamma, 0, None) for gamma in (1, 2, 3, 4)]
FLAT = [(1, 3, None), (1, 2, (0.6, 0.3))]
TREES = [
    (2, 6, (0.6, 0.3)),
    (2, 12, (0.6, 0.3)),  # More than there are: some guesses are fillers.
    (3, 9, (0.6, 0.3, 0.1)),
    (4, 12, (0.8, 0.3, 0.2, 0.1)),
    (4, 20, None),
]
"""Gamma, guesses of a tree and shares, as many as a node has successors; without, it has four."""
Shape = tuple[int, int, tuple[float, ...] | None]
ALONE: Shape = (0, 0, None)
TREE: Shape = TREES[-1]


def settings(
    sampling: str, shape: Shape, processors: tuple[Processor, ...] = (), length: int = LENGTH
) -> Decoding:
    gamma, tree, shares = shape
    given = toy.VOCABULARY, SAMPLINGS[sampling], gamma, length, toy.ENDS, rules.Coupled()
    return Decoding(*given, processors=processors, tree=tree, shares=shares)


def decode(
    config: Decoding,
    draft_table: np.ndarray,
    rows: int = FEW,
    target_table: np.ndarray | None = None,
) -> Output:
    table = toy.target_table() if target_table is None else target_table
    params = Params(toy.params(table), toy.params(draft_table))
    draft: Draft | None = DRAFT if config.gamma else None
    given = jnp.ones((rows, 1), jnp.int32), config.draws(2211, np.arange(rows)), config
    return jax.device_get(loop.generate(TARGET, draft, params, *given))


@functools.cache
def alone(sampling: str, processors: tuple[Processor, ...] = ()) -> Output:
    """The texts of the target alone."""
    config = settings(sampling, ALONE, processors)
    rows = FEW if processors else ROWS if sampling == "temperature 1" else FEWER
    return decode(config, toy.target_table(), rows)


def same_texts(found: Output, expected: Output) -> bool:
    """Whether texts are those at the beginning of others, token by token."""
    rows = len(found.lengths)
    fine = bool(found.finite.all()) and not found.fault.any()
    same = np.array_equal(found.tokens, expected.tokens[:rows])
    return fine and same and np.array_equal(found.lengths, expected.lengths[:rows])


def law(output: Output, sampling: str) -> float:
    """The p-value of texts being distributed as the target's."""
    p = toy.distribution(toy.target_table(), SAMPLINGS[sampling])
    return toy.p_value(outputs(output), toy.output_probabilities(p, LENGTH))


def coupled(p: np.ndarray, q: np.ndarray) -> float:
    """The chance that the same token is the first of p and of q, with the same noise.

    Token x wins both races with exponential clocks: it must come before each y by the greater of
    p(y) / p(x) and q(y) / q(x).
    """
    both = np.flatnonzero((p > 0) & (q > 0))
    return float(sum(1 / np.maximum(p / p[x], q / q[x]).sum() for x in both))


def starting_at(table: np.ndarray, context: tuple[int, int]) -> np.ndarray:
    """A table whose texts begin as after this context."""
    moved = table.copy()
    moved[0, 0] = table[context]
    return moved


def acceptance(table: np.ndarray, context: tuple[int, int], sampling: str, rows: int) -> float:
    """The p-value of how many first guesses are accepted after a context, at gamma 1."""
    config = settings(sampling, (1, 0, None), length=1)
    tables = starting_at(table, context), starting_at(toy.target_table(), context)
    found = decode(config, tables[0], rows, tables[1])
    q, p = (toy.distribution(t, SAMPLINGS[sampling])[0, 0] for t in tables)
    assert (found.tested == 1).all()
    return float(stats.binomtest(int(found.accepted.sum()), rows, min(coupled(p, q), 1)).pvalue)


@OPTIMIZED
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_the_target_alone_has_its_distribution(sampling: str) -> None:
    assert law(alone(sampling), sampling) > THRESHOLD


@pytest.mark.long
@OPTIMIZED
@pytest.mark.parametrize(
    ("table", "shape", "rows"),
    [("near", TREE, FEWER), ("disjoint", TREES[2], FEWER), ("far", CHAINS[-1], ROWS)],
)
def test_any_draft_and_shape_has_the_targets_distribution(
    table: str, shape: Shape, rows: int
) -> None:
    found = decode(settings("temperature 1", shape), TABLES[table](), rows)
    assert law(found, "temperature 1") > THRESHOLD
    assert same_texts(found, alone("temperature 1"))


@pytest.mark.parametrize(
    "shape",
    [*CHAINS, *FLAT, *TREES[:1], *(pytest.param(x, marks=pytest.mark.long) for x in TREES[1:])],
    ids=str,
)
def test_any_draft_and_shape_gives_the_same_texts(shape: Shape) -> None:
    for table in TABLES.values():
        found = decode(settings("temperature 1", shape), table())
        assert same_texts(found, alone("temperature 1"))
        tested, *accepted = found.by_position.sum(axis=0).T
        by_depth = np.sum(accepted, axis=0)
        assert (by_depth > 0).all() and by_depth.sum() < tested.sum()


@pytest.mark.long
@pytest.mark.parametrize(
    ("sampling", "shape"),
    [("top_k", CHAINS[-1]), ("top_k", TREE), ("top_p", CHAINS[1]), ("top_p", TREES[2])],
)
def test_truncated_distributions_give_the_same_texts(sampling: str, shape: Shape) -> None:
    for table in TABLES.values():
        assert same_texts(decode(settings(sampling, shape), table()), alone(sampling))


@pytest.mark.long
@pytest.mark.parametrize("shape", [CHAINS[-1], TREE], ids=str)
def test_processors_give_the_same_texts(shape: Shape) -> None:
    expected = alone("temperature 1", PROCESSORS)
    for table in TABLES.values():
        assert same_texts(decode(settings("temperature 1", shape, PROCESSORS), table()), expected)
    assert not same_texts(expected, alone("temperature 1"))


def test_log_probabilities_are_those_of_the_target_alone() -> None:
    expected, found = (
        decode(dataclasses.replace(settings("top_p", shape), logprobs=True), toy.near_table())
        for shape in (ALONE, TREE)
    )
    assert same_texts(found, expected)
    said = np.arange(expected.logprobs.shape[1]) < expected.lengths[:, None]
    np.testing.assert_allclose(found.logprobs[said], expected.logprobs[said], atol=1e-6)


def test_the_checks_above_meet_the_end_token_inside_a_tree() -> None:
    """A row that ends with an accepted guess has one token fewer than guesses plus calls."""
    found = decode(settings("temperature 1", TREE), toy.near_table())
    last = found.tokens[np.arange(FEW), found.lengths - 1]
    inside = (last == toy.EOS) & (found.lengths == found.accepted + found.target_calls - 1)
    assert inside.mean() > 0.1
    # Guesses of further ranks are accepted too.
    assert (found.by_position.sum(axis=0)[:, 2:4] > 0).all()


def test_a_draft_that_is_the_target_is_always_right() -> None:
    """A tree has its first guess, if not always the whole chain."""
    found = decode(settings("temperature 1", CHAINS[-1]), toy.target_table())
    np.testing.assert_array_equal(found.tested, found.accepted)
    found = decode(settings("temperature 1", TREE), toy.target_table())
    np.testing.assert_array_equal(found.by_position[:, 0, 0], found.by_position[:, 0, 1])


@OPTIMIZED
@pytest.mark.parametrize("sampling", ["temperature 1", "top_k"])
@pytest.mark.parametrize("table", TABLES)
def test_first_guesses_are_accepted_as_often_as_the_closed_form_says(
    table: str, sampling: str
) -> None:
    for context in ((0, 0), (2, 3), (3, 2)):
        rows = ROWS if context == (0, 0) else FEWER
        assert acceptance(TABLES[table](), context, sampling, rows) > THRESHOLD


@pytest.mark.parametrize("sampling", ["temperature 1", "top_k"])
@pytest.mark.parametrize("table", TABLES)
def test_the_measured_acceptance_is_the_closed_form(table: str, sampling: str) -> None:
    """Of 4,000 equal rows, each with `NOISES` noises of its own."""
    logits = toy.target_table()[2, 3, : toy.VOCABULARY]
    q = toy.distribution(TABLES[table](), SAMPLINGS[sampling])[2, 3]
    p = toy.distribution(toy.target_table(), SAMPLINGS[sampling])[2, 3]
    rows, of_draft = (jnp.tile(x.astype(np.float32), (4000, 1)) for x in (logits, q))
    found = np.asarray(rules.Coupled().acceptance(rows, of_draft, SAMPLINGS[sampling]))
    count, trials = int(round(found.sum() * rules.NOISES)), found.size * rules.NOISES
    assert stats.binomtest(count, trials, coupled(p, q)).pvalue > THRESHOLD
    overlap = np.minimum(p, q).sum() / np.maximum(p, q).sum()
    assert overlap - 1e-9 <= coupled(p, q) <= np.minimum(p, q).sum() + 1e-9


def test_at_temperature_0_the_measured_acceptance_is_that_of_the_argmax() -> None:
    logits, q = jnp.array([[0.0, 2.0, 1.0]]), jnp.array([[0.2, 0.7, 0.1]])
    np.testing.assert_allclose(rules.Coupled().acceptance(logits, q, Sampling(0.0)), [0.7])


def same_when_padded() -> bool:
    """Whether texts stay as they are where the vocabulary has an impossible token more."""
    tables = [toy.near_table(), toy.target_table()]
    for table in tables:
        table[..., -1] = -np.inf
    config = settings("temperature 1", TREE)
    padded = dataclasses.replace(config, vocab_size=toy.PADDED)
    return same_texts(decode(padded, tables[0], FEW, tables[1]), decode(config, tables[0]))


MIXED = [Sampling(0.0), Sampling(), Sampling(0.7, top_k=2), Sampling(1.3, top_p=0.8)]


@pytest.mark.long
@pytest.mark.parametrize("shape", [ALONE, CHAINS[2], TREE], ids=str)
def test_texts_of_mixed_batches_are_those_of_each_alone(shape: Shape) -> None:
    """Of rows at temperature 0 and above; they accept what each alone accepts."""
    rows, config = FEW, settings("temperature 1", shape)
    configs = [dataclasses.replace(config, sampling=MIXED[row % 4]) for row in range(rows)]
    together = Decoding.together(configs, Kinds.of(MIXED))
    found = decode(together, toy.near_table(), rows)
    assert found.finite.all() and not found.fault.any()
    for number, sampling in enumerate(MIXED):
        own = dataclasses.replace(config, gamma=0, tree=0, shares=None, sampling=sampling)
        expected, at = decode(own, toy.near_table(), rows), slice(number, None, 4)
        np.testing.assert_array_equal(found.tokens[at], expected.tokens[at])
        np.testing.assert_array_equal(found.lengths[at], expected.lengths[at])
        if shape == TREE and not sampling.truncated:
            own = dataclasses.replace(config, sampling=sampling)
            expected = decode(own, toy.near_table(), rows)
            np.testing.assert_array_equal(found.by_position[at], expected.by_position[at])


def test_a_queue_gives_the_same_texts() -> None:
    """Of each example, at each temperature, in three rows."""
    source, config = jnp.ones((1, 1), jnp.int32), settings("temperature 1", TREE)
    params = Params(toy.params(toy.target_table()), toy.params(toy.near_table()))
    own = [dataclasses.replace(config, sampling=MIXED[i % 4]) for i in range(12)]
    texts = [(i, queue.Request(source, own[i], seed=2211, example=i)) for i in range(12)]
    given = TARGET, DRAFT, params, texts, Kinds.of(MIXED), 3
    for number, output in queue.generate(*given):
        expected = decode(dataclasses.replace(own[number].alone, shares=None), toy.near_table(), 12)
        np.testing.assert_array_equal(output.tokens[0], expected.tokens[number])


# The checks must be able to fail: faults are planted one at a time.

TRUE_GUMBEL = noise.gumbel


def keyed_by_place(self: Tree, numbers: Array) -> Array:
    """Each place of a tree has the noise of the position as many tokens on."""
    places = jnp.minimum(jnp.arange(self.parents.shape[1] + 1), self.depth)
    return numbers[:, places]


def shared_between_positions(keys: Array, lengths: Array, positions: int, size: int) -> Array:
    one = TRUE_GUMBEL(keys, 0 * lengths, 1, size)
    return jnp.broadcast_to(one, (len(keys), positions, size))


def shared_between_examples(keys: Array, lengths: Array, positions: int, size: int) -> Array:
    return TRUE_GUMBEL(jnp.broadcast_to(keys[:1], keys.shape), lengths, positions, size)


def by_index_in_an_array(keys: Array, lengths: Array, positions: int, size: int) -> Array:
    """Of all positions and tokens, one after the other."""
    whole = noise._of_keys(keys, 32 * size).reshape(len(keys), 32, size)
    at = lengths[:, None] + jnp.arange(positions)
    return jnp.take_along_axis(whole, at[..., None], axis=1)


def noise_of_the_next_position(self: rules.Coupled, numbers: Array) -> Array:
    return numbers[:, 1:]


def noise_of_other_tokens(self: rules.Coupled, numbers: Array) -> Array:
    return numbers[:, :-1, ::-1]


def noise_before_temperature(logits: Array, sampling: Sampling, noise: Array) -> Array:
    return argmax(log_weights(logits + noise, sampling))


def given_the_rows_text(
    self: History, logits: Array, guesses: Array, tree: Tree | None = None
) -> Array:
    """Processors see the text that the step began with, at every place."""
    return self.process_paths(logits, guesses[:, None], jnp.zeros((1, 1), jnp.int32))


def has_its_law() -> bool:
    """At a temperature that is not 1, of the target alone."""
    found = decode(settings("top_k", ALONE), toy.near_table(), FEWER)
    return law(found, "top_k") > THRESHOLD


def is_the_same() -> bool:
    expected = decode(settings("temperature 1", ALONE, PROCESSORS), toy.near_table())
    found = decode(settings("temperature 1", TREE, PROCESSORS), toy.near_table())
    return same_texts(found, expected)


def is_accepted() -> bool:
    return acceptance(toy.near_table(), (0, 0), "temperature 1", FEWER) > THRESHOLD


FAULTS = [
    (Tree, "by_place", keyed_by_place, is_the_same),
    (noise, "gumbel", shared_between_positions, has_its_law),
    (noise, "gumbel", shared_between_examples, has_its_law),
    (noise, "gumbel", by_index_in_an_array, same_when_padded),
    (rules.Coupled, "to_guess", noise_of_the_next_position, is_accepted),
    (rules.Coupled, "to_guess", noise_of_other_tokens, is_accepted),
    (rules, "choose", noise_before_temperature, has_its_law),
    (History, "process_block", given_the_rows_text, is_the_same),
]


@pytest.mark.parametrize("check", [has_its_law, is_the_same, is_accepted, same_when_padded])
def test_without_a_fault_each_check_passes(check: Callable[[], bool]) -> None:
    assert check()


@pytest.mark.usefixtures("recompiled")
@pytest.mark.parametrize(
    ("where", "name", "fault", "check"), FAULTS, ids=[fault.__name__ for _, _, fault, _ in FAULTS]
)
def test_a_planted_fault_is_found(
    monkeypatch: pytest.MonkeyPatch,
    where: object,
    name: str,
    fault: Callable[..., Array],
    check: Callable[[], bool],
) -> None:
    monkeypatch.setattr(where, name, fault)
    assert not check()
