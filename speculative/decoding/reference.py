"""Algorithm 1 line by line, on the host: what the fast path must equal, and what traces show.

The models run as they are; everything the paper's proof speaks of (standardised
distributions, acceptance, residual, draws) is NumPy in float64. From the same random numbers
this emits the same tokens as `speculative.generate`.
"""

import dataclasses
import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from speculative.decoding.settings import ACCEPT, CORRECT, DRAFT, Decoding
from speculative.decoding.speculative import Model, Params
from speculative.drafts.base import Draft, Proposal, require_shapes
from speculative.sampling import Sampling
from speculative.types import PyTree

SUM_TOLERANCE = 1e-3
"""How far from 1 a draft's probabilities may sum up, which float32 over a vocabulary needs."""


@dataclasses.dataclass(frozen=True)
class TraceStep:
    """One step of Algorithm 1.

    Attributes:
        guesses: the draft's gamma tokens.
        p: [gamma + 1, V] the target's standardised distributions.
        q: [gamma, V] the draft's.
        r: [gamma] the random numbers that tested the guesses.
        accepted: n, how many stand.
        next_token: the correction, or the bonus token if n is gamma.
        emitted: tokens this step gave to the output.
        draft_seconds: wall-clock of the proposal.
        target_seconds: wall-clock of the verification.
    """

    guesses: list[int]
    p: np.ndarray
    q: np.ndarray
    r: np.ndarray
    accepted: int
    next_token: int
    emitted: list[int]
    draft_seconds: float
    target_seconds: float

    @property
    def beta(self) -> np.ndarray:
        """[gamma] sum min(p, q) at each guess."""
        return np.minimum(self.p[:-1], self.q).sum(axis=-1)


@dataclasses.dataclass(frozen=True)
class Trace:
    """A whole generation, step by step."""

    steps: list[TraceStep]

    @property
    def tokens(self) -> list[int]:
        """The output."""
        return [token for step in self.steps for token in step.emitted]


