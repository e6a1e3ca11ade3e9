"""A statistical test, for any pair and task, that speculative outputs are the target's own.

At temperature 0 greedy outputs are compared. At others two tests look at samples:
first tokens of many generations against the target's probabilities, and whole texts by the
randomised probability integral transform (PIT) of each token.
"""

import dataclasses
import json
import pathlib

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from speculative import disk
from speculative.measurement import teacher_forced
from speculative.measurement.exactness import Difference, compare_greedy
from speculative.measurement.goodness import GTest, g_statistic, g_test, of_tokens
from speculative.progress import OnProgress
from speculative.rows.workload import Workload
from speculative.sampling import standardise

BATCH = 128  # First tokens that are drawn at a time, where there is room for so many rows.


@dataclasses.dataclass(frozen=True)
class Certificate:
    """What was checked of `examples` prompts, with `gamma` guesses a step, and whether it holds.

    Attributes:
        config: the effective configuration.
        identical: greedy outputs that are equal; None at other temperatures.
        differences: of the other greedy outputs, by the number of the prompt.
        tests: of what was sampled; none at temperature 0.
        false_alarm: the probability that `passed` is false for an exact decoder's samples.
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
        """Whether every difference is a near tie, and no statistical test fails.

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
            rest = f", {ties} part at a near tie" if ties else ""
            if not self.passed:
                rest = ", the others part where no rounding explains it"
            return f"{word}: {self.identical} of {self.examples} greedy outputs are equal{rest}."
        tests = ", ".join(f"{test.name} p = {test.p_value:.3g}" for test in self.tests)
        return f"{word}: {tests}; an exact decoder fails with probability {self.false_alarm:g}."

    def save(self, path: pathlib.Path) -> None:
        """Writes everything as JSON."""
        fields = dataclasses.asdict(self) | {"passed": self.passed, "verdict": self.verdict()}
        disk.write(path, json.dumps(fields, indent=1, ensure_ascii=False) + "\n")

    @classmethod
    def read(cls, path: pathlib.Path) -> "Certificate":
        """The certificate that `save` wrote; raises ValueError if the file holds none."""
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            differences = {int(k): Difference(**v) for k, v in fields["differences"].items()}
            tests = [GTest(**test) for test in fields["tests"]]
            own = {field.name: fields[field.name] for field in dataclasses.fields(cls)}
            return cls(**(own | {"differences": differences, "tests": tests}))
        except (TypeError, KeyError, AttributeError, RecursionError, ValueError) as error:
            raise ValueError(f"{path} is no certificate: {error!r}") from error


def certify(
    work: Workload,
    gamma: int,
    samples: int,
    batch: int,
    false_alarm: float,
    on_progress: OnProgress,
) -> Certificate:
    """Checks all prompts of a workload, with `samples` first tokens of each, `batch` at a time.

    An exact decoder fails with probability `false_alarm`. Raises ValueError if logits are not
    finite.
    """
    pair, greedy, count = work.pair, work.config.sampling.greedy, len(work.sources)
    differences: dict[int, Difference] = {}
    texts: list[list[int]] = []
    for number in range(count):
        on_progress("decoding", number / count)
        texts.append(pair.results(work.decode(number, gamma)[0])[0].tokens)
        if greedy:
            autoregressive = pair.results(work.decode(number, 0)[0])[0].tokens
            source = work.source(number)
            if found := compare_greedy(pair, source, autoregressive, texts[-1], work.dtype):
                differences[number] = found
    tests, identical = [], count - len(differences)
    if not greedy:
        first = _first_tokens(work, gamma, samples, batch, on_progress)
        tests, identical = [first, _whole_texts(work, texts, on_progress)], None
    return Certificate(work.config.gin(), gamma, count, identical, differences, tests, false_alarm)


def _first_tokens(
    work: Workload, gamma: int, samples: int, batch: int, on_progress: OnProgress
) -> GTest:
    """The G-test of the first tokens of independent generations, summed over the prompts."""
    statistic, degrees, size, prompts = 0.0, 0, work.pair.vocabulary.size, len(work.sources)
    config = dataclasses.replace(work.decoding(gamma), max_length=1)
    rounds = -(-samples // batch)
    for number in range(prompts):
        on_progress("first tokens", number / prompts)
        observed = np.zeros(size)
        for turn in range(rounds):
            # Numbers of examples that no text of the workload has.
            examples = np.arange(batch) + batch * (turn + rounds * (number + 1)) + 2**20
            draws = config.draws(work.config.seed, examples)
            output = work.pair.run(jnp.repeat(work.source(number), batch, axis=0), draws, config)
            observed += np.bincount(np.asarray(output.tokens)[:, 0], minlength=size)
        p = _probabilities(work, number, [0])[0]
        g, d = g_statistic(observed, p * observed.sum())
        statistic, degrees = statistic + g, degrees + d
    return g_test("first tokens", rounds * batch * prompts, statistic, degrees)


def _whole_texts(work: Workload, texts: list[list[int]], on_progress: OnProgress) -> GTest:
    """The G-test of every token's randomised PIT, by counts in cells of equal width.

    The PIT is a uniform number from the token's interval in the target's cumulative distribution
    after the text so far. All are uniform and independent if and only if every token is drawn from
    the target (Rosenblatt's transform).
    """
    rng = np.random.default_rng(work.config.seed)
    transformed = []
    for number, text in enumerate(texts):
        on_progress("whole texts", number / len(texts))
        p = _probabilities(work, number, text)
        below = np.where(np.arange(p.shape[1]) < np.array(text)[:, None], p, 0).sum(axis=1)
        transformed.append(below + rng.random(len(text)) * p[np.arange(len(text)), text])
    return of_tokens("whole texts", transformed)


def _probabilities(work: Workload, number: int, text: list[int]) -> NDArray[np.float64]:
    """The target's distribution [length, V] at each token of a text."""
    pair, row = work.pair, teacher_forced.padded(text, work.config.max_length)
    logits = teacher_forced.logits(pair.target, pair.params.target, work.source(number), row)
    p = standardise(logits[0, :, : pair.vocabulary.size], work.config.sampling)
    p = np.asarray(p, np.float64)[: len(text)]  # Cut here: each length would be compiled for.
    return p / p.sum(axis=1, keepdims=True)
