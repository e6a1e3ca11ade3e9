"""Drafts that break the contract: what is said, and in which step."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from speculative.decoding import Decoding, Params, random_draws, reference
from speculative.decoding import loop as fast
from speculative.drafts import Proposal
from speculative.sampling import Sampling
from speculative.types import Inputs, PyTree, Rows
from tests import toy

TARGET = toy.MarkovModel()
PARAMS = Params(toy.params(toy.target_table()))
GAMMA = 3


@dataclasses.dataclass(frozen=True)
class Strange:
    """Proposes what `make` gives it for a batch, from its second step on; before, rightly."""

    make: Callable[[int], tuple[Array, Array | None]]

    def start(self, params: PyTree, inputs: Inputs, cache_length: int, target: Any) -> Array:
        return jnp.zeros(inputs.shape[0], jnp.int32)

    def propose(
        self,
        params: PyTree,
        state: Array,
        last: Rows,
        uniforms: Array,
        sampling: Sampling,
        vocab_size: int,
    ) -> Proposal:
        guesses, q = self.make(last.shape[0])
        later = state[:, None] > 0
        right = jnp.full(q.shape, 0.25) if q is not None else None
        if guesses.shape == (last.shape[0], GAMMA):
            guesses = jnp.where(later, guesses, 2)
        if q is not None and right is not None and q.shape[1:] == (GAMMA, vocab_size):
            q = jnp.where(later[..., None], q, right)
        return Proposal(guesses, q, state + 1)

    def commit(
        self, params: PyTree, proposal: Proposal, accepted: Rows, hidden: dict[str, Array]
    ) -> Array:
        return proposal.state


def guesses(batch: int, token: int = 2, count: int = GAMMA) -> Array:
    return jnp.full((batch, count), token, jnp.int32)


def q(batch: int, row: list[float]) -> Array:
    return jnp.broadcast_to(jnp.array(row), (batch, GAMMA, len(row)))


SHAPES: dict[str, Callable[[int], tuple[Array, Array | None]]] = {
    "guesses of shape (1, 2)": lambda batch: (guesses(batch, count=2), None),
    "type float32": lambda batch: (guesses(batch).astype(jnp.float32), None),
    "a q of shape (1, 3, 3)": lambda batch: (guesses(batch), q(batch, [0.2, 0.4, 0.4])),
}
VALUES: dict[str, Callable[[int], tuple[Array, Array | None]]] = {
    "In step 2 the draft guessed [4, 4, 4]; tokens are 0 to 3": lambda batch: (
        guesses(batch, 4),
        None,
    ),
    "In step 2 the draft guessed [-1, -1, -1]": lambda batch: (guesses(batch, -1), None),
    "In step 2 the draft's q has a probability of -0.1": lambda batch: (
        guesses(batch),
        q(batch, [-0.1, 0.3, 0.4, 0.4]),
    ),
    "In step 2 the draft's q has a probability of nan": lambda batch: (
        guesses(batch),
        q(batch, [float("nan"), 0.3, 0.4, 0.3]),
    ),
    "In step 2 the draft's q of guess 1 sums to 1.2": lambda batch: (
        guesses(batch),
        q(batch, [0.3, 0.3, 0.3, 0.3]),
    ),
    "In step 2 the draft's q of guess 1 is 0 for the token guessed": lambda batch: (
        guesses(batch),
        q(batch, [0.5, 0.5, 0.0, 0.0]),
    ),
}


def settings(gamma: int = GAMMA) -> Decoding:
    return Decoding(toy.VOCABULARY, Sampling(1.0), gamma, 12, eos_id=-1)


@pytest.mark.parametrize("said", SHAPES)
def test_wrong_shapes_end_either_loop(said: str) -> None:
    draft, config = Strange(SHAPES[said]), settings()
    draws = random_draws(0, np.arange(1), config.capacity)
    with pytest.raises(ValueError) as error:
        reference.generate(TARGET, draft, PARAMS, np.ones(1, int), np.asarray(draws)[0], config)
    assert said in str(error.value)
    with pytest.raises(ValueError) as error:
        fast.generate(TARGET, draft, PARAMS, jnp.ones((1, 1), jnp.int32), draws, config)
    assert said in str(error.value)


@pytest.mark.parametrize("said", VALUES)
def test_the_reference_loop_names_the_step_of_a_wrong_value(said: str) -> None:
    draft, config = Strange(VALUES[said]), settings()
    draws = np.asarray(random_draws(0, np.arange(1), config.capacity))[0]
    with pytest.raises(ValueError) as error:
        reference.generate(TARGET, draft, PARAMS, np.ones(1, int), draws, config)
    assert said in str(error.value)


def test_a_proper_draft_passes() -> None:
    draft, config = Strange(lambda batch: (guesses(batch), q(batch, [0.25] * 4))), settings()
    draws = np.asarray(random_draws(0, np.arange(1), config.capacity))[0]
    found = reference.generate(TARGET, draft, PARAMS, np.ones(1, int), draws, config)
    assert len(found.tokens) == config.max_length
