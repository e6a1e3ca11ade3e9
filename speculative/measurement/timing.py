"""The costs of a target pass and of a draft's guess, timed within decoding steps.

Steps are timed in device loops, and each step's result feeds the next, so that the compiler can
neither hoist nor drop it. A proposal's time is what it adds to a step: between two proposals the
target's weights drive the draft's out of the caches, which a loop over proposals would not show.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from speculative import theory
from speculative.decoding import Decoding, Params
from speculative.decoding.loop import Models, Progress, begin, step
from speculative.decoding.programs import Program
from speculative.decoding.tracing import start_draft, start_target
from speculative.drafts import Draft, MixedDraft, Proposal, UniformDraft
from speculative.measurement.hardware import elapsed
from speculative.pair import Pair
from speculative.sampling import Sampling
from speculative.tree import Tree

# Steps in a timed loop: enough to hide the cost of starting it, few enough for a short cache.
ITERATIONS = 32
Calls = Mapping[tuple[str, int], Callable[[], Any]]  # By name and gamma; each returns arrays.
TURNS = 3  # The least number of turns for costs; a turn times every kind of step once.


@dataclasses.dataclass(frozen=True)
class Costs:
    """Times in milliseconds, for one row."""

    ms_prefill_target: float  # Reading the source.
    ms_prefill_draft: float
    ms_target_step: float  # One token by the target alone, including sampling.
    ms_verify: dict[int, float]  # By gamma, a pass over gamma + 1 positions and the verification.
    # By gamma, all guesses of a step; for a mixture its model's, which cost more than a look-up.
    ms_proposal: dict[int, float]

    def ms_draft_step(self, gamma: int) -> float:
        """The mean time of a guess in a proposal, whose first guess costs more than the others."""
        return self.ms_proposal[gamma] / gamma

    def c(self, gamma: int) -> float:
        """The time of a guess over that of a target step (section 3.3)."""
        return self.ms_draft_step(gamma) / self.ms_target_step

    def verify_cost(self, gamma: int) -> float:
        """v: the time of a target pass over gamma + 1 positions over that of a target step."""
        return self.ms_verify[gamma] / self.ms_target_step

    def speedup(self, alpha: float, gamma: int, lengths: Sequence[int]) -> float:
        """The speed-up predicted by these costs for texts of given lengths."""
        c, v, step = self.c(gamma), self.verify_cost(gamma), self.ms_target_step
        prefill = self.ms_prefill_target / step, self.ms_prefill_draft / step
        return theory.predicted_speedup(alpha, gamma, c, v, lengths, *prefill)


class _FixedGuesses(UniformDraft):
    """Its parameters are the guesses, and q or their tree, so that a step is only verification."""

    def propose(self, params, state, *args: Any, **kwargs: Any) -> Proposal:
        guesses, q = params
        return Proposal(guesses, q, state)

    def grow(self, params, state, *args: Any, **kwargs: Any) -> Proposal:
        guesses, tree = params
        return Proposal(guesses, None, state, tree)


@dataclasses.dataclass(frozen=True)
class _Rejected(Draft):
    """A draft whose guesses are all rejected, so that it advances by one token per step."""

    draft: Draft

    @property
    def layers(self) -> tuple[str, ...]:
        return self.draft.layers

    def start(self, params, inputs, cache_length, target) -> Any:
        return self.draft.start(params, inputs, cache_length, target)

    def propose(self, *args: Any, **kwargs: Any) -> Proposal:
        return self.draft.propose(*args, **kwargs)

    def grow(self, *args: Any, **kwargs: Any) -> Proposal:
        return self.draft.grow(*args, **kwargs)

    def commit(self, params, proposal, accepted, hidden) -> Any:
        return self.draft.commit(params, proposal, jnp.zeros_like(accepted), hidden)


class CostMeter:
    """Times every kind of step of a pair in turn, again and again.

    A machine that slows down slows all kinds alike, and each kind's share of its turn stays the
    same: a cost is the median share of the median turn. So `tick` may also be called between
    measurements of something else.
    """

    def __init__(self, calls: Calls) -> None:
        """Compiles the calls, which come from `timed_calls`."""
        self._calls = calls
        self._seconds: dict[tuple[str, int], list[float]] = {kind: [] for kind in calls}
        self._order = itertools.cycle(self._calls)
        with ThreadPoolExecutor() as pool:  # The programs are compiled in parallel.
            list(pool.map(lambda run: jax.block_until_ready(run()), self._calls.values()))

    def turn(self) -> None:
        """Times each kind once."""
        for _ in self._calls:
            self.tick()

    def tick(self) -> None:
        """Times the next kind once."""
        kind = next(self._order)
        self._seconds[kind].append(elapsed(self._calls[kind]))

    @property
    def turns(self) -> int:
        """The number of times that every kind has been timed."""
        return min(map(len, self._seconds.values()))

    def costs(self) -> Costs:
        """The costs, from all complete turns; there must be one."""
        seconds = np.array(list(zip(*self._seconds.values(), strict=False)))  # [turns, kinds]
        turns = seconds.sum(axis=1, keepdims=True)
        medians = 1e3 * np.median(turns) * np.median(seconds / turns, axis=0)
        ms = dict(zip(self._seconds, medians.tolist(), strict=True))
        gammas = [gamma for name, gamma in ms if name == "step"]
        return Costs(
            ms_prefill_target=ms["prefill target", 0],
            ms_prefill_draft=ms["prefill draft", 0],
            ms_target_step=ms["verify", 0] / ITERATIONS,
            ms_verify={gamma: ms["verify", gamma] / ITERATIONS for gamma in gammas},
            # The measured difference may be negative for a draft that costs almost nothing.
            ms_proposal={
                gamma: max(0.0, ms["step", gamma] - ms["verify", gamma]) / ITERATIONS
                for gamma in gammas
            },
        )


def timed_calls(
    pair: Pair, config: Decoding, gammas: Sequence[int], source: Array, cache_length: int
) -> Calls:
    """The calls to time. Steps start the text of a row with a source [1, S].

    Raises:
        ValueError: a gamma is below 1, or the cache has no room for `ITERATIONS` tokens and a step.
    """
    if min(gammas) < 1:
        raise ValueError(f"Costs are timed for gamma of at least 1, not {min(gammas)}.")
    if cache_length < (needed := ITERATIONS + max(max(gammas) + 2, config.room)):
        raise ValueError(
            f"Timing gamma = {max(gammas)} needs a cache of {needed} positions, not {cache_length}."
        )
    params, draft = pair.params, pair.draft
    config = dataclasses.replace(config, eos_ids=())  # No token ends the row while it is timed.
    autoregressive = dataclasses.replace(config.alone, max_length=cache_length - 2)
    if isinstance(draft, MixedDraft):  # Text that repeats itself would be looked up in every step.
        draft = dataclasses.replace(draft, asks=True)
    models = Models(pair.target, _Rejected(draft))
    prefill_target = functools.partial(
        start_target, pair.target, params.target, source, cache_length, None, pair.draft.layers
    )
    prefill_draft = functools.partial(
        start_draft, pair.draft, params.draft, source, cache_length, prefill_target()
    )
    target = Models(pair.target, None), Params(params.target)
    # Sampling does not matter here: one program serves all drafts and temperatures.
    greedy = dataclasses.replace(autoregressive, sampling=Sampling(0.0))
    alone = begin(*target, source, greedy, cache_length)
    begun = dataclasses.replace(alone, draft=prefill_draft())
    calls: dict[tuple[str, int], Callable[[], Any]] = {
        ("prefill target", 0): prefill_target,
        ("prefill draft", 0): prefill_draft,
        ("verify", 0): functools.partial(_steps, *target, alone, autoregressive),
    }
    for gamma in gammas:
        config = dataclasses.replace(config, gamma=gamma)
        config = dataclasses.replace(config, max_length=cache_length - config.room)
        size = config.vocab_size
        guesses = jax.device_put(np.full((1, config.guesses), size - 1, np.int32))
        if config.growth:  # The shape of a tree costs nothing; this one is a chain with twigs.
            parents = np.minimum(np.arange(config.guesses), gamma - 1)[None].astype(np.int32)
            more: Any = Tree(jax.device_put(parents), jax.device_put(0 * parents), gamma)
        elif config.sampling.greedy or config.rule.keyed_by == "token":
            more = None
        else:
            more = jnp.full((1, gamma, size), 1 / size)
        verifying = Models(pair.target, _FixedGuesses()), Params(params.target, (guesses, more))
        counted = {"by_position": jax.device_put(np.zeros((1, gamma, 1 + config.ranks), np.int32))}
        without, whole = (dataclasses.replace(one, **counted) for one in (alone, begun))
        calls["verify", gamma] = functools.partial(_steps, *verifying, without, config)
        calls["step", gamma] = functools.partial(_steps, models, params, whole, config)
    return calls


@Program
def _steps(models: Models, params: Params, progress: Progress, config: Decoding) -> Progress:
    """Runs decoding steps, each at the position of the first, with the token of the step before."""
    numbers = jax.eval_shape(lambda: config.draws(0, jnp.arange(len(progress.last))))
    draws = jnp.full(numbers.shape, 0.5, numbers.dtype)

    def body(_: Array, progress: Progress) -> Progress:
        after = step(models, params, progress, draws, config)[0]
        rewound = models.target.rewind(after.target, progress.lengths)
        return dataclasses.replace(after, target=rewound, lengths=progress.lengths)

    return lax.fori_loop(0, ITERATIONS, body, progress)
