"""That what is timed is what decoding does, and what is made of the times."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import numpy as np
import pytest
from jax.experimental import io_callback

from speculative.decoding import Decoding
from speculative.decoding.loop import Progress
from speculative.drafts import TransformerDraft
from speculative.measurement import timing
from speculative.measurement.timing import ITERATIONS, CostMeter, Costs
from speculative.models.interface import Chunk
from speculative.sampling import Sampling
from tests import toy
from tests.measurement.pairs import MODEL_DRAFT, SOURCE, toy_pair

CACHE = 64
TURNS = 5


def costs(calls: timing.Calls, turns: int) -> Costs:
    meter = CostMeter(calls)
    for _ in range(turns):
        meter.turn()
    assert meter.turns == turns
    return meter.costs()


def timed(kind: str, gamma: int, sampling: Sampling, table: np.ndarray) -> Progress:
    """What the timed loop of a toy target with that table, and a draft with the same, leaves."""
    pair = toy_pair(MODEL_DRAFT, toy.params(table), table)
    config = Decoding(toy.VOCABULARY, sampling)
    return timing.timed_calls(pair, config, (max(1, gamma),), SOURCE, CACHE)[kind, gamma]()


def test_every_target_step_runs_on_the_result_of_the_last() -> None:
    table = toy.target_table()
    best = table[0, :, : toy.VOCABULARY].argmax(axis=-1)
    last = 0
    for _ in range(ITERATIONS):
        last = best[last]
    progress = timed("verify", 0, Sampling(0.0), table)
    assert int(progress.last[0]) == last
    assert int(progress.target_calls[0]) == ITERATIONS
    assert int(progress.lengths[0]) == 0


def test_every_verification_runs_on_the_result_of_the_last() -> None:
    """All guesses are 3s: none stands after a 0, two of them stand after a 2."""
    guesses, gamma = [toy.VOCABULARY - 1] * 3, 3
    whole = toy.target_table()
    whole[0, 2, 3] = whole[2, 3, 3] = 8.0
    table = whole[..., : toy.VOCABULARY]
    last, accepted = 0, 0
    for _ in range(ITERATIONS):
        seen = [0, last, *guesses]
        choices = [int(table[a, b].argmax()) for a, b in itertools.pairwise(seen)]
        n = next((i for i, guess in enumerate(guesses) if choices[i] != guess), gamma)
        last, accepted = choices[n], accepted + n
    progress = timed("verify", gamma, Sampling(0.0), whole)
    assert int(progress.last[0]) == last
    assert int(progress.target_calls[0]) == ITERATIONS
    assert int(progress.accepted[0]) == accepted == ITERATIONS


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_timed_step_drafts_and_keeps_none_of_it(temperature: float) -> None:
    """Each step leaves the draft one token further, whatever of its guesses would stand."""
    progress = timed("step", 4, Sampling(temperature), toy.target_table())
    assert int(progress.draft.model.lengths[0]) == ITERATIONS
    assert int(progress.accepted[0]) > ITERATIONS
    assert int(progress.lengths[0]) == 0


Seconds = Mapping[tuple[str, int], Callable[[int], float]]
Clock = Callable[[Seconds], tuple[timing.Calls, list[tuple[str, int]]]]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Calls of each kind that take so many seconds, and the order in which they will have run."""

    def made(seconds: Seconds) -> tuple[timing.Calls, list[tuple[str, int]]]:
        now, order = 0.0, []

        def call(kind: tuple[str, int]) -> Callable[[], np.ndarray]:
            def run() -> np.ndarray:
                nonlocal now
                now += seconds[kind](order.count(kind))
                order.append(kind)
                return np.zeros(1)

            return run

        monkeypatch.setattr("time.perf_counter", lambda: now)
        return {kind: call(kind) for kind in seconds}, order

    return made


COSTS = {
    ("prefill target", 0): 0.020,
    ("prefill draft", 0): 0.004,
    ("verify", 0): 0.032,
    ("verify", 3): 0.040,
    ("step", 3): 0.052,
    ("verify", 7): 0.048,
    ("step", 7): 0.072,
}


