"""Trees that drafts grow: against a search in NumPy over paths decoded alone; texts with them.

What a draft says after a path is computed without trees and caches: by float64 models, by passes
over whole texts, or by counts.
"""

import abc
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from scipy import special

from speculative.backends import prepack
from speculative.decoding import Decoding, Output, Params, loop, rules
from speculative.drafts import (
    Draft,
    HiddenDraft,
    NgramDraft,
    Proposal,
    TransformerDraft,
    count_ngrams,
    growing,
    hidden,
    ngram_params,
    transformer,
)
from speculative.drafts.growing import Level
from speculative.models import DecoderOnly
from speculative.models.interface import Model
from speculative.models.reads import Reads
from speculative.processors import History, Processor, RepetitionPenalty
from speculative.sampling import Kinds, Sampling
from speculative.tree import Growth
from speculative.types import PyTree
from tests import ngrams, numpy_models, saved, tiny, toy
from tests.decoding import test_decoder_only, test_exactness
from tests.decoding.test_tracing import check_same_tokens
from tests.drafts import test_hidden

ROWS, TURNS, PENALTY = 4, 5, 1.9
GROWTH, FLAT = Growth(12, 3), Growth(6, 1)
SHARED = Growth(12, 3, (0.6, 0.3, 0.1))
PROCESSORS = (RepetitionPenalty(PENALTY),)
Path = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Case(abc.ABC):
    """A target and a draft, with inputs [ROWS, S], and what the draft says of whole texts."""

    target: Model
    params: PyTree
    draft: Draft
    draft_params: PyTree
    inputs: np.ndarray
    vocab_size: int = tiny.VOCABULARY

    @property
    def begin(self) -> list[list[int]]:
        """The beginning of each row's text, the first `last` included."""
        if not self.target.decoder_only:
            return [[0] for _ in self.inputs]
        return [row[row >= 0].tolist() for row in self.inputs]

    @abc.abstractmethod
    def after(self, row: int, text: list[int], paths: list[Path]) -> np.ndarray:
        """The draft's logits [K, V] after the text of a row with each path, of up to 8."""


class OfText(Case):
    """A case whose draft knows no more than the text."""

    def alone(self, row: int, text: list[int]) -> np.ndarray:
        """Logits [V] after a text."""
        raise NotImplementedError

    def after(self, row: int, text: list[int], paths: list[Path]) -> np.ndarray:
        return np.stack([self.alone(row, [*text, *path])[: self.vocab_size] for path in paths])


@functools.cache
def near_t5() -> PyTree:
    return tiny.near(tiny.stored_params())


class OfT5(OfText):
    """A T5 as a draft, by float64 T5."""

    def alone(self, row: int, text: list[int]) -> np.ndarray:
        source = self.inputs[row]
        given = near_t5(), tiny.TARGET.config, source[source >= 0], np.array(text)
        return numpy_models.logits(*given)[-1]


class OfGpt(OfText):
    """A decoder-only model as a draft, by its pass over the text."""

    def alone(self, row: int, text: list[int]) -> np.ndarray:
        assert isinstance(self.draft, TransformerDraft)
        whole = np.zeros((1, 48), np.int32)
        whole[0, : len(text)] = text
        found = saved.forward(self.draft.model, self.draft_params, whole, whole)
        return np.asarray(found, np.float64)[0, len(text) - 1]


class OfCounts(OfText):
    """Trigrams, by dictionaries."""

    def alone(self, row: int, text: list[int]) -> np.ndarray:
        return np.log(ngrams.row(TEXTS, ([-1, *text])[-2:], self.vocab_size))


class OfTable(OfText):
    """A toy of which the draft knows some tokens alone."""

    def alone(self, row: int, text: list[int]) -> np.ndarray:
        table, kept = toy.near_table(), test_exactness.NarrowModel.draft_vocabulary
        logits = np.full(self.vocab_size, -np.inf)
        logits[kept] = table[tuple([0, *text][-2:])][kept]
        return logits


class OfHidden(Case):
    """A draft of hidden states, by its pass in training."""

    def after(self, row: int, text: list[int], paths: list[Path]) -> np.ndarray:
        assert isinstance(self.draft, HiddenDraft)
        whole = np.zeros((Growth.WIDTH, 48), np.int32)
        for i, path in enumerate(paths):
            whole[i, : len(text) + len(path)] = [*text, *path]
        inputs = np.tile(self.inputs[row], (Growth.WIDTH, 1))
        given = self.target, self.draft.model, self.params, self.draft_params, inputs, whole
        found = test_hidden.unroll(*given)
        rows = [found[len(path)][i, len(text) - 1 + len(path)] for i, path in enumerate(paths)]
        return np.asarray(rows, np.float64)[:, : self.vocab_size]


