"""An adaptive gamma beside every fixed one, on the same texts, in one run."""

import dataclasses
import json
import math
import statistics
from collections import defaultdict
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from speculative import theory
from speculative.decoding import Adaptive, Output
from speculative.experiments import environment
from speculative.experiments.settings import RowConfig
from speculative.experiments.tuning import OnProgress
from speculative.experiments.workload import Workload
from speculative.measurement.timing import typical
from speculative.pair import Result

GAMMAS: tuple[int, ...] = (1, 3, 5, 7)
"""Fixed numbers of guesses, and those that the adaptive one picks from."""

SAMPLES = 4
"""Of each text, for ways that write other texts differ by chance. A text that is always the same is
timed so many times as often instead."""

COPIES = 8
"""Of every program, each for its part of the texts: of two copies of one program, one is often
faster by 2%, by where it lies in memory."""

TURNS = 48
"""Of timing steps with each copy, each on a text. All turns so far are what the adaptive gamma is
told, so that their noise is its own."""


@dataclasses.dataclass
class Timed:
    """One way of decoding all texts.

    Attributes:
        seconds: of all texts, prefill included.
        tokens: decoded.
        calls: passes of the target.
        tested: guesses tested.
        accepted: guesses accepted.
    """

    seconds: float = 0.0
    tokens: int = 0
    calls: int = 0
    tested: int = 0
    accepted: int = 0

    def add(self, result: Result) -> None:
        """Counts what a text took."""
        self.tokens += len(result.tokens)
        self.calls += result.target_calls
        self.tested += result.tested
        self.accepted += result.accepted

    @property
    def tokens_per_call(self) -> float:
        """What Equation 1 of the paper expects."""
        return self.tokens / self.calls


@dataclasses.dataclass(frozen=True)
class Adaptation:
    """The same texts decoded with fixed gammas and with an adaptive one.

    Attributes:
        config: the row's.
        told: by gamma, seconds of a step of the adaptive program.
        texts: how many, all samples counted.
        prefill: seconds of a text, of target and draft together.
        fixed: by gamma.
        adaptive: with the gamma that was picked.
    """

    config: RowConfig
    told: dict[int, float]
    texts: int
    prefill: float
    fixed: dict[int, Timed]
    adaptive: Timed

    def ms_per_token(self, timed: Timed) -> float:
        """Milliseconds a token of a text of the same length for all ways, prefill included.

        At temperatures above 0 each way writes other texts, over whose tokens the prefill, which
        no gamma changes, would spread by chance.
        """
        ways = [*self.fixed.values(), self.adaptive]
        length = sum(way.tokens for way in ways) / len(ways) / self.texts
        stepping = timed.seconds - self.texts * self.prefill
        return 1e3 * (self.prefill / length + stepping / timed.tokens)

    @property
    def best(self) -> int:
        """The fixed gamma of the least time a token, known only afterwards."""
        return min(self.fixed, key=lambda gamma: self.ms_per_token(self.fixed[gamma]))

    @property
    def ratio(self) -> float:
        """How many times as fast as the best fixed gamma the adaptive one is."""
        return self.ms_per_token(self.fixed[self.best]) / self.ms_per_token(self.adaptive)

    @property
    def oracle_tokens(self) -> float:
        """Tokens a target pass if the gamma of each step were known beforehand (section 3.5)."""
        return theory.oracle_tokens(self.adaptive.accepted / self.adaptive.tested)

    def to_json(self) -> str:
        """One line of JSON, with machine, commit and settings."""
        ways: dict[str, Timed] = {str(gamma): timed for gamma, timed in self.fixed.items()}
        fields: dict[str, Any] = {
            name: getattr(self.config, name) for name in ("task", "target", "draft", "temperature")
        }
        fields |= {
            "ways": {
                name: dataclasses.asdict(timed) | {"ms_per_token": self.ms_per_token(timed)}
                for name, timed in (ways | {"adaptive": self.adaptive}).items()
            },
            "told": self.told,
            "prefill": self.prefill,
            "best_fixed": self.best,
            "ratio": self.ratio,
            "oracle_tokens": self.oracle_tokens,
            "commit": environment.commit(),
            "device": environment.device(),
            "gin": self.config.gin(),
        }
        return json.dumps(fields, ensure_ascii=False)


