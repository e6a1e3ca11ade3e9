"""What a pass of the target and a guess of the draft cost, timed where decoding runs them.

The steps are timed inside device loops, with the very functions that decoding loops over, and
each iteration's result feeds the next, so that the compiler can neither hoist nor drop it.
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from speculative.decoding import Decoding, Params
from speculative.decoding.speculative import Models, start, step
from speculative.drafts import Proposal
from speculative.pair import Pair
from speculative.sampling import Sampling
from speculative.types import Inputs, PyTree, Rows

ITERATIONS = 16
"""Steps in a timed loop: many beside the cost of starting it, few enough for a short cache."""


@dataclasses.dataclass(frozen=True)
class Costs:
    """Times in milliseconds, at batch size 1.

    Attributes:
        ms_prefill_target: encoding the source for the target.
        ms_prefill_draft: likewise for the draft.
        ms_target_step: one token by the target alone, its choice included.
        ms_verify: by gamma, a target pass over gamma + 1 positions and the verification.
        ms_proposal: by gamma, all guesses of a step.
    """

    ms_prefill_target: float
    ms_prefill_draft: float
    ms_target_step: float
    ms_verify: dict[int, float]
    ms_proposal: dict[int, float]

    def ms_draft_step(self, gamma: int) -> float:
        """One guess, as a share of a proposal: its first costs more than the others."""
        return self.ms_proposal[gamma] / gamma

    def c(self, gamma: int) -> float:
        """A guess over a target step (section 3.3)."""
        return self.ms_draft_step(gamma) / self.ms_target_step

    def verify_cost(self, gamma: int) -> float:
        """v: a target pass over gamma + 1 positions over one of a single position."""
        return self.ms_verify[gamma] / self.ms_target_step


@dataclasses.dataclass(frozen=True)
class _Given:
    """A draft whose parameters are its proposal: it costs nothing, so what is left is v."""

    def start(self, params: PyTree, inputs: Inputs, cache_length: int) -> tuple[()]:
        return ()

    def propose(
        self,
        params: PyTree,
        state: tuple[()],
        last: Rows,
        uniforms: Array,
        sampling: Sampling,
        vocab_size: int,
    ) -> Proposal:
        return Proposal(*params, state)

    def commit(self, proposal: Proposal, accepted: Rows) -> tuple[()]:
        return proposal.state


def measure_costs(
    pair: Pair,
    sampling: Sampling,
    gammas: Sequence[int],
    source_length: int,
    cache_length: int,
    repeats: int = 7,
    on_progress: Callable[[float], None] | None = None,
) -> Costs:
    """Times every kind of step of a pair.

    All kinds take turns, so that a machine that slows down slows all of them; what is given is
    the median over the turns.

    Args:
        pair: whose costs.
        sampling: the choice of a token, and the verification, are part of a step.
        gammas: numbers of guesses, each at least 1.
        source_length: tokens S of the source.
        cache_length: positions T of the caches.
        repeats: turns of each kind.
        on_progress: told the share that is done.

    Raises:
        ValueError: a gamma below 1, no turn, or a cache too short for the timed loop.
    """
    if min(gammas) < 1:
        raise ValueError(f"Costs are timed for gamma of at least 1, not {min(gammas)}.")
    if repeats < 1:
        raise ValueError(f"Timing needs at least 1 repeat, not {repeats}.")
    needed = ITERATIONS + max(gammas) + 2
    if cache_length < needed:
        raise ValueError(
            f"Timing gamma = {max(gammas)} needs a cache of {needed} positions, not {cache_length}."
        )
    source = jnp.full((1, source_length), pair.vocabulary.size - 1, jnp.int32)
    kinds = _kinds(pair, sampling, gammas, source, cache_length)
    for done, run in enumerate(kinds.values(), 1):
        jax.block_until_ready(run())
        if on_progress:
            on_progress(0.5 * done / len(kinds))
    seconds: dict[tuple[str, int], list[float]] = {kind: [] for kind in kinds}
    for turn in range(1, repeats + 1):
        for kind, run in kinds.items():
            began = time.perf_counter()
            jax.block_until_ready(run())
            seconds[kind].append(time.perf_counter() - began)
        if on_progress:
            on_progress(0.5 + 0.5 * turn / repeats)
    ms = {kind: 1e3 * statistics.median(values) for kind, values in seconds.items()}
    return Costs(
        ms["prefill", 0],
        ms["prefill", 1],
        ms["target", 0] / ITERATIONS,
        {gamma: ms["target", gamma] / ITERATIONS for gamma in gammas},
        {gamma: ms["draft", gamma] / ITERATIONS for gamma in gammas},
    )


def _kinds(
    pair: Pair, sampling: Sampling, gammas: Sequence[int], source: Array, cache_length: int
) -> dict[tuple[str, int], Callable[[], Any]]:
    """What to time, by its name and gamma: calls without arguments that give arrays."""
    target, vocab_size = pair.target, pair.vocabulary.size
    start_target = functools.partial(_start, target, pair.params.target, source, cache_length)
    start_draft = functools.partial(_start, pair.draft, pair.params.draft, source, cache_length)
    kinds = {("prefill", 0): start_target, ("prefill", 1): start_draft}
    state = start_draft()
    for gamma in (0, *gammas):
        # No token has this id, so that no row ends while it is timed.
        config = Decoding(vocab_size, sampling, gamma, cache_length - gamma - 2, eos_id=-1)
        models, params = Models(target, _Given() if gamma else None), Params(pair.params.target)
        if gamma:
            guesses = jnp.full((1, gamma), vocab_size - 1, jnp.int32)
            q = None
            if not sampling.greedy:
                q = jnp.full((1, gamma, vocab_size), 1 / vocab_size)
            params = Params(pair.params.target, (guesses, q))
            kinds["draft", gamma] = functools.partial(
                _proposals, pair.draft, pair.params.draft, state, gamma, sampling, vocab_size
            )
        progress = jax.jit(start, static_argnums=(0, 3, 4))(
            models, params, source, config, cache_length
        )
        kinds["target", gamma] = functools.partial(_steps, models, params, progress, config)
    return kinds


@functools.partial(jax.jit, static_argnums=(0, 3))
def _start(model: Any, params: PyTree, source: Array, cache_length: int) -> Any:
    return model.start(params, source, cache_length)


@functools.partial(jax.jit, static_argnums=(0, 3))
def _steps(models: Models, params: Params, progress: Any, config: Decoding) -> Any:
    """Steps of decoding, each from where the loop began, on the token the last one chose."""
    draws = jnp.full((1, config.capacity, 3), 0.5)

    def body(_: Array, progress: Any) -> Any:
        lengths = progress.lengths
        after = step(models, params, progress, draws, config)[0]
        rewound = models.target.rewind(after.target, lengths)
        return after.replace(target=rewound, lengths=lengths, finished=progress.finished)

    return lax.fori_loop(0, ITERATIONS, body, progress)


@functools.partial(jax.jit, static_argnums=(0, 3, 4, 5))
def _proposals(
    draft: Any, params: PyTree, state: Any, gamma: int, sampling: Sampling, vocab_size: int
) -> Any:
    """Proposals, each on the last guess of the one before; q is written, as verification needs."""
    uniforms = jnp.full((1, gamma), 0.5)
    none = jnp.zeros(1, jnp.int32)

    def propose(state: Any, last: Array) -> tuple[Any, Array, Array | None]:
        proposal = draft.propose(params, state, last, uniforms, sampling, vocab_size)
        return draft.commit(proposal, none), proposal.guesses[:, -1], proposal.q

    def body(_: Array, carry: tuple[Any, Array, Array | None]) -> Any:
        return propose(carry[0], carry[1])

    shapes = jax.eval_shape(propose, state, none)
    q = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes[2])
    return lax.fori_loop(0, ITERATIONS, body, (state, none, q))