TEXTS = ngrams.texts(tiny.VOCABULARY, 200)


@functools.cache
def t5() -> Case:
    draft = TransformerDraft(tiny.TARGET)
    return OfT5(tiny.TARGET, tiny.target_params(), draft, prepack(near_t5()), tiny.sources(ROWS))


@functools.cache
def of_gpt() -> tuple[Model, PyTree]:
    """A target that does not repeat one token, as others of random parameters do."""
    model = test_decoder_only.TARGETS["GPT"]
    return model, saved.drawn(model.config, 1, 0.5)


@functools.cache
def gpt() -> Case:
    target, params = of_gpt()
    near = jax.tree.map(lambda x: x.astype(np.float32), tiny.near(params))
    return OfGpt(target, params, TransformerDraft(target), near, test_decoder_only.prompts())


@functools.cache
def counts() -> Case:
    table = ngram_params(count_ngrams(TEXTS, 3, tiny.VOCABULARY), 3)
    return OfCounts(tiny.TARGET, tiny.target_params(), NgramDraft(3), table, tiny.sources(ROWS))


@functools.cache
def narrow() -> Case:
    draft, tables = TransformerDraft(test_exactness.NarrowModel()), toy.params(toy.near_table())
    given = toy.MarkovModel(), toy.params(toy.target_table()), draft, tables
    return OfTable(*given, np.ones((ROWS, 1), np.int32), toy.VOCABULARY)


@functools.cache
def hidden_t5() -> Case:
    return OfHidden(*test_hidden.t5())


@functools.cache
def hidden_gpt() -> Case:
    reads = Reads(16, test_hidden.LAYERS)
    small = DecoderOnly(test_decoder_only.GPT.replace(**test_decoder_only.SMALL, reads=reads))
    own = saved.drawn(small.config, 1, 0.5)
    return OfHidden(*of_gpt(), HiddenDraft(small), own, test_decoder_only.prompts())


def penalised(logits: np.ndarray, said: list[int]) -> np.ndarray:
    changed = logits.copy()
    for token in {*said}:
        changed[token] *= 1 / PENALTY if logits[token] > 0 else PENALTY
    return changed


@dataclasses.dataclass(frozen=True)
class Setting:
    """How trees are grown, of rows that all sample alike or each in a way of its own."""

    growth: Growth
    of_rows: Sampling | tuple[Sampling, ...]
    processors: tuple[Processor, ...] = ()

    @property
    def sampling(self) -> Sampling:
        """That of the batch."""
        if isinstance(self.of_rows, Sampling):
            return self.of_rows
        return Sampling.together(self.of_rows, Kinds.of(self.of_rows))

    def of(self, row: int) -> Sampling:
        """That of a row."""
        return self.of_rows if isinstance(self.of_rows, Sampling) else self.of_rows[row]


class Searched(dict[Path, tuple[float, int]]):
    """The log-likelihood of each path that may be in a tree, and the rank of its last token."""

    def best(self, nodes: int) -> list[float]:
        """The greatest likelihoods."""
        return sorted((likely for likely, _ in self.values()), reverse=True)[:nodes]


def search(case: Case, row: int, text: list[int], noise: np.ndarray, how: Setting) -> Searched:
    """Level by level; noise [D, V]."""
    growth, found = how.growth, Searched()
    shares = growth.shares or (1.0,) * Growth.BRANCHES
    level: list[tuple[Path, float]] = [((), 0.0)]
    said = text[len(case.begin[row]) :]
    for depth in range(growth.depth):
        after = case.after(row, text, [path for path, _ in level])
        here = Searched()
        for (path, total), logits in zip(level, after, strict=True):
            if how.processors:
                logits = penalised(logits, [*said, *path])
            if not how.of(row).greedy:
                logits = logits / how.of(row).temperature + noise[depth]
            chances = special.log_softmax(growing.SHARPER * logits)
            order = np.argsort(-logits, kind="stable")[: len(shares)].tolist()
            for rank, token in enumerate(order):
                likely = np.log(shares[rank]) if growth.shares else chances[token]
                if logits[token] > -np.inf:
                    here[(*path, token)] = total + likely, rank
        found |= here
        ordered = sorted(here.items(), key=lambda item: -item[1][0])
        level = [(path, likely) for path, (likely, _) in ordered[: Growth.WIDTH]]
    return Searched(found)


