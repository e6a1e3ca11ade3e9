"""Trees of guesses: whichever branch stands, outputs are those of the target alone."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from speculative.decoding import Decoding, Output, Params, Rule, loop, queue, rules
from speculative.decoding.rules import EXACT
from speculative.drafts import Draft, Proposal
from speculative.measurement import teacher_forced
from speculative.models import FlaxModel
from speculative.models.interface import Chunk
from speculative.processors import History, Processor, RepetitionPenalty
from speculative.ragged import read_rows, write_rows
from speculative.sampling import Sampling
from speculative.tree import Tree
from speculative.types import PyTree
from tests import tiny
from tests.decoding import test_decoder_only as gpt
from tests.decoding.test_loop import check_stream
from tests.decoding.test_tracing import check_same_tokens

# Two branches, of three guesses and of two: places 1, 3, 5 and 2, 4.
PARENTS = np.array([[0, 0, 1, 2, 3]], np.int32)
BRANCHES, DEPTHS = np.array([1, 2, 1, 2, 1]), np.array([1, 1, 2, 2, 3])
NODES, GAMMA, LENGTH, END = 5, 3, 24, 7


@dataclasses.dataclass(frozen=True)
class Turned:
    """Turns logits of positions after 3, 4 or 5 tokens, ... by the sum of the text's tokens."""

    def __call__(self, logits: Array, text: Array, length: Array) -> Array:
        return jnp.where(length % 6 < 3, logits, jnp.roll(logits, jnp.maximum(text, 0).sum()))


PROCESSORS = (RepetitionPenalty(1.9), Turned())


@dataclasses.dataclass(frozen=True)
class Fork(Draft):
    """Knows the target's greedy texts, and tells them in one branch, up to some guess.

    Which branch and how far depends on the text's length. Parameters are the inputs [R, S], their
    texts [R, LENGTH], and a token that is in none of them, which takes the place of wrong guesses.
    The state is the number of the text and its length.
    """

    def start(self, params, inputs, cache_length, target) -> Any:
        known = (inputs[:, None] == params[0]).all(axis=-1)
        return known.argmax(axis=1), jnp.zeros(len(inputs), jnp.int32)

    grows = True

    def propose(self, *given: Any, **named: Any) -> Proposal:
        raise AssertionError("it is asked for trees only")

    def grow(
        self, params, state, last, noise, sampling, vocab_size, growth, history=None
    ) -> Proposal:
        _, texts, wrong = params
        number, length = state
        coming = read_rows(jnp.pad(texts[number], ((0, 0), (0, 3))), length, 3)
        right = (BRANCHES == 1 + length[:, None] // 2 % 2) & (
            DEPTHS <= 1 + length[:, None] // 4 % 3
        )
        parents = jnp.broadcast_to(PARENTS, (len(last), NODES))
        tree = Tree(parents, jnp.broadcast_to(BRANCHES - 1, parents.shape), growth.depth)
        return Proposal(jnp.where(right, coming[:, DEPTHS - 1], wrong), None, state, tree)

    def commit(self, params, proposal, accepted, hidden) -> Any:
        number, length = proposal.state
        return number, length + accepted + 1


class Reading(Fork):
    """Its state has the hidden states too of where the target read the text, [B, 28, D]."""

    @property
    def layers(self) -> tuple[str, ...]:
        return ("decoder/layers_0",)

    def start(self, params, inputs, cache_length, target) -> Any:
        return super().start(params, inputs, cache_length, target), jnp.zeros((len(inputs), 28, 16))

    def grow(self, params, state, *given: Any, **named: Any) -> Proposal:
        return super().grow(params, state[0], *given, **named)._replace(state=state)

    def commit(self, params, proposal, accepted, hidden) -> Any:
        (number, length), read = proposal.state
        read = write_rows(read, hidden[self.layers[0]], length, axis=1)
        return (number, length + accepted + 1), read


TARGETS: dict[str, tuple[FlaxModel, Any, np.ndarray]] = {
    "T5": (tiny.TARGET, tiny.target_params, tiny.sources(3)),
    "GPT": (gpt.TARGETS["GPT"], lambda: gpt.params("GPT").target, gpt.prompts()[:3]),
}


def settings(processors: tuple[Processor, ...] = (), rule: Rule | None = None) -> Decoding:
    gamma, tree = (0, 0) if rule is None else (GAMMA, NODES)
    given = Sampling(0.0), gamma, LENGTH, (END,), rule or EXACT
    return Decoding(tiny.VOCABULARY, *given, processors=processors, tree=tree)


def decode(name: str, draft: Draft | None, of_draft: PyTree, config: Decoding, rows: int) -> Output:
    model, params, inputs = TARGETS[name]
    given = jax.device_put(inputs[:rows]), config.draws(0, np.arange(rows)), config
    return jax.device_get(loop.generate(model, draft, Params(params(), of_draft), *given))


def known(name: str, processors: tuple[Processor, ...] = ()) -> tuple[Output, PyTree]:
    """The outputs of the target alone, and a `Fork`'s parameters."""
    output = decode(name, None, (), settings(processors), 3)
    wrong = next(token for token in range(2, tiny.VOCABULARY) if token not in output.tokens)
    return output, jax.device_put((TARGETS[name][2], output.tokens[:, :LENGTH], np.int32(wrong)))


def require_equal(found: Output, expected: Output) -> None:
    rows = len(found.lengths)
    np.testing.assert_array_equal(found.tokens, expected.tokens[:rows])
    np.testing.assert_array_equal(found.lengths, expected.lengths[:rows])
    assert not found.fault.any() and found.finite.all()


