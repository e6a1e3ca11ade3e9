"""Proof, for any pair and task, that speculative outputs are the target's own.

At temperature 0 greedy outputs are compared example by example. At other temperatures two tests
look at what was sampled; both know the target's exact distribution and neither the draft's:

- first tokens: for many prompts, counts of the first token of independent generations against
  its probabilities (a G-test);
- whole texts: the place of each token in the target's cumulative distribution after the text so
  far, with a uniform number inside its share, is uniform and independent of all others if and
  only if every token is drawn from the target (Rosenblatt's transform); counts in twenty equal
  cells are compared with equal ones.
"""

import dataclasses
import json
import pathlib

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from speculative.decoding import random_draws
from speculative.experiments.tuning import OnProgress
from speculative.experiments.workload import Workload
from speculative.measurement import forcing
from speculative.measurement.exactness import Difference, compare_greedy
from speculative.measurement.independence import EXPECTED, chi_square_tail, likelihood_ratio
from speculative.sampling import standardise

CELLS = 20
BATCH = 128
"""First tokens that are drawn at a time, where there is room for so many rows."""


@dataclasses.dataclass(frozen=True)
class GTest:
    """Counts against what was expected.

    Attributes:
        name: of what was tested.
        count: how many draws.
        statistic: G = 2 sum O ln(O / E); None is infinite, for a token that cannot be was drawn.
        degrees: of freedom.
        p_value: the chance of such a G, or a larger one, from an exact decoder.
    """

    name: str
    count: int
    statistic: float | None
    degrees: int
    p_value: float


@dataclasses.dataclass(frozen=True)
class Certificate:
    """What was checked, and whether it holds.

    Attributes:
        config: the effective configuration.
        gamma: guesses a step.
        examples: how many prompts.
        identical: greedy outputs that are equal; None at other temperatures.
        differences: where the others part.
        tests: of what was sampled; none at temperature 0.
        false_alarm: the chance that `passed` is false of an exact decoder's samples.
    """

    config: str
    gamma: int
    examples: int
    identical: int | None
    differences: dict[int, Difference]
    tests: list[GTest]
    false_alarm: float

    @property
    def passed(self) -> bool:
        """Whether every difference is a near tie, and no test alarms.

        The tests share the false-alarm rate evenly (Bonferroni), so that together they keep it.
        """
        level = self.false_alarm / max(1, len(self.tests))
        return all(difference.near_tie for difference in self.differences.values()) and all(
            test.p_value >= level for test in self.tests
        )

    def verdict(self) -> str:
        """One line."""
        word = "EXACT" if self.passed else "NOT EXACT"
        if self.identical is not None:
            ties = len(self.differences)
            rest = f", {ties} part at a near tie" if ties and self.passed else ""
            if not self.passed:
                rest = ", the others part where no rounding explains it"
            return f"{word}: {self.identical} of {self.examples} greedy outputs are equal{rest}."
        values = ", ".join(f"{test.name} p = {test.p_value:.3g}" for test in self.tests)
        return (
            f"{word}: {values}; an exact decoder is refused with a chance of {self.false_alarm:g}."
        )

    def save(self, path: pathlib.Path) -> None:
        """Writes everything as JSON."""
        fields = dataclasses.asdict(self) | {"passed": self.passed, "verdict": self.verdict()}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(fields, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: pathlib.Path) -> "Certificate":
        """The certificate that `save` wrote; its verdict is worked out anew.

        Raises:
            ValueError: the file holds none.
        """
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            differences = {int(k): Difference(**v) for k, v in fields["differences"].items()}
            tests = [GTest(**test) for test in fields["tests"]]
            own = {field.name: fields[field.name] for field in dataclasses.fields(cls)}
            return cls(**(own | {"differences": differences, "tests": tests}))
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise ValueError(f"{path} is no certificate: {error!r}") from error


def certify(
    work: Workload,
    gamma: int,
    samples: int,
    batch: int,
    false_alarm: float,
    on_progress: OnProgress,
) -> Certificate:
    """Checks all prompts of a workload.

    Args:
        work: pair, settings and texts.
        gamma: guesses a step.
        samples: first tokens drawn for each prompt.
        batch: how many of them are drawn at a time.
        false_alarm: the chance with which an exact decoder may be refused.
        on_progress: told what is being done.

    Raises:
        ValueError: logits are not finite.
    """
    count = len(work.sources)
    differences: dict[int, Difference] = {}
    texts: list[list[int]] = []
    for number, source in enumerate(work.sources):
        guessed = work.pair.result(work.decode(number, gamma)[0]).tokens
        texts.append(guessed)
        if work.config.sampling.greedy:
            plain = work.pair.result(work.decode(number, 0)[0]).tokens
            difference = compare_greedy(work.pair, source, plain, guessed, work.dtype)
            if difference is not None:
                differences[number] = difference
        on_progress("texts", (number + 1) / count)
    identical, tests = None, []
    if work.config.sampling.greedy:
        identical = count - len(differences)
    else:
        tests = [
            _first_tokens(work, gamma, samples, batch, on_progress),
            _whole_texts(work, texts),
        ]
    return Certificate(work.config.gin(), gamma, count, identical, differences, tests, false_alarm)