def check_tree(proposal: Proposal, row: int, searched: Searched, growth: Growth) -> list[Path]:
    """Checks a row's tree, and gives its paths."""
    assert proposal.tree is not None
    tokens = np.asarray(proposal.guesses)[row].tolist()
    parents = np.asarray(proposal.tree.parents)[row].tolist()
    paths: list[Path] = [()]
    for place, (token, parent) in enumerate(zip(tokens, parents, strict=True), 1):
        assert parent < place  # It comes first.
        paths.append((*paths[parent], token))
    assert len({*paths}) == growth.nodes + 1  # No path is twice.
    likely, ranks = zip(*(searched[path] for path in paths[1:]), strict=True)
    np.testing.assert_allclose(sorted(likely)[::-1], searched.best(growth.nodes), atol=2e-3)
    np.testing.assert_array_equal(proposal.tree.ranks[row], ranks)
    return paths


def check_steps(case: Case, how: Setting) -> None:
    """Some steps with trees, of which each row takes another path each time.

    Each tree must be that of the search, which starts from the text alone. At last the draft must
    guess as one that has read the text alone.
    """
    draft, growth, size = case.draft, how.growth, 96
    begin = jax.jit(
        lambda params, inputs: case.target.start(params, inputs, size, layers=draft.layers)
    )
    start = jax.jit(lambda params, inputs, begun: draft.start(params, inputs, size, begun))
    grow = jax.jit(
        lambda params, state, last, noise, history: draft.grow(
            params, state, last, noise, how.sampling, case.vocab_size, growth, history
        )
    )
    extend = jax.jit(functools.partial(case.target.extend, layers=draft.layers))
    keep = jax.jit(
        lambda state, path, count: case.target.keep(state, growth.nodes + 1, path, count)
    )
    commit, inputs = jax.jit(draft.commit), jax.device_put(case.inputs)
    begun = begin(case.params, inputs)
    state, before = start(case.draft_params, inputs, begun), begun.state
    texts, last = case.begin, case.target.first(inputs)
    rng = np.random.default_rng(5)
    for turn in range(TURNS):
        noise = rng.gumbel(size=(ROWS, growth.depth, case.vocab_size)).astype(np.float32)
        said = np.full((ROWS, 48), -1, np.int32)
        counts = [len(text) - len(first) for text, first in zip(texts, case.begin, strict=True)]
        for row, count in enumerate(counts):
            said[row, :count] = texts[row][len(texts[row]) - count :]
        history = None
        if how.processors:
            history = History(jnp.asarray(said), jnp.asarray(counts), how.processors)
        numbers = None if how.sampling.greedy else jnp.asarray(noise)
        proposal = grow(case.draft_params, state, last, numbers, history)
        assert proposal.tree is not None
        path, accepted = np.zeros((ROWS, growth.depth + 1), int), np.zeros(ROWS, int)
        for row, text in enumerate(texts):
            searched = search(case, row, text, noise[row], how)
            paths = check_tree(proposal, row, searched, growth)
            accepted[row] = (row + turn) % (growth.depth + 1)
            deep = [places for places in paths if len(places) <= accepted[row]]
            taken = max(reversed(deep), key=len)  # The least likely one of the deepest.
            accepted[row] = len(taken)
            path[row, : len(taken) + 1] = [paths.index(taken[:i]) for i in range(len(taken) + 1)]
            text += [*taken, int(rng.integers(2, case.vocab_size))]
        _, after, layers = extend(case.params, before, proposal.chunk(last))
        before = keep(after, jnp.asarray(path), jnp.asarray(accepted + 1))
        layers = {name: x[np.arange(ROWS)[:, None], path] for name, x in layers.items()}
        along = proposal.along(jnp.asarray(path))
        state = commit(case.draft_params, along, jnp.asarray(accepted), layers)
        last = jnp.array([text[-1] for text in texts], jnp.int32)
    uniforms, sampling = jnp.full((ROWS, 2), 0.5), Sampling(0.8)
    propose = jax.jit(
        lambda params, state, last: draft.propose(
            params, state, last, uniforms, sampling, case.vocab_size
        )
    )
    found = propose(case.draft_params, state, last)
    assert found.q is not None
    for row, text in enumerate(texts):
        for i in range(2):
            path = tuple(np.asarray(found.guesses)[row, :i].tolist())
            expected = toy.standardise(case.after(row, text, [path])[0], sampling)
            np.testing.assert_allclose(found.q[row, i], expected, atol=1e-4)


