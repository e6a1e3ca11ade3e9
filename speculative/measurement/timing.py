"""What a pass of the target and a guess of the draft cost, timed where decoding runs them.

Steps of decoding are timed in device loops, and each one's result feeds the next, so that the
compiler can neither hoist nor drop it. A proposal is timed as what it adds to a step: between
two proposals the target's weights drive the draft's out of a processor's caches, which a loop
over proposals alone would not show.
"""

import dataclasses
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from speculative.decoding import Decoding, Params
from speculative.decoding.speculative import Models, Progress, start, step
from speculative.drafts import Draft, Proposal
from speculative.pair import Pair
from speculative.sampling import Sampling
from speculative.types import Inputs, PyTree, Rows

ITERATIONS = 32
"""Steps in a timed loop: many beside the cost of starting it, few enough for a short cache."""


@dataclasses.dataclass(frozen=True)
class Costs:
    """Times in milliseconds, at batch size 1.

    Attributes:
        ms_prefill_target: encoding the source for the target.
        ms_prefill_draft: likewise for the draft.
        ms_target_step: one token by the target alone, its choice included.
        ms_verify: by gamma, a target pass over gamma + 1 positions and the verification.
        ms_proposal: by gamma, what all guesses of a step add to it.
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
    """A draft whose parameters are its proposal: a step with it is verification alone."""

    def start(self, params: PyTree, inputs: Inputs, cache_length: int, target: Any) -> tuple[()]:
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
        guesses, q = params
        return Proposal(guesses, q, state)

    def commit(self, proposal: Proposal, accepted: Rows) -> tuple[()]:
        return proposal.state


@dataclasses.dataclass(frozen=True)
class _Rejected:
    """A draft none of whose guesses stands, so that it advances by one token a step."""

    draft: Draft

    def start(self, params: PyTree, inputs: Inputs, cache_length: int, target: Any) -> Any:
        return self.draft.start(params, inputs, cache_length, target)

    def propose(
        self,
        params: PyTree,
        state: Any,
        last: Rows,
        uniforms: Array,
        sampling: Sampling,
        vocab_size: int,
    ) -> Proposal:
        return self.draft.propose(params, state, last, uniforms, sampling, vocab_size)

    def commit(self, proposal: Proposal, accepted: Rows) -> Any:
        return self.draft.commit(proposal, jnp.zeros_like(accepted))


def typical(turns: Sequence[Sequence[float]]) -> list[float]:
    """Each kind's median share of the median turn, for turns of a time for each kind.

    A machine that slows down slows all kinds, and leaves their shares as they were.
    """
    turn = statistics.median(map(sum, turns))
    shares = zip(*([time / sum(times) for time in times] for times in turns), strict=True)
    return [turn * statistics.median(share) for share in shares]


class CostMeter:
    """Times every kind of step of a pair, one after the other, over and over.

    A machine that slows down then slows all of them, and each kind's share of its turn stays as
    it was: what is given is the median share of the median turn. Whoever times something else
    beside puts ticks in between, for the same reason.
    """

    def __init__(
        self,
        pair: Pair,
        sampling: Sampling,
        gammas: Sequence[int],
        source_length: int,
        cache_length: int,
    ) -> None:
        """Compiles what will be timed.

        Args:
            pair: whose costs.
            sampling: the choice of a token, and the verification, are part of a step.
            gammas: numbers of guesses, each at least 1.
            source_length: tokens S of the source.
            cache_length: positions T of the caches.

        Raises:
            ValueError: a gamma below 1, or a cache too short for the timed loop.
        """
        if min(gammas) < 1:
            raise ValueError(f"Costs are timed for gamma of at least 1, not {min(gammas)}.")
        needed = ITERATIONS + max(gammas) + 2
        if cache_length < needed:
            raise ValueError(
                f"Timing gamma = {max(gammas)} needs a cache of {needed} positions, not "
                f"{cache_length}."
            )
        self._gammas = gammas
        source = jnp.full((1, source_length), pair.vocabulary.size - 1, jnp.int32)
        self._kinds = _kinds(pair, sampling, gammas, source, cache_length)
        self._seconds: dict[tuple[str, int], list[float]] = {kind: [] for kind in self._kinds}
        self._order = itertools.cycle(self._kinds)
        with ThreadPoolExecutor() as pool:  # What is compiled here, is compiled side by side.
            list(pool.map(lambda run: jax.block_until_ready(run()), self._kinds.values()))

    def turn(self) -> None:
        """Times each kind once."""
        for _ in self._kinds:
            self.tick()

    def tick(self) -> None:
        """Times the next kind once."""
        kind = next(self._order)
        began = time.perf_counter()
        jax.block_until_ready(self._kinds[kind]())
        self._seconds[kind].append(time.perf_counter() - began)

    @property
    def turns(self) -> int:
        """How often every kind has been timed."""
        return min(map(len, self._seconds.values()))

    def costs(self) -> Costs:
        """From all whole turns so far, of which there must be one."""
        seconds = typical(list(zip(*self._seconds.values(), strict=False)))
        ms = {kind: 1e3 * second for kind, second in zip(self._seconds, seconds, strict=True)}
        verify = {gamma: ms["verify", gamma] / ITERATIONS for gamma in self._gammas}
        step = {gamma: ms["step", gamma] / ITERATIONS for gamma in self._gammas}
        return Costs(
            ms_prefill_target=ms["prefill target", 0],
            ms_prefill_draft=ms["prefill draft", 0],
            ms_target_step=ms["verify", 0] / ITERATIONS,
            ms_verify=verify,
            # A draft that costs next to nothing may seem to cost less than that.
            ms_proposal={gamma: max(0.0, step[gamma] - verify[gamma]) for gamma in self._gammas},
        )


def _kinds(
    pair: Pair, sampling: Sampling, gammas: Sequence[int], source: Array, cache_length: int
) -> dict[tuple[str, int], Callable[[], Any]]:
    """What to time, by its name and gamma: calls without arguments that give arrays."""
    params, vocab_size = pair.params, pair.vocabulary.size
    # No token has the id -1, so that no row ends while it is timed.
    plain = Decoding(vocab_size, sampling, 0, cache_length - 2, eos_id=-1)
    models = Models(pair.target, _Rejected(pair.draft))
    begun = begin(models, params, source, plain)
    alone = dataclasses.replace(begun, draft=())
    kinds: dict[tuple[str, int], Callable[[], Any]] = {
        ("prefill target", 0): functools.partial(
            _start, pair.target, params.target, source, cache_length
        ),
        ("prefill draft", 0): functools.partial(
            _start, pair.draft, params.draft, source, cache_length, begun.target
        ),
        ("verify", 0): functools.partial(
            _steps, Models(pair.target, None), Params(params.target), alone, plain
        ),
    }
    for gamma in gammas:
        config = dataclasses.replace(plain, gamma=gamma, max_length=cache_length - gamma - 2)
        guesses = jnp.full((1, gamma), vocab_size - 1, jnp.int32)
        q = None if sampling.greedy else jnp.full((1, gamma, vocab_size), 1 / vocab_size)
        given = Models(pair.target, _Given()), Params(params.target, (guesses, q))
        kinds["verify", gamma] = functools.partial(_steps, *given, alone, config)
        kinds["step", gamma] = functools.partial(_steps, models, params, begun, config)
    return kinds


@functools.partial(jax.jit, static_argnums=(0, 3))
def _start(model: Any, params: PyTree, source: Array, cache_length: int, *target: Any) -> Any:
    return model.start(params, source, cache_length, *target)


@functools.partial(jax.jit, static_argnums=(0, 3))
def begin(models: Models, params: Params, source: Array, config: Decoding) -> Progress:
    """`speculative.start` in a cache for all of the longest output: the prefill of both models."""
    return start(models, params, source, config, config.capacity)


@functools.partial(jax.jit, static_argnums=(0, 3))
def _steps(models: Models, params: Params, progress: Progress, config: Decoding) -> Progress:
    """Steps of decoding, each from where the loop began, on the token the last one chose."""
    draws = jnp.full((1, config.capacity, 3), 0.5)

    def body(_: Array, progress: Progress) -> Progress:
        lengths = progress.lengths
        after = step(models, params, progress, draws, config)[0]
        rewound = models.target.rewind(after.target, lengths)
        return dataclasses.replace(after, target=rewound, lengths=lengths)

    return lax.fori_loop(0, ITERATIONS, body, progress)