def _first_tokens(
    work: Workload, gamma: int, samples: int, batch: int, on_progress: OnProgress
) -> GTest:
    """The G-test of first tokens, summed over the prompts."""
    statistic, degrees, size = 0.0, 0, work.pair.vocabulary.size
    config = dataclasses.replace(work.decoding(gamma), max_length=1)
    rounds = -(-samples // batch)
    for number, source in enumerate(work.sources):
        observed = np.zeros(size)
        for turn in range(rounds):
            # Numbers that no text of the workload uses.
            examples = np.arange(batch) + batch * (turn + rounds * (number + 1)) + 2**20
            draws = random_draws(work.config.seed, examples, config.capacity)
            output = work.pair.run(jnp.repeat(source, batch, axis=0), draws, config)
            observed += np.bincount(np.asarray(output.tokens)[:, 0], minlength=size)
        p = _probabilities(work, number, [0])[0]
        g, d = g_statistic(observed, p * observed.sum())
        statistic, degrees = statistic + g, degrees + d
        on_progress("first tokens", (number + 1) / len(work.sources))
    count = rounds * batch * len(work.sources)
    return _g_test("first tokens", count, statistic, degrees)


def _whole_texts(work: Workload, texts: list[list[int]]) -> GTest:
    """The test of every token's place in the target's cumulative distribution."""
    rng = np.random.default_rng(work.config.seed)
    places = []
    for number, text in enumerate(texts):
        p = _probabilities(work, number, text)
        at = np.arange(len(text))
        below = np.where(np.arange(p.shape[1]) < np.array(text)[:, None], p, 0).sum(axis=1)
        places.append(below + rng.random(len(text)) * p[at, text])
    flat = np.concatenate(places)
    cells = np.minimum((flat * CELLS).astype(int), CELLS - 1)
    observed = np.bincount(cells, minlength=CELLS).astype(float)
    statistic, degrees = g_statistic(observed, np.full(CELLS, len(flat) / CELLS))
    return _g_test("whole texts", len(flat), statistic, degrees)


def _probabilities(work: Workload, number: int, text: list[int]) -> NDArray[np.float64]:
    """The target's distribution [length, V] at each token of a text."""
    row = forcing.padded(text, work.config.max_length)
    params = work.pair.params.target
    logits = forcing.logits(work.pair.target, params, work.sources[number], row)
    p = standardise(logits[0, : len(text), : work.pair.vocabulary.size], work.config.sampling)
    p = np.asarray(p, np.float64)
    return p / p.sum(axis=1, keepdims=True)


def _g_test(name: str, count: int, statistic: float, degrees: int) -> GTest:
    if not np.isfinite(statistic):
        return GTest(name, count, None, degrees, 0.0)
    return GTest(name, count, statistic, degrees, chi_square_tail(statistic, degrees or 1))


def g_statistic(observed: NDArray[np.float64], expected: NDArray[np.float64]) -> tuple[float, int]:
    """G and its degrees of freedom; cells of which few are expected are taken together.

    G is divided by Williams' correction, which takes its mean to that of its law: summed over
    hundreds of prompts the excess of a few percent would count for a difference. A token that
    cannot be but was drawn makes G infinite.
    """
    if observed[expected == 0].any():
        return np.inf, 1
    order = np.argsort(-expected)
    observed, expected = observed[order], expected[order]
    own = int((expected >= EXPECTED).sum())
    observed = np.append(observed[:own], observed[own:].sum())
    expected = np.append(expected[:own], expected[own:].sum())
    if expected[-1] < EXPECTED and len(expected) > 1:  # Too few even together: into the last cell.
        observed = np.append(observed[:-2], observed[-2:].sum())
        expected = np.append(expected[:-2], expected[-2:].sum())
    degrees = len(expected) - 1
    if degrees == 0:
        return 0.0, 0
    count = expected.sum()
    correction = 1 + ((count / expected).sum() - 1) / (6 * count * degrees)
    return likelihood_ratio(observed, expected) / correction, degrees
