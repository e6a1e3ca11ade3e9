"""Drafts that break the contract are refused and named, and never change a distribution."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from speculative.decoding import Decoding, Output, Params, rules, tracing
from speculative.decoding import loop as fast
from speculative.drafts import CopyDraft, Draft, MixedDraft, Proposal, TransformerDraft
from speculative.drafts.base import FAULTS
from speculative.sampling import Sampling, categorical
from speculative.types import Inputs, PyTree, Rows
from tests import toy

TARGET = toy.MarkovModel()
PARAMS = Params(toy.params(toy.target_table()))
GAMMA = 3
UNLIKELY, NOT_FINITE, BELOW_0, SUM, DRAWN = 1, 2, 3, 4, 5  # Of `FAULTS`.
Made = tuple[Array, Array | None]


@dataclasses.dataclass(frozen=True)
class Strange(Draft):
    """Proposes what `make` gives it for a batch, from its second step on; before, rightly."""

    make: Callable[[int], Made]

    def start(self, params: PyTree, inputs: Inputs, cache_length: int, target: Any) -> Array:
        return jnp.zeros(inputs.shape[0], jnp.int32)

    def propose(
        self,
        params: PyTree,
        state: Array,
        last: Rows,
        numbers: Array,
        sampling: Sampling,
        vocab_size: int,
        history: Any = None,
    ) -> Proposal:
        guesses, q = self.make(last.shape[0])
        later = state[:, None] > 0
        right = jnp.full((*numbers.shape, vocab_size), 0.25)
        if guesses.shape == numbers.shape:
            guesses = jnp.where(later, guesses, categorical(right, numbers))
        if q is not None and q.shape == right.shape:
            q = jnp.where(later[..., None], q, right)
        return Proposal(guesses, q, state + 1)

    def commit(
        self, params: PyTree, proposal: Proposal, accepted: Rows, hidden: dict[str, Array]
    ) -> Array:
        return proposal.state


def proposed(token: int, row: list[float] | None = None, count: int = GAMMA) -> Any:
    """What makes guesses of one token, and a q of one row of probabilities."""

    def make(batch: int) -> Made:
        q = None if row is None else jnp.broadcast_to(jnp.array(row), (batch, GAMMA, len(row)))
        return jnp.full((batch, count), token, jnp.int32), q

    return make


SHAPES: dict[str, Callable[[int], Made]] = {
    "guesses of shape (1, 2)": proposed(2, count=2),
    "type float32": lambda batch: (proposed(2)(batch)[0].astype(jnp.float32), None),
    "a q of shape (1, 3, 3)": proposed(2, [0.2, 0.4, 0.4]),
}
# What the traced loop says, and the number of the fault that the fast loop finds.
VALUES: dict[str, tuple[int, Callable[[int], Made]]] = {
    "guessed [4, 4, 4]; tokens are 0 to 3": (UNLIKELY, proposed(4)),
    "guessed [-1, -1, -1]": (UNLIKELY, proposed(-1)),
    "'s q has a probability of -0.1": (BELOW_0, proposed(2, [-0.1, 0.3, 0.4, 0.4])),
    "'s q has a probability of nan": (NOT_FINITE, proposed(2, [float("nan"), 0.3, 0.4, 0.3])),
    "they must be finite": (NOT_FINITE, proposed(2, [float("inf"), 0.3, 0.4, 0.3])),
    "'s q of guess 1 sums to 1.2": (SUM, proposed(2, [0.3, 0.3, 0.3, 0.3])),
    "'s q of guess 1 is 0 for the token guessed": (DRAWN, proposed(2, [0.5, 0.5, 0.0, 0.0])),
    "does not draw from the q that is reported": (DRAWN, proposed(2, [0.25] * 4)),
}


def settings(temperature: float = 1.0, rule: rules.Rule = rules.EXACT) -> Decoding:
    return Decoding(toy.VOCABULARY, Sampling(temperature), GAMMA, 12, eos_ids=(), rule=rule)


def decode(draft: Draft, draft_params: PyTree, config: Decoding, rows: int) -> Output:
    params, inputs = Params(PARAMS.target, draft_params), jnp.ones((rows, 1), jnp.int32)
    draws = config.draws(0, np.arange(rows))
    return jax.device_get(fast.generate(TARGET, draft, params, inputs, draws, config))


def reference_says(draft: Draft, draft_params: PyTree, config: Decoding) -> str:
    params, draws = Params(PARAMS.target, draft_params), config.draws(0, np.arange(1))
    with pytest.raises(ValueError) as error:
        tracing.generate(TARGET, draft, params, np.ones(1, int), np.asarray(draws)[0], config)
    return str(error.value)


@pytest.mark.parametrize("said", SHAPES)
def test_wrong_shapes_end_either_loop(said: str) -> None:
    draft = Strange(SHAPES[said])
    assert said in reference_says(draft, (), settings())
    with pytest.raises(ValueError) as error:
        decode(draft, (), settings(), 1)
    assert said in str(error.value)


@pytest.mark.parametrize("said", VALUES)
def test_wrong_values_end_either_loop(said: str) -> None:
    """The traced loop names the step."""
    fault, make = VALUES[said]
    found = reference_says(Strange(make), (), settings())
    assert found.startswith("In step 2 the draft") and said in found
    assert decode(Strange(make), (), settings(), 2).fault.tolist() == [fault, fault]


def table(planted: float | None = None, row: tuple[Any, ...] = ()) -> Array:
    """The logits of a draft near the target, with a logit planted in some rows, or none."""
    logits = toy.near_table()
    if planted is not None:
        logits[(*row, 2)] = planted
    return toy.params(logits)


# What a draft may report in place of the q from which it drew its guesses.
REPORTED: dict[str, Callable[[Array], Array]] = {
    "as drawn": lambda q: q,
    "another temperature": lambda q: q**2 / (q**2).sum(axis=-1, keepdims=True),
    "a shifted vocabulary": lambda q: jnp.roll(q, 1, axis=-1),
    "negative": lambda q: q.at[..., 0].add(-2.0),
    "unnormalised": lambda q: 1.01 * q,
}


@dataclasses.dataclass(frozen=True)
class Planted(Draft):
    """A draft whose parameters are logits and the number of what it reports."""

    draft: TransformerDraft = TransformerDraft(TARGET)

    def start(self, params, inputs, cache_length, target) -> Any:
        return self.draft.start(params[0], inputs, cache_length, target)

    def follow(self, params, state, last, guesses) -> Any:
        return self.draft.follow(params[0], state, last, guesses)

    def commit(self, params, proposal, accepted, hidden) -> Any:
        return self.draft.commit(params[0], proposal, accepted, hidden)

    def propose(self, params, state, last, numbers, sampling, vocab_size, history=None) -> Proposal:
        given = state, last, numbers, sampling, vocab_size, history
        found = self.draft.propose(params[0], *given)
        if found.q is None:
            return found
        return found._replace(q=jax.lax.switch(params[1], [*REPORTED.values()], found.q))


def params(logits: Array, reported: str = "as drawn") -> PyTree:
    return logits, list(REPORTED).index(reported)


AFTER_2 = (slice(None), 2)  # A single token after which a logit is planted.
PLANTED: dict[str, tuple[PyTree, int | None, int]] = {
    # The parameters, and the faults at T = 0, where a q that is not used may be wrong without harm,
    # and at T = 1.
    "nan": (params(table(np.nan, (..., slice(None)))), UNLIKELY, NOT_FINITE),
    "nan in one row": (params(table(np.nan, AFTER_2)), UNLIKELY, NOT_FINITE),
    "infinite in one row": (params(table(np.inf, AFTER_2)), UNLIKELY, NOT_FINITE),
    "another temperature": (params(table(), "another temperature"), None, DRAWN),
    "a shifted vocabulary": (params(table(), "a shifted vocabulary"), None, DRAWN),
    "negative": (params(table(), "negative"), None, BELOW_0),
    "unnormalised": (params(table(), "unnormalised"), None, SUM),
}


def as_reported(fault: str) -> PyTree:
    """Those of a draft that draws its guesses from what the one with the fault reports."""
    return params(2 * table() if fault == "another temperature" else table())


@pytest.mark.parametrize("mixed", [False, True], ids=["chain", "mixture"])
@pytest.mark.parametrize("rule", [rules.Token(), rules.Block()], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("fault", PLANTED)
def test_planted_faults_are_found_in_the_rows_that_have_them(
    fault: str, temperature: float, rule: rules.Rule, mixed: bool
) -> None:
    """A row in which nothing was found is what it is with a draft that is as it says.

    So a guess that happens to be the one which its random number draws from the q reported is no
    fault: Algorithm 1 goes on as if it had been drawn from it.
    """
    draft: Any = Planted()
    of_draft, *codes = PLANTED[fault]
    config, rows = settings(temperature, rule), 64

    def output(of_draft: PyTree) -> Output:
        if mixed:
            return decode(MixedDraft(draft, CopyDraft(longest=2)), (of_draft, ()), config, rows)
        return decode(draft, of_draft, config, rows)

    found, sound = output(of_draft), output(as_reported(fault))
    assert not sound.fault.any() and found.finite.all()
    code, flagged = codes[int(temperature)], found.fault > 0
    if code is None:
        assert not flagged.any()
    else:
        assert flagged.sum() > rows / 4 and set(found.fault[flagged].tolist()) == {code}
    np.testing.assert_array_equal(found.tokens[~flagged], sound.tokens[~flagged])
    if temperature == 0:  # The tokens are the target's own in any case.
        np.testing.assert_array_equal(found.tokens, sound.tokens)
    elif not mixed:
        assert "In step" in reference_says(draft, of_draft, config)


def test_faults_of_rows_that_have_ended_do_not_count() -> None:
    """A row that ends with its first step is not there in the second, in which all is wrong."""
    fault, make = VALUES["'s q has a probability of nan"]
    config = dataclasses.replace(settings(), eos_ids=toy.ENDS)
    found = decode(Strange(make), (), config, 64)
    once = found.target_calls == 1
    assert 5 < once.sum() < 60
    assert (found.fault == np.where(once, 0, fault)).all()


def test_each_fault_has_words() -> None:
    assert len(FAULTS) == 1 + max(UNLIKELY, NOT_FINITE, BELOW_0, SUM, DRAWN)
    assert len(set(FAULTS)) == len(FAULTS)
