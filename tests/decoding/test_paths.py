"""Trees of guesses: whichever branch stands, outputs are those of the target alone."""

import dataclasses
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from speculative.decoding import Decoding, Output, Params, Rule, loop, queue, rules
from speculative.decoding.rules import EXACT, Token
from speculative.drafts import Draft, Proposal
from speculative.measurement import teacher_forced
from speculative.models import FlaxModel
from speculative.models.interface import Chunk
from speculative.processors import History, Processor, RepetitionPenalty
from speculative.ragged import read_rows, write_rows
from speculative.sampling import Sampling, argmax
from speculative.tree import Tree
from speculative.types import PyTree
from tests import tiny
from tests.decoding import test_decoder_only as gpt
from tests.decoding.test_loop import check_stream
from tests.decoding.test_reference import check_same_tokens

# Two branches, of three guesses and of two: places 1, 3, 5 and 2, 4.
FORK = Tree((0, 0, 1, 2, 3))
GAMMA, LENGTH, END = 5, 24, 7


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

    def propose(
        self, params, state, last, uniforms, sampling, vocab_size, history=None
    ) -> Proposal:
        _, texts, wrong = params
        number, length = state
        coming = read_rows(jnp.pad(texts[number], ((0, 0), (0, 3))), length, 3)
        branch, depth = np.array([path[0] for path in FORK.paths[1:]]), FORK.depths[1:]
        right = (branch == 1 + length[:, None] % 2) & (depth <= 1 + length[:, None] % 4)
        return Proposal(jnp.where(right, coming[:, depth - 1], wrong), None, state, FORK)

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

    def propose(
        self, params, state, last, uniforms, sampling, vocab_size, history=None
    ) -> Proposal:
        found = super().propose(params, state[0], last, uniforms, sampling, vocab_size)
        return found._replace(state=state)

    def commit(self, params, proposal, accepted, hidden) -> Any:
        (number, length), read = proposal.state
        read = write_rows(read, hidden[self.layers[0]], length, axis=1)
        return (number, length + accepted + 1), read


class Follow(Token):
    """At temperature 0: a guess stands if it is the argmax after one that stands."""

    keyed_by: ClassVar[Literal["position", "step"]] = "step"

    def verify_tree(self, guesses, logits, q, sampling, uniforms, tree) -> Any:
        best, stand = argmax(logits), [jnp.ones(len(guesses), bool)]
        for guess, parent in enumerate(tree.parents):
            stand.append(stand[parent] & (guesses[:, guess] == best[:, parent]))
        stands = jnp.stack(stand, axis=1)
        accepted = jnp.where(stands, tree.depths, 0).max(axis=1)
        levels = [stands & (tree.depths == depth) for depth in range(tree.depth + 1)]
        path = jnp.stack([level.argmax(axis=1) for level in levels], axis=1)
        at = jnp.take_along_axis(path, accepted[:, None], axis=1)
        return path, accepted, jnp.take_along_axis(best, at, axis=1)[:, 0]


TARGETS: dict[str, tuple[FlaxModel, Any, np.ndarray]] = {
    "T5": (tiny.TARGET, tiny.target_params, tiny.sources(3)),
    "GPT": (gpt.TARGETS["GPT"], lambda: gpt.params("GPT").target, gpt.prompts()[:3]),
}


def settings(processors: tuple[Processor, ...] = (), rule: Rule | None = None) -> Decoding:
    gamma = 0 if rule is None else GAMMA
    greedy = Sampling(0.0)
    return Decoding(
        tiny.VOCABULARY, greedy, gamma, LENGTH, (END,), rule or EXACT, processors=processors
    )


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


@pytest.mark.parametrize(("name", "processors"), EACH, ids=IDS)
def test_outputs_are_the_targets_own(name: str, processors: tuple[Processor, ...]) -> None:
    """In batches of one and of three, and by the reference loop, along either branch."""
    expected, of_draft = known(name, processors)
    config = settings(processors, Follow())
    for rows in (1, 3):
        found = decode(name, Fork(), of_draft, config, rows)
        require_equal(found, expected)
        assert (found.target_calls < 0.6 * found.lengths).all()
    tested, accepted = found.by_position.sum(axis=0).T
    assert (accepted[:3] > 0).all() and (accepted[:3] < tested[:3]).any()
    assert not found.by_position[:, 3:].any()  # No deeper than the tree.
    model, params, inputs = TARGETS[name]
    both = Params(params(), of_draft)
    check_same_tokens(model, Fork(), both, inputs, config, seed=0)


@pytest.mark.parametrize("name", TARGETS)
def test_streams_and_queues_take_either_branch(name: str) -> None:
    expected, of_draft = known(name)
    config = settings(rule=Follow())
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


@pytest.mark.parametrize("name", TARGETS)
def test_a_draft_is_given_the_hidden_states_of_the_path(name: str) -> None:
    """Those of a pass over the text."""
    expected, of_draft = known(name)
    model, params, inputs = TARGETS[name]
    config, inputs, draft = settings(rule=Follow()), jax.device_put(inputs), Reading()
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
    return CHUNK(self, last)._replace(mask=jnp.tri(GAMMA + 1, dtype=bool)[None])


def placed_as_a_chain(self: Proposal, last: Array) -> Chunk:
    return CHUNK(self, last)._replace(positions=jnp.arange(GAMMA + 1)[None])


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
    found = decode(name, Fork(), of_draft, settings(PROCESSORS, Follow()), 3)
    assert (found.tokens != expected.tokens).any()


@pytest.mark.parametrize("rule", [EXACT, rules.Block(), rules.Simulated(0.5)], ids=str)
def test_rules_for_chains_refuse_trees(rule: Rule) -> None:
    _, of_draft = known("T5")
    with pytest.raises(
        ValueError, match="verifies chains of guesses.*take a rule with verify_tree"
    ):
        decode("T5", Fork(), of_draft, settings(rule=rule), 1)


def test_wrong_trees_are_refused() -> None:
    with pytest.raises(ValueError, match="parent of guess 2 must be a whole number from 0 to 1"):
        Tree((0, 2))
    with pytest.raises(ValueError, match="a tree of 5 guesses; it must name the parents of 3"):
        decode(
            "T5", Fork(), known("T5")[1], dataclasses.replace(settings(rule=Follow()), gamma=3), 1
        )
    with pytest.raises(ValueError, match='Keyed verifies trees.*keyed_by = "step"'):
        type("Keyed", (Token,), {"verify_tree": Follow.verify_tree})