EACH = [("T5", ()), ("GPT", ()), ("T5", PROCESSORS), ("GPT", PROCESSORS)]
IDS = ["T5", "GPT", "T5, processors", "GPT, processors"]


@pytest.mark.long
@pytest.mark.parametrize(("name", "processors"), EACH, ids=IDS)
def test_outputs_are_the_targets_own(name: str, processors: tuple[Processor, ...]) -> None:
    """In batches of one and of three, and by the traced loop, along either branch."""
    expected, of_draft = known(name, processors)
    config = settings(processors, EXACT)
    for rows in (1, 3):
        found = decode(name, Fork(), of_draft, config, rows)
        require_equal(found, expected)
        assert (found.target_calls < 0.6 * found.lengths).all()
    tested, *accepted = found.by_position.sum(axis=0).T
    assert (accepted[0] > 0).all() and (accepted[1][:2] > 0).all()
    assert (sum(accepted) < tested).any() and not any(x.any() for x in accepted[2:])
    model, params, inputs = TARGETS[name]
    both = Params(params(), of_draft)
    check_same_tokens(model, Fork(), both, inputs, config, seed=0)


@pytest.mark.parametrize("name", ["GPT", pytest.param("T5", marks=pytest.mark.long)])
def test_streams_and_queues_take_either_branch(name: str) -> None:
    expected, of_draft = known(name)
    config = settings(rule=EXACT)
    model, params, inputs = TARGETS[name]
    draws, both = config.draws(0, np.arange(3)), Params(params(), of_draft)
    given = model, Fork(), both
    steps = list(loop.stream(*given, jax.device_put(inputs), draws, config))
    check_stream(decode(name, Fork(), of_draft, config, 3), steps, config)
    sources = [jax.device_put(inputs[i : i + 1]) for i in range(3)]
    texts = [(i, queue.Request(sources[i], config, example=i)) for i in range(3)]
    found = dict(queue.generate(*given, texts, config.sampling.kinds, 2))
    for i in range(3):
        np.testing.assert_array_equal(found[i].tokens[0], expected.tokens[i])


@pytest.mark.long
@pytest.mark.parametrize("name", TARGETS)
def test_a_draft_is_given_the_hidden_states_of_the_path(name: str) -> None:
    """Those of a pass over the text."""
    expected, of_draft = known(name)
    model, params, inputs = TARGETS[name]
    config, inputs, draft = settings(rule=EXACT), jax.device_put(inputs), Reading()
    given = loop.Models(model, draft), Params(params(), of_draft)
    draws, size = config.draws(0, np.arange(3)), config.cache_lengths()[-1]
    progress = loop.begin(*given, inputs, config, size)
    while not progress.finished.all():
        progress, _ = loop.one_step(*given, progress, draws, config)
    np.testing.assert_array_equal(progress.tokens[:, :LENGTH], expected.tokens[:, :LENGTH])
    texts = jax.device_put(expected.tokens[:, :LENGTH])
    scored = teacher_forced.score(model, params(), inputs, texts, draft.layers)[1]
    for row, length in enumerate(expected.lengths):
        found = progress.draft[1][row, :length]
        np.testing.assert_allclose(found, scored.hidden[draft.layers[0]][row, :length], atol=1e-4)


# Faults must be found: one is planted at a time.


def kept_as_a_chain(self: FlaxModel, state: Any, length: int, path: Any, count: Any) -> Any:
    return self.rewind(state, state.lengths - length + count)


def of_all_branches(self: History, logits: Array, guesses: Array, tree: Tree) -> Array:
    return PROCESSED(self, logits, guesses)


def seeing_other_branches(self: Proposal, last: Array) -> Chunk:
    return CHUNK(self, last)._replace(mask=jnp.ones((1, NODES + 1, NODES + 1), bool))


def placed_as_a_chain(self: Proposal, last: Array) -> Chunk:
    return CHUNK(self, last)._replace(positions=jnp.arange(NODES + 1)[None])


PROCESSED, CHUNK = History.process_block, Proposal.chunk
FAULTS = {
    "keep": (FlaxModel, kept_as_a_chain),
    "process_block": (History, of_all_branches),
    "chunk": (Proposal, seeing_other_branches),
    "positions": (Proposal, placed_as_a_chain),
}


@pytest.mark.usefixtures("recompiled")
@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(monkeypatch: pytest.MonkeyPatch, fault: str, name: str) -> None:
    expected, of_draft = known(name, PROCESSORS)
    where, wrong = FAULTS[fault]
    monkeypatch.setattr(where, "chunk" if fault == "positions" else fault, wrong)
    found = decode(name, Fork(), of_draft, settings(PROCESSORS, EXACT), 3)
    assert (found.tokens != expected.tokens).any()


SAMPLED, LENIENT = "tree is for temperature 0 or verification = 'coupled'", "tree is for exact"


@pytest.mark.parametrize(
    ("rule", "temperature", "said"),
    [
        (EXACT, 1.0, SAMPLED),
        (rules.Block(), 1.0, SAMPLED),
        (rules.Token(0.5), 0.0, LENIENT),
        (rules.Token(0.5), 1.0, LENIENT),
    ],
)
def test_rules_for_chains_refuse_trees(rule: Rule, temperature: float, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        rule.require_trees(Sampling(temperature))
    rules.Coupled().require_trees(Sampling(temperature))


def test_wrong_trees_are_refused() -> None:
    for nodes, gamma in ((2, 3), (9, 1), (256, 7)):
        with pytest.raises(ValueError, match=f"tree = {nodes} guesses do not fit gamma = {gamma}"):
            dataclasses.replace(settings(rule=EXACT), tree=nodes, gamma=gamma)