WARM, COLD = Sampling(0.8), Sampling(0.0)


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "how"),
    [
        (t5, Setting(GROWTH, COLD)),
        (t5, Setting(SHARED, WARM, PROCESSORS)),
        (gpt, Setting(GROWTH, WARM)),
        (narrow, Setting(GROWTH, WARM)),
        (narrow, Setting(SHARED, COLD, PROCESSORS)),
        (counts, Setting(GROWTH, WARM)),
        (counts, Setting(SHARED, WARM)),
        (hidden_t5, Setting(GROWTH, WARM)),
        (hidden_t5, Setting(SHARED, COLD)),
        (hidden_t5, Setting(GROWTH, (COLD, WARM, Sampling(1.2), COLD))),
        (hidden_gpt, Setting(GROWTH, COLD)),
        (counts, Setting(FLAT, WARM)),
        (t5, Setting(FLAT, WARM)),
        (hidden_t5, Setting(FLAT, WARM)),
    ],
    ids=lambda given: given.__name__ if callable(given) else "",
)
def test_trees_are_those_of_the_search(case: Any, how: Setting) -> None:
    """And states are right after them."""
    check_steps(case(), how)


# Faults must be found: one is planted at a time.


def of_a_chain(read_as: Array, path: Array, accepted: Array) -> tuple[Array, Array]:
    """The nodes that were read first are kept, whatever was accepted."""
    nodes, known = growing.nodes_read(read_as, path, accepted)
    return jnp.broadcast_to(jnp.arange(nodes.shape[1]), nodes.shape), known


def of_the_last_one_too(read_as: Array, path: Array, accepted: Array) -> tuple[Array, Array]:
    """As if all that was accepted had been read."""
    nodes, _ = growing.nodes_read(read_as, path, accepted)
    return nodes, accepted


def with_a_siblings_hidden_state(*given: Any) -> Any:
    model, logits, state, read, *others = given

    def wrong(state: Any, level: Level) -> Any:
        return read(state, level._replace(parents=jnp.roll(level.parents, 1, axis=1)))

    return transformer.grow_on(model, logits, state, wrong, *others)


@pytest.mark.parametrize("fault", [of_a_chain, of_the_last_one_too])
def test_wrong_entries_of_caches_are_found(monkeypatch: pytest.MonkeyPatch, fault: Any) -> None:
    monkeypatch.setattr(transformer, "nodes_read", fault)
    with pytest.raises((AssertionError, KeyError)):
        check_steps(t5(), Setting(GROWTH, COLD))


def test_wrong_hidden_states_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hidden, "grow_on", with_a_siblings_hidden_state)
    with pytest.raises((AssertionError, KeyError)):
        check_steps(hidden_t5(), Setting(GROWTH, WARM))


# Texts with trees are those of the target alone.

LENGTH = 20


def settings(temperature: float, shares: tuple[float, ...] | None = None) -> Decoding:
    rule = rules.Coupled() if temperature else rules.EXACT
    given = Sampling(temperature), 3, LENGTH, (7,), rule
    return Decoding(tiny.VOCABULARY, *given, tree=12, shares=shares)


def decode(case: Case, draft: Draft | None, config: Decoding, rows: int) -> Output:
    inputs = jax.device_put(case.inputs[:rows])
    params, draws = Params(case.params, case.draft_params), config.draws(3, np.arange(rows))
    return jax.device_get(loop.generate(case.target, draft, params, inputs, draws, config))


@functools.cache
def alone(case: Any, temperature: float) -> Output:
    config = dataclasses.replace(settings(temperature), gamma=0, tree=0)
    return decode(case(), None, config, 3)


@pytest.mark.long
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("case", [t5, gpt, counts, hidden_t5, hidden_gpt])
def test_texts_are_those_of_the_target_alone(case: Any, temperature: float) -> None:
    """In batches of one and of three."""
    of_target = {gpt: hidden_gpt, counts: t5, hidden_t5: t5}
    expected = alone(of_target.get(case, case), temperature)
    for rows in (1, 3):
        found = decode(case(), case().draft, settings(temperature), rows)
        np.testing.assert_array_equal(found.tokens, expected.tokens[:rows])
        np.testing.assert_array_equal(found.lengths, expected.lengths[:rows])
        assert found.finite.all() and not found.fault.any()
    assert found.accepted.sum() > 0


@pytest.mark.long
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    ("case", "shares"),
    [
        (t5, None),
        (hidden_t5, None),
        (counts, (0.5, 0.25, 0.15)),
    ],
)
def test_the_device_loop_is_the_reference(case: Any, shares: Any, temperature: float) -> None:
    """Of 9 texts each."""
    config, given = settings(temperature, shares), case()
    both = Params(given.params, given.draft_params)
    accepted = set()
    for seed in range(3):
        inputs = given.inputs[:3]
        traces = check_same_tokens(given.target, given.draft, both, inputs, config, seed)
        accepted |= {step.accepted for trace in traces for step in trace.steps}
    assert len(accepted) > 1