def adapt(work: Workload, on_progress: OnProgress) -> Adaptation:
    """Decodes every text with each fixed gamma and with the adaptive one, taking turns.

    The adaptive one is told the costs of its steps, as measured so far; of acceptance it knows
    nothing but what it counts itself, from text to text.

    Raises:
        ValueError: logits are not finite.
    """
    config, count = work.config, len(work.sources)
    timed = [Timed() for _ in range(len(GAMMAS) + 1)]
    seconds: dict[tuple[int, ...], list[float]] = defaultdict(list)
    texts = SAMPLES * count
    copies = min(COPIES, texts)
    prefills, turns, counts = [], [], None
    for copy in range(copies):
        jax.clear_caches()
        prefill, timings = _timed_steps(work, copy)
        prefills.append(prefill)
        turns += timings
        ways: list[int | Adaptive] = [*GAMMAS, Adaptive(GAMMAS, tuple(typical(turns)))]
        for way in ways:  # Compiled before they are timed: a machine is slower just after that.
            _settled(work, 0, way, 0, counts)
        for done in range(copy * texts // copies, (copy + 1) * texts // copies):
            sample, number = divmod(done, count)
            text = (number,) if config.sampling.greedy else (number, sample)
            outputs = {}
            for again in range(config.rounds):
                order = np.random.default_rng((config.seed, done, again))
                for place in order.permutation(len(ways)):
                    outputs[place], took = _settled(work, number, ways[place], sample, counts)
                    seconds[place, *text].append(took)
            for place, total in enumerate(timed):
                total.add(work.pair.result(outputs[place]))
            counts = outputs[len(GAMMAS)].counts
            on_progress("examples", (done + 1) / texts)
    for (place, *_), timings in seconds.items():
        timed[place].seconds += statistics.median(timings) * len(timings) / config.rounds
    told = dict(zip(GAMMAS, typical(turns), strict=True))
    fixed = dict(zip(GAMMAS, timed, strict=False))
    return Adaptation(config, told, texts, statistics.median(prefills), fixed, timed[-1])


def _timed_steps(work: Workload, copy: int) -> tuple[float, list[list[float]]]:
    """The seconds of a prefill, and `TURNS` times those of a step with each of `GAMMAS`.

    Of the adaptive program's own steps, kept to one gamma by infinite costs of the others.
    """
    ways = [
        Adaptive(GAMMAS, tuple(1.0 if other == gamma else math.inf for other in GAMMAS))
        for gamma in GAMMAS
    ]
    # Compiled before they are timed, and checked before the long work.
    work.prefill(0, max(GAMMAS))
    work.pair.result(work.decode(0, ways[0])[0])
    numbers = [turn % len(work.sources) for turn in range(copy * TURNS, (copy + 1) * TURNS)]
    prefill = statistics.median(work.prefill(number, max(GAMMAS)) for number in numbers)
    turns = []
    for turn, number in enumerate(numbers):
        seconds = [0.0] * len(GAMMAS)
        order = np.random.default_rng((work.config.seed, copy, turn))
        for place in order.permutation(len(GAMMAS)):
            output, took = work.decode(number, ways[place])
            seconds[place] = (took - prefill) / int(output.target_calls[0])
        turns.append(seconds)
    return prefill, turns


def _settled(
    work: Workload, number: int, gamma: int | Adaptive, sample: int, counts: jax.Array | None
) -> tuple[Output, float]:
    """Decodes a source as whoever keeps to one way of decoding would, and gives the seconds.

    It is decoded twice and timed once: the first time pays for the change from another way, whose
    memory and whose threads were others, the adaptive one's most of all.
    """
    given = None if isinstance(gamma, int) else counts
    work.decode(number, gamma, sample, counts=given)
    return work.decode(number, gamma, sample, counts=given)


def show(found: Adaptation, console: Console) -> None:
    """Prints each way's time, and how the adaptive one stands beside the best fixed one."""
    config = found.config
    shown = Table(
        title=f"{config.task}, {config.draft}, T = {config.temperature:g}", box=None, pad_edge=False
    )
    for head in ("γ", "told ms/step", "tokens/call", "ms/token", "best fixed is 1"):
        shown.add_column(head, justify="right")
    least = found.ms_per_token(found.fixed[found.best])
    ways = {
        str(gamma): (f"{1e3 * found.told[gamma]:.3f}", timed)
        for gamma, timed in found.fixed.items()
    }
    for name, (cost, timed) in (ways | {"adaptive": ("", found.adaptive)}).items():
        ms = found.ms_per_token(timed)
        cells = [f"{timed.tokens_per_call:.2f}", f"{ms:.3f}", f"{least / ms:.3f}"]
        shown.add_row(name, cost, *cells, style="bold" if name == "adaptive" else None)
    console.print(shown)
    console.print(
        f"An oracle's gamma would yield {found.oracle_tokens:.2f} tokens a target pass "
        "(section 3.5).",
        highlight=False,
    )