def test_the_costs_of_a_clock_that_is_known(clock: Clock) -> None:
    """Seconds by kind; one turn of five is slow, which a median does not see."""
    slow = {kind: lambda i, s=s: s * (100 if i == 3 else 1) for kind, s in COSTS.items()}
    calls, order = clock(slow)
    found = costs(calls, TURNS)
    assert found.ms_prefill_target == pytest.approx(20)
    assert found.ms_prefill_draft == pytest.approx(4)
    assert found.ms_target_step == pytest.approx(32 / ITERATIONS)
    assert found.c(3) == pytest.approx(12 / 3 / 32)
    assert found.c(7) == pytest.approx(24 / 7 / 32)
    assert found.ms_draft_step(7) == pytest.approx(24 / 7 / ITERATIONS)
    assert found.verify_cost(3) == pytest.approx(40 / 32)
    assert found.verify_cost(7) == pytest.approx(48 / 32)
    assert sorted(order[: len(COSTS)]) == sorted(COSTS)
    assert order[len(COSTS) :] == list(COSTS) * TURNS


def test_a_machine_that_grows_slower_leaves_every_ratio_as_it_is(clock: Clock) -> None:
    """Each turn takes twice the last; one pause falls into another kind in every turn but one."""
    kinds = list(COSTS)

    def seconds(kind: tuple[str, int]) -> Callable[[int], float]:
        pause = 1 + kinds.index(kind)
        return lambda i: COSTS[kind] * 2**i + (0.001 if i == pause else 0.0)

    calls, _ = clock({kind: seconds(kind) for kind in kinds})
    found = costs(calls, len(kinds) + 1)
    assert found.verify_cost(3) == pytest.approx(40 / 32, rel=1e-2)
    assert found.verify_cost(7) == pytest.approx(48 / 32, rel=1e-2)
    assert found.c(7) == pytest.approx(24 / 7 / 32, rel=3e-2)


@dataclasses.dataclass(frozen=True)
class Ticking(toy.MarkovModel):
    """Each pass takes `base + width * each` seconds of the clock `now`."""

    base: float = 0.0
    each: float = 0.0
    now: ClassVar[list[float]] = [0.0]

    def extend(self, params: Any, state: Any, chunk: Chunk, *more: Any, **named: Any) -> Any:
        def tick() -> np.ndarray:
            self.now[0] += self.base + chunk.tokens.shape[1] * self.each
            return np.zeros((), np.int32)

        nothing = io_callback(tick, jax.ShapeDtypeStruct((), np.int32))
        return super().extend(params, state, Chunk(chunk.tokens + nothing), *more, **named)


@pytest.mark.parametrize(("temperature", "gammas"), [(0.0, (3,)), (1.0, (2, 3))])
def test_each_step_is_timed_with_the_passes_that_it_takes(
    temperature: float, gammas: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token is a target pass of width 1, a verification one of width gamma + 1.

    A proposal is gamma passes of the draft.
    """
    target, draft = Ticking(base=1.0, each=0.25), Ticking(base=0.125)
    params = toy.params(toy.near_table())
    pair = toy_pair(TransformerDraft(draft), params)
    monkeypatch.setattr("time.perf_counter", lambda: Ticking.now[0])
    pair = dataclasses.replace(pair, target=target)
    config = Decoding(toy.VOCABULARY, Sampling(temperature))
    found = costs(timing.timed_calls(pair, config, gammas, SOURCE, CACHE), 1)
    assert found.ms_target_step == pytest.approx(1250)
    assert found.ms_verify == pytest.approx({gamma: 1250 + gamma * 250 for gamma in gammas})
    assert found.ms_proposal == pytest.approx({gamma: gamma * 125 for gamma in gammas})


def test_a_proposal_never_costs_less_than_nothing(clock: Clock) -> None:
    """As rounding may have it for one that is free: 3 ms to verify, 2.9 with its proposal."""
    kinds = [("prefill target", 0), ("prefill draft", 0), ("verify", 0), ("verify", 2), ("step", 2)]
    took = zip(kinds, (1, 1, 2, 3, 2.9), strict=True)
    calls, _ = clock({kind: lambda i, s=s: s for kind, s in took})
    assert costs(calls, 1).c(2) == 0


@pytest.mark.parametrize(
    ("gammas", "cache", "message"),
    [((0, 2), CACHE, "at least 1, not 0"), ((7,), 40, "needs a cache of 41 positions, not 40")],
)
def test_settings_that_cannot_be_timed(gammas: tuple[int, ...], cache: int, message: str) -> None:
    pair, config = toy_pair(MODEL_DRAFT, ()), Decoding(toy.VOCABULARY)
    with pytest.raises(ValueError, match=message):
        timing.timed_calls(pair, config, gammas, SOURCE, cache)
