"""Estimates how often an audit would find a fault, by simulating samplers with known faults.

Each fault is put into our own decoder, which decodes the prompts of the samples. Its texts are
audited, and the excess of each test's G over its degrees of freedom estimates the noncentrality of
its distribution, which grows with the number of texts. The power is that of a noncentral
chi-square distribution (Cohen, Statistical Power Analysis, chapter 7).
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from speculative.decoding import Decoding, rules
from speculative.measurement.goodness import GTest
from speculative.pair import Pair
from speculative.progress import OnProgress
from speculative.sampling import Sampling, categorical, standardise
from speculative.studies.audit import AGREEMENT, FEWEST, SPREAD, Audit, audit
from speculative.studies.samples import Sample
from speculative.studies.verify import decoded

TEXTS = 256  # Simulated for each fault.
ENOUGH = 0.9  # The power for which a number of texts is reported.
SURE = 1.645  # Standard errors by which estimates are lowered: one-sided, 95%.

FROM_TARGET = "correction drawn from p"  # Instead of from the residual.
DROPPED = "draft probability dropped where a guess is tested"  # It counts as 1 there.
IGNORED = "every possible guess accepted"
UNTRUNCATED = "guesses tested without top-k, top-p and min-p"


@dataclasses.dataclass(frozen=True)
class Faulty(rules.Token):
    """Token verification with one of the faults above."""

    fault: str = IGNORED

    def verify(self, guesses, logits, q, sampling, uniforms):
        """See `Rule.verify`."""
        q = jax.nn.one_hot(guesses, logits.shape[-1]) if q is None else q
        of_test, tested, left = sampling, q, rules.with_bonus(q)
        if self.fault == FROM_TARGET:
            left = jnp.zeros_like(left)
        elif self.fault == DROPPED:
            tested = None
        elif self.fault == IGNORED:
            uniforms = uniforms.at[..., rules.ACCEPT].set(0.0)
        elif self.fault == UNTRUNCATED:
            only = sampling.kinds._replace(top_k=False, top_p=False, min_p=False)
            of_test = Sampling.tree_unflatten(only, [sampling.temperature])
        accepted, _ = super().verify(guesses, logits, tested, of_test, uniforms)
        parts = standardise(logits, sampling), left, uniforms[..., rules.CORRECT]
        p, left, uniform = (rules.following(x, accepted) for x in parts)
        return accepted, categorical(rules.residual(p, left), uniform)


class KeyedByPosition(rules.Block):
    """Block verification with random numbers keyed by position, which later steps reuse."""

    keyed_by: ClassVar[Literal["position", "step"]] = "position"


@dataclasses.dataclass(frozen=True)
class Power:
    """The power, against one fault, of an audit of as many texts as were really audited."""

    fault: str  # The sampler's fault.
    power: float  # A lower bound (95% confidence) on the probability that the audit fails.
    test: str  # The test that is most likely to find it.
    texts: int | None  # An upper bound on the texts for a power of `ENOUGH`; None if unknown.


def faults(sampling: Sampling) -> dict[str, tuple[rules.Rule, Sampling]]:
    """The rule and the settings of each faulty sampler, by its fault."""
    names = (FROM_TARGET, DROPPED, IGNORED)
    faulty: dict[str, rules.Rule] = {name: Faulty(fault=name) for name in names}
    faulty["random numbers of block verification keyed by position"] = KeyedByPosition()
    if sampling.truncated:
        faulty[UNTRUNCATED] = Faulty(fault=UNTRUNCATED)
    wrong = {name: (rule, sampling) for name, rule in faulty.items()}
    cooler = dataclasses.replace(sampling, temperature=0.9 * sampling.temperature)
    return wrong | {f"temperature {cooler.temperature:.3g}": (rules.EXACT, cooler)}


def powers(
    pair: Pair,
    samples: Sequence[Sample],
    passed: Audit,
    config: Decoding,
    texts: int = TEXTS,
    on_progress: OnProgress = lambda what, share: None,
    seed: int = 0,
) -> list[Power]:
    """The power, against each of `faults`, of an audit like `passed`, the one of these samples.

    The faulty decoder, otherwise set by `config`, makes about `texts` texts: from all the prompts,
    several times if they are fewer, or from a part of them.
    """
    count = min(len(samples), texts)
    ordered = sorted(samples, key=lambda sample: sample.source)
    chosen = [ordered[i].source for i in np.linspace(0, len(ordered) - 1, count).astype(int)]
    results, wrong = [], faults(config.sampling)
    for number, (name, (rule, own)) in enumerate(wrong.items()):
        on_progress("simulating", number / len(wrong))
        faulty = dataclasses.replace(config, rule=rule, sampling=own)
        made = decoded(pair, chosen * max(1, texts // count), faulty, seed)
        audits = [
            audit(pair, made[at : at + count], config.sampling, passed.false_alarm, seed=seed)
            for at in range(0, len(made), count)
        ]
        results.append(_power(name, audits, passed))
    return results


def _power(fault: str, audits: Sequence[Audit], passed: Audit) -> Power:
    """The power, from audits of a faulty sampler's texts, each as large as `passed` or smaller."""
    share = passed.texts / audits[0].texts
    each = [of_impossible(sum(len(one.impossible) for one in audits), len(audits) / share)]
    level = passed.false_alarm / len(passed.tests)
    for test in passed.tests:
        if same := [other for one in audits for other in one.tests if other.name == test.name]:
            power, times, name = of_test(test, _noncentrality(same) * share, level)
            if name == AGREEMENT:  # With fewer texts it would be left out.
                times = max(times, SPREAD / passed.spread)
            each.append((power, times, name))
    power, times, name = max(each, key=lambda one: (one[0], -one[1]))
    times = max(times, FEWEST / passed.tokens)  # With fewer, an audit is refused.
    return Power(fault, power, name, None if math.isinf(times) else math.ceil(times * passed.texts))