def standardise(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """`sampling.standardise` in float64, [..., V] -> [..., V]."""
    logits = np.asarray(logits, np.float64)
    if sampling.greedy:
        return np.eye(logits.shape[-1])[logits.argmax(axis=-1)]
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        smallest = np.sort(logits, axis=-1)[..., -sampling.top_k, None]
        logits = np.where(logits >= smallest, logits, -np.inf)
    p = np.exp(logits - logits.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    if sampling.top_p < 1:
        descending = -np.sort(-p, axis=-1)
        needed = np.cumsum(descending, axis=-1) - descending < sampling.top_p
        smallest = np.where(needed, descending, np.inf).min(axis=-1, keepdims=True)
        p = np.where(p >= smallest, p, 0.0)
        p /= p.sum(axis=-1, keepdims=True)
    return p


def draw(weights: np.ndarray, uniform: float) -> int:
    """The first token whose running sum exceeds `uniform` of the total: [V] -> token."""
    running = np.cumsum(np.asarray(weights, np.float64))
    return min(
        int(np.searchsorted(running, uniform * running[-1], side="right")),
        int(np.argmax(running >= running[-1])),
    )


def algorithm_1(
    guesses: list[int],
    p: np.ndarray,
    q: np.ndarray,
    r: np.ndarray,
    correct: np.ndarray,
    lenience: float = 1.0,
) -> tuple[int, int]:
    """Lines 3 to 5 of Algorithm 1: how many guesses stand, and the token after them.

    Lenience puts l q in the place of q (A.5).
    """
    q = lenience * q
    n = 0
    while n < len(guesses) and r[n] * q[n, guesses[n]] < p[n, guesses[n]]:
        n += 1
    weights = p[n]
    if n < len(guesses):
        left = np.maximum(p[n] - q[n], 0.0)
        weights = left if left.sum() > 0 else p[n]
    return n, draw(weights, correct[n])


def lenient_argmax(guesses: list[int], p: np.ndarray, lenience: float) -> tuple[int, int]:
    """Like `algorithm_1` at temperature 0: a guess stands if p(x) >= l max p (A.5).

    Here p [gamma + 1, V] is the target's own distribution, the softmax of its logits.
    """
    n = 0
    while n < len(guesses) and p[n, guesses[n]] >= lenience * p[n].max():
        n += 1
    return n, int(p[n].argmax())


@functools.partial(jax.jit, static_argnums=(0, 3))
def _start(
    model: Model | Draft, params: PyTree, source: Array, cache_length: int, *target: Any
) -> Any:
    return model.start(params, source, cache_length, *target)


@functools.partial(jax.jit, static_argnums=0)
def _extend(target: Model, params: PyTree, state: Any, chunk: Array) -> tuple[Array, Any]:
    return target.extend(params, state, chunk)


@functools.partial(jax.jit, static_argnums=(0, 5, 6))
def _propose(
    draft: Draft,
    params: PyTree,
    state: Any,
    last: Array,
    uniforms: Array,
    sampling: Sampling,
    vocab_size: int,
) -> Proposal:
    return draft.propose(params, state, last, uniforms, sampling, vocab_size)


def _require_proper(proposal: Proposal, vocab_size: int, number: int) -> None:
    """Raises ValueError unless guesses are tokens, and q are distributions that hold them."""
    guesses = np.asarray(proposal.guesses)[0]
    if guesses.min() < 0 or guesses.max() >= vocab_size:
        raise ValueError(
            f"In step {number} the draft guessed {guesses.tolist()}; tokens are 0 to "
            f"{vocab_size - 1}."
        )
    if proposal.q is None:
        return
    q = np.asarray(proposal.q[0], np.float64)
    at = f"In step {number} the draft's q"
    if not np.isfinite(q).all() or q.min() < 0:
        raise ValueError(f"{at} has a probability of {q.min()}; they must be finite, from 0 on.")
    sums = q.sum(axis=-1)
    place = int(np.abs(sums - 1).argmax())
    if abs(sums[place] - 1) > SUM_TOLERANCE:
        raise ValueError(f"{at} of guess {place + 1} sums to {sums[place]:.6g}; it must be 1.")
    of_guesses = q[np.arange(len(guesses)), guesses]
    if of_guesses.min() == 0:
        raise ValueError(
            f"{at} of guess {int(of_guesses.argmin()) + 1} is 0 for the token guessed; a guess "
            "must be drawn from the q that is reported."
        )


def generate(
    target: Model,
    draft: Draft,
    params: Params,
    inputs: np.ndarray,
    draws: np.ndarray,
    config: Decoding,
) -> Trace:
    """Decodes one example from the host.

    Args:
        target: the model that is sampled from.
        draft: what guesses for it.
        params: of both.
        inputs: [S] source tokens.
        draws: [capacity, 3], one row's random numbers from `random_draws`.
        config: gamma (at least 1), sampling, lengths.

    Raises:
        ValueError: gamma is 0, or the draft's proposal is no guess with the distribution that it
            was drawn from; the message names the step.
    """
    if config.gamma < 1:
        raise ValueError(f"The reference loop needs gamma of at least 1, not {config.gamma}.")
    gamma, vocab_size = config.gamma, config.vocab_size
    draws = np.asarray(draws, np.float64)
    source = jnp.asarray(inputs)[None]
    size = config.cache_lengths()[-1]
    target_state = _start(target, params.target, source, size)
    draft_state = _start(draft, params.draft, source, size, target_state)
    output, last, steps = [], int(target.first(source)[0]), []
    while len(output) < config.max_length and config.eos_id not in output:
        here = draws[len(output) : len(output) + gamma + 1]
        began = time.perf_counter()
        proposal = _propose(
            draft,
            params.draft,
            draft_state,
            jnp.array([last], jnp.int32),
            jnp.asarray(here[None, :gamma, DRAFT], jnp.float32),
            config.sampling,
            vocab_size,
        )
        require_shapes(proposal, 1, gamma, vocab_size)
        guesses = [int(token) for token in np.asarray(proposal.guesses)[0]]
        drafted = time.perf_counter()
        _require_proper(proposal, vocab_size, len(steps) + 1)
        chunk = jnp.array([[last, *guesses]], jnp.int32)
        logits, target_state = _extend(target, params.target, target_state, chunk)
        rows = np.asarray(logits)[0, :, :vocab_size]
        p = standardise(rows, config.sampling)
        verified = time.perf_counter()
        one_hot = np.eye(vocab_size)[guesses]
        q = one_hot if proposal.q is None else np.asarray(proposal.q[0], np.float64)

        if config.sampling.greedy and config.lenience < 1:
            own = standardise(rows, Sampling())
            n, next_token = lenient_argmax(guesses, own, config.lenience)
        else:
            r, correct = here[:gamma, ACCEPT], here[:, CORRECT]
            n, next_token = algorithm_1(guesses, p, q, r, correct, config.lenience)
        block = [*guesses[:n], next_token][: config.max_length - len(output)]
        if config.eos_id in block:
            block = block[: block.index(config.eos_id) + 1]
        output += block
        last = next_token
        target_state = target.rewind(target_state, jnp.array([len(output)], jnp.int32))
        draft_state = draft.commit(proposal, jnp.array([n], jnp.int32))
        steps.append(
            TraceStep(
                guesses,
                p,
                q,
                here[:gamma, ACCEPT],
                n,
                next_token,
                block,
                drafted - began,
                verified - drafted,
            )
        )
    return Trace(steps)