def of_impossible(count: int, audits: float) -> tuple[float, float, str]:
    """The power of finding a token of probability 0, given the `count` found in `audits` audits.

    Also returns the factor by which the number of texts must grow for a power of `ENOUGH`, and the
    test's name. The count is taken as a Poisson variable.
    """
    from scipy import stats

    rate = float(stats.chi2.ppf(stats.norm.sf(SURE), 2 * count)) / 2 / audits if count else 0.0
    times = -math.log(1 - ENOUGH) / rate if rate else math.inf
    return -math.expm1(-rate), times, "tokens of probability 0"


def of_test(test: GTest, noncentrality: float, level: float) -> tuple[float, float, str]:
    """Like `of_impossible`, for a test at `level` whose G has the fault's `noncentrality`."""
    from scipy import optimize, stats

    degrees = test.degrees or 1
    critical = stats.ncx2.isf(level, degrees, test.allowed)

    def beyond(excess: float) -> float:
        # Far from the critical value, scipy's series does not end.
        far = excess + degrees - critical > 12 * math.sqrt(2 * degrees + 4 * excess)
        return 1.0 if far else float(stats.ncx2.sf(critical, degrees, excess))

    times = math.inf
    if noncentrality:
        enough: Any = optimize.brentq(lambda x: beyond(x) - ENOUGH, 0, 10 * critical + 1000)
        times = enough / noncentrality
    return beyond(noncentrality), times, test.name


def _noncentrality(tests: Sequence[GTest]) -> float:
    """The noncentrality of G in equal experiments, minus `SURE` standard errors, but at least 0.

    G's mean is its degrees of freedom plus this, its variance twice the degrees plus 4 times this.
    """
    degrees = np.mean([test.degrees or 1 for test in tests])
    excess = np.mean([test.statistic or 0.0 for test in tests]) - degrees
    error = math.sqrt((2 * degrees + 4 * max(0.0, excess)) / len(tests))
    return max(0.0, float(excess - SURE * error))
