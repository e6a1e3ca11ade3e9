"""Tests whether samples from any program are a target's own: `speculative audit`.

The program is not run: its samples come from a file, one text per line, and the target scores them.
At temperature 0 every token must be the target's argmax, except for near ties. Above it, tests look
at first tokens, every token, pairs of neighbours, the likelihood, and the agreement with a draft:
see docs/audit.md.
"""

import dataclasses
import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from speculative.decoding import Params
from speculative.decoding.loop import Models
from speculative.decoding.programs import Program
from speculative.drafts.base import Proposal
from speculative.drafts.uniform import UniformDraft
from speculative.grouping import batches, filled, padded
from speculative.measurement import alpha, goodness, teacher_forced
from speculative.measurement.exactness import rounding
from speculative.measurement.goodness import GTest
from speculative.pair import Pair
from speculative.progress import OnProgress
from speculative.ragged import power_of_two
from speculative.sampling import Sampling, standardise
from speculative.studies.samples import Sample
from speculative.types import Inputs, Rows, State, Tokens

FEWEST = goodness.EXPECTED * goodness.PAIR_CELLS**2 * 2
"""The least number of tokens for which each cell of pairs is expected often enough."""

BEGINNING = 3  # First tokens of a text that are tested together, if a prompt has many samples.
ROWS = 64  # The most texts that are scored at a time.
NUMBERS = 2**24  # The most probabilities that are computed at a time: 64 MiB of float32.

CERTAIN = 1e-4  # Nats: a standard deviation of -ln p that float32 cannot resolve.

AGREEMENT = "agreement with the draft"  # A test's name.
SPREAD = 25.0
"""The least variance of the agreement with the draft, over all tokens, for a normal approximation.

A count of rare tokens with this variance exceeds the level of its test 2.3 times as often.
"""

WIDEST = "bfloat16"
"""The coarsest number format whose rounding may explain differences of log-probabilities."""


@dataclasses.dataclass(frozen=True)
class Unexplained:
    """A program's log-probability that rounding does not explain."""

    text: int  # The number of the text and the position of the token, from 1.
    position: int
    given: float | None  # The program's; None if not finite, which an emitted token's always is.
    target: float  # The target's own, in nats like `given`.
    allowed: float  # The largest difference that rounding explains.

    def __str__(self) -> str:
        where = f"token {self.position} of text {self.text}"
        if self.given is None:
            return f"that of {where} is not finite"
        return (
            f"that of {where} is {self.given:.4g}, the target's {self.target:.4g}, and rounding "
            f"explains {self.allowed:.2g}"
        )


@dataclasses.dataclass(frozen=True)
class Audit:
    """The findings in the samples of a program."""

    texts: int
    prompts: int
    tokens: int
    edges: int  # Tokens not tested: rounding decides whether top-k, top-p or min-p keeps them.
    # Numbers of texts and positions, from 1, of tokens that the target never emits; at temperature
    # 0, of tokens that are not the argmax.
    impossible: list[tuple[int, int]]
    unexplained: list[Unexplained]  # Log-probabilities that are not the target's, even rounded.
    near_ties: int | None  # At temperature 0, tokens that are not the argmax only by rounding.
    tests: list[GTest]  # The tests of sampled tokens; none at temperature 0.
    largest_difference: float | None  # Between the program's log-probabilities and the target's.
    false_alarm: float  # The probability that `passed` is false for samples of the target.
    spread: float = 0.0  # The variance of the agreement with the draft, summed over the tokens.

    @property
    def passed(self) -> bool:
        """Whether no token is impossible, nothing is unexplained, no test fails (Bonferroni)."""
        level = self.false_alarm / max(1, len(self.tests))
        sampled = all(test.p_value >= level for test in self.tests)
        return sampled and not self.impossible and not self.unexplained

    def verdict(self) -> str:
        """The findings in a sentence or two, which begin with PASSED or FAILED."""
        plural, greedy = "s" * (self.prompts > 1), self.near_ties is not None
        findings = f"{self.texts} texts of {self.prompts} prompt{plural}, {self.tokens} tokens; "
        if self.impossible:
            text, position = self.impossible[0]
            what = "are not the argmax" if greedy else "have probability 0"
            findings += (
                f"{len(self.impossible)} of them {what}, first token {position} of text {text}"
            )
            findings += "; " if greedy else "."
        if greedy:
            findings += f"{self.near_ties} of them differ from the argmax by a near tie."
        elif not self.impossible:
            findings += ", ".join(f"{test.name} p = {test.p_value:.3g}" for test in self.tests)
            findings += f". The target's own samples fail with probability {self.false_alarm:g}."
            if self.largest_difference is not None and not self.unexplained:
                findings += (
                    " The program's log-probabilities differ from the target's by up to "
                    f"{self.largest_difference:.2g}, which the tests allow for."
                )
            if self.edges:
                findings += f" {self.edges} tokens at the edge of top-k or top-p were left out."
        if self.unexplained:
            findings += (
                f" {len(self.unexplained)} of the program's log-probabilities are not those of "
                f"the target with these settings, in {WIDEST} or a finer format: "
                f"{self.unexplained[0]}; give those of the distribution that was sampled, or none."
            )
        return f"{'PASSED' if self.passed else 'FAILED'}: {findings}"

    def fields(self) -> dict[str, Any]:
        """The fields that `--json` prints."""
        return dataclasses.asdict(self) | {"passed": self.passed, "verdict": self.verdict()}


class _Scores(NamedTuple):
    """For each token [B, L], properties of the target's distribution that the tests need."""

    below: Array  # The probability of all tokens that are likelier, or as likely and before it.
    own: Array  # The token's probability.
    entropy: Array  # The distribution's, in nats.
    variance: Array  # The variance of -ln p.
    near: Array  # Whether, up to rounding, it is the best or kept by top-k, top-p and min-p.
    near_widest: Array  # The same, up to the rounding of `WIDEST`.
    radius: Array  # The most by which the rounding of `WIDEST` changes a log-probability.
    edge: Array  # The part of `radius` from tokens that rounding adds to or takes from those kept.
    agreement: Array  # How much more the token agrees with the draft than expected: `_agreements`.
    agreement_variance: Array
    first: Array  # [B, V] the distribution of the first token.


@functools.partial(Program, static=1)
def _score(
    models: Models,
    params: Params,
    source: Inputs,
    rows: Rows,
    tokens: Tokens,
    sampling: Sampling,
    relative: tuple[float, ...],
    vocab_size: int,
) -> _Scores:
    """Scores texts [B, L], given the row [B] of each one's source [U, S].

    `relative` is the `rounding` of logits of magnitude 1 in the target's dtype and in `WIDEST`.
    """
    layers = models.draft.layers if models.draft else ()
    forced = models.target, params.target, source, tokens, layers, rows
    begun, scored = teacher_forced.score(*forced)
    logits = scored.logits[..., :vocab_size]
    p, chosen = standardise(logits, sampling), tokens[..., None]
    own = jnp.take_along_axis(p, chosen, axis=-1)[..., 0]
    ties = (p == own[..., None]) & (jnp.arange(vocab_size) < chosen)
    below = jnp.where((p > own[..., None]) | ties, p, 0.0).sum(axis=-1)
    surprise = jnp.where(p > 0, -jnp.log(jnp.where(p > 0, p, 1.0)), 0.0)
    entropy = (p * surprise).sum(axis=-1)
    variance = (p * (surprise - entropy[..., None]) ** 2).sum(axis=-1)
    largest = jnp.abs(jnp.where(jnp.isfinite(logits), logits, 0.0)).max(axis=-1)
    finest, widest = (largest * part for part in relative)
    own_logit = jnp.take_along_axis(logits, chosen, axis=-1)
    near, near_widest = (
        (own_logit >= _least_kept(logits, sampling, radius))[..., 0] for radius in (finest, widest)
    )
    edge = jnp.zeros_like(own)
    if sampling.truncated:
        # `most` keeps all tokens that rounding can add, `least` only those it cannot take away.
        most, least = (
            logits >= _least_kept(logits, sampling, radius) for radius in (widest, -widest)
        )
        least |= jnp.arange(vocab_size) == chosen
        edge = jnp.subtract(*(
            jax.nn.logsumexp(logits / sampling.temperature, axis=-1, where=kept)
            for kept in (most | least, least)
        ))  # fmt: skip
    radius = edge if sampling.greedy else widest / sampling.temperature + edge
    agreement = agreement_variance = jnp.zeros_like(own)
    if models.draft:
        read = alpha.Read(begun, scored.logits, scored.hidden)
        found = _agreements(models, params, source, rows, tokens, read, p, sampling)
        agreement, agreement_variance = found
    of_target = below, own, entropy, variance, near, near_widest, radius, edge
    return _Scores(*of_target, agreement, agreement_variance, p[:, 0])


def _agreements(
    models: Models,
    params: Params,
    source: Inputs,
    rows: Rows,
    tokens: Tokens,
    read: alpha.Read,
    p: Array,
    sampling: Sampling,
) -> Array:
    """How each of tokens [B, L] agrees with the draft, given p [B, L, V]: [2, B, L].

    The first row is w(x) = min(1, q(x) / p(x)) of the token x less its mean under p, which is the
    acceptance rate beta; the second is the variance of w. A sampler that replaces a rejected guess
    by a token from p, in place of one from the residual, draws x with probability
    p(x) (1 + w(x) - beta), so for small differences no other statistic of x shows it sooner
    (by the lemma of Neyman and Pearson).
    """
    draft, vocab_size, uniforms = models.draft, p.shape[-1], jnp.zeros((len(tokens), 1))
    assert draft is not None, "texts agree with a draft"

    def look(state: State, last: Rows, here: tuple[Array, Rows]) -> tuple[Proposal, Array]:
        own, token = here
        proposal = draft.propose(params.draft, state, last, uniforms, sampling, vocab_size)
        q = proposal.probabilities(vocab_size)[:, 0]
        agreement = jnp.minimum(1.0, q / jnp.where(own > 0, own, 1.0))
        excess = agreement - (own * agreement).sum(axis=-1, keepdims=True)
        at_token = jnp.take_along_axis(excess, token[:, None], axis=-1)[:, 0]
        return proposal, jnp.stack([at_token, (own * excess**2).sum(axis=-1)], axis=-1)

    return alpha.at_each(models, params, source, tokens, read, look, (p, tokens), rows=rows)


def _least_kept(logits: Array, sampling: Sampling, radius: Array) -> Array:
    """The least logit [..., 1] with which a token is kept, of logits [..., V].

    Rounding changes the difference of two logits by `radius` [...] at most, in the token's favour
    or, if negative, to its disadvantage. A ratio of two probabilities, and so the odds of a set of
    tokens, then change by exp(radius / temperature) at most.
    """
    rows, radius = logits.reshape(-1, logits.shape[-1]), radius.reshape(-1)
    values, kinds = (
        [sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p],
        sampling.kinds,
    )
    change = radius if sampling.greedy else radius / sampling.temperature
    if kinds.top_p:
        values[2] = jax.nn.sigmoid(jax.scipy.special.logit(values[2]) + change)
    if kinds.min_p:
        values[3] = values[3] * jnp.exp(-change)
    moved = Sampling.tree_unflatten(kinds, itertools.compress(values, kinds[1:]))
    least = jnp.where(standardise(rows, moved) > 0, rows, jnp.inf).min(axis=-1)
    return (least - radius).reshape(*logits.shape[:-1], 1)


def require_enough(samples: Sequence[Sample], sampling: Sampling) -> None:
    """Raises ValueError if samples have too few tokens to test."""
    count = sum(len(sample.tokens) for sample in samples)
    if not sampling.greedy and count < FEWEST:
        needed = math.ceil(FEWEST / (count / len(samples)))
        raise ValueError(
            f"{len(samples)} samples of {count} tokens are too few to test; it takes at least "
            f"{FEWEST} tokens, some {needed} such samples."
        )


def audit(
    pair: Pair,
    samples: Sequence[Sample],
    sampling: Sampling,
    false_alarm: float,
    on_progress: OnProgress = lambda what, share: None,
    seed: int = 0,
) -> Audit:
    """Tests samples against the target of a pair.

    If the program speculated with the pair's draft, or one like it, the test of the agreement with
    it finds faults of the acceptance soonest. Samples of the target pass whatever the draft is.
    If a program gave its log-probabilities, the tests allow for the distance from the target's
    distributions that these show: rounding in another dtype is no fault of its sampler. They allow
    for no more than the rounding of `WIDEST` explains, and a larger difference is itself a failure.
    `seed` is for the randomised transform.

    Raises:
        ValueError: the draft's probabilities are not finite.
    """
    rng, findings, done = np.random.default_rng(seed), _Findings(), 0

    def most(shape: tuple[int, int]) -> int:
        return max(1, min(ROWS, NUMBERS // (shape[1] * pair.vocabulary.size)))

    ordered = sorted(samples, key=lambda sample: (_shape(sample), sample.source))
    for batch, rows in batches(ordered, _shape, most):
        on_progress("scoring", done / len(samples))
        done += len(batch)
        findings.add(batch, _scores(pair, rows, sampling), sampling.greedy, rng)
    greedy = sampling.greedy
    return Audit(
        texts=len(samples),
        prompts=len({sample.source for sample in samples}),
        tokens=sum(len(sample.tokens) for sample in samples),
        edges=0 if greedy else findings.edges,
        impossible=sorted(findings.impossible),
        unexplained=sorted(findings.unexplained, key=lambda one: (one.text, one.position)),
        near_ties=findings.edges if greedy else None,
        tests=[] if greedy or findings.impossible else findings.tests(),
        largest_difference=None if greedy else max(findings.differences, default=None),
        false_alarm=false_alarm,
        spread=float(findings.agreement[1]),
    )


class _Findings:
    """The findings, gathered text by text."""

    def __init__(self) -> None:
        self.impossible: list[tuple[int, int]] = []
        self.unexplained: list[Unexplained] = []
        self.edges = 0
        self.differences: list[float] = []  # The largest in each text with log-probabilities.
        self._transformed: list[NDArray[np.float64]] = []
        # For first tokens, beginnings and all tokens: how much likelier they are to the program
        # than to the target, in nats, the sum of squares, and the most that rounding explains.
        self._divergences = np.zeros((3, 3))
        self._likelihood = np.zeros(3)  # Sums of -ln p minus the entropy, variances, and tokens.
        self.agreement = np.zeros(2)  # Sums of the agreement's excess, and of its variance.
        # By source and beginning of its texts: the probability and the number of such texts.
        self._begins: dict[Any, dict[tuple[int, ...], tuple[float, int]]] = defaultdict(dict)
        self._first: dict[Any, tuple[NDArray[np.float32], list[int]]] = {}

    def add(
        self, batch: Sequence[Sample], scores: _Scores, greedy: bool, rng: np.random.Generator
    ) -> None:
        """Adds a batch of texts, whose rows come first in `scores`."""
        below, own, entropy, variance, near, near_widest, radius, at_edge, *agreement = (
            np.asarray(x[: len(batch)], np.float64) for x in scores[:-1]
        )
        there = np.arange(own.shape[1]) < np.array([[len(sample.tokens)] for sample in batch])
        inside = there & (own > 0)
        # Log-probabilities show rounding in another dtype, which may admit other tokens, too.
        logged = np.array([[sample.logprobs is not None and not greedy] for sample in batch])
        edge = there & ~inside & (np.where(logged, near_widest, near) > 0)
        self.edges += int(edge.sum())
        for row, position in np.argwhere(there & ~inside & ~edge):
            self.impossible.append((batch[row].number, int(position) + 1))
        p = np.where(inside, own, 1)
        surprise = -np.log(p)
        self._likelihood += [
            (surprise - entropy)[inside].sum(), variance[inside].sum(), inside.sum(),
        ]  # fmt: skip
        self.agreement += [values[inside].sum() for values in agreement]
        transformed = below + rng.random(own.shape) * own
        self._transformed += [x[kept] for x, kept in zip(transformed, inside, strict=True)]
        begun = (inside | ~there)[:, :BEGINNING].all(axis=1)
        chances = p[:, :BEGINNING].prod(axis=1)
        for row, sample in enumerate(batch):
            if inside[row, 0]:
                if sample.source not in self._first:  # A copy does not keep the batch in memory.
                    self._first[sample.source] = np.array(scores.first[row]), []
                self._first[sample.source][1].append(sample.tokens[0])
            if begun[row]:
                seen, beginning = self._begins[sample.source], tuple(sample.tokens[:BEGINNING])
                chance, count = seen.get(beginning, (float(chances[row]), 0))
                seen[beginning] = chance, count + 1
        if any(sample.logprobs is not None for sample in batch):
            self._compare(batch, inside & (not greedy), surprise, radius, at_edge)

    def _compare(
        self,
        batch: Sequence[Sample],
        inside: NDArray[np.bool_],
        surprise: NDArray[np.float64],
        radius: NDArray[np.float64],
        at_edge: NDArray[np.float64],
    ) -> None:
        """Compares a program's log-probabilities with the target's, -`surprise`, where `inside`."""
        logprobs, there = np.zeros_like(surprise), np.zeros_like(inside)
        for row, sample in enumerate(batch):
            if sample.logprobs is not None:
                at = row, slice(len(sample.tokens))
                logprobs[at], there[at] = sample.logprobs, True
        finite = np.isfinite(logprobs)
        compared = there & inside & finite
        differences = np.where(compared, logprobs + surprise, 0.0)
        for row, position in np.argwhere(there & ~finite | (np.abs(differences) > radius)):
            at = row, position
            self.unexplained.append(
                Unexplained(
                    batch[row].number,
                    int(position) + 1,
                    float(logprobs[at]) if finite[at] else None,
                    -float(surprise[at]),
                    float(radius[at]),
                )
            )
        self.differences += np.abs(differences[there.any(axis=1)]).max(axis=1).tolist()
        differences = differences.clip(-radius, radius)
        # If logarithms of ratios lie in an interval of width w, the divergence is at most w^2 / 8
        # (Hoeffding's lemma); tokens that are not kept add the logarithm of their share.
        most = np.where(compared, (radius - at_edge) ** 2 / 8 + at_edge, 0.0)
        for part, at in zip(self._divergences, (1, BEGINNING, None), strict=True):
            part += [x[:, :at].sum() for x in (differences, differences**2, most)]

    def tests(self) -> list[GTest]:
        """The tests of samples without impossible tokens."""
        # The mean of the differences is the divergence; three standard errors are added.
        total, squares, most = self._divergences.T
        first, beginnings, whole = np.minimum(np.maximum(total, 0) + 3 * np.sqrt(squares), most)
        of_first = [
            (np.bincount(tokens, minlength=len(p)), p.astype(np.float64))
            for p, tokens in self._first.values()
        ]
        excess, variance, count = self._likelihood
        # If all tokens are nearly certain, the excess is only rounding.
        square = excess**2 / variance if variance > count * CERTAIN**2 else 0.0
        agreed, spread = self.agreement
        tested = [
            (_pooled("first tokens", of_first), first),
            (_pooled(f"first {BEGINNING} tokens", map(_cells, self._begins.values())), beginnings),
            (goodness.of_tokens("tokens", self._transformed), whole),
            (goodness.of_pairs("tokens by the one before", self._transformed), whole),
            (goodness.g_test("log-likelihood", int(count), square, 1), whole),
        ]
        if spread >= SPREAD:
            square = agreed**2 / spread
            tested.append((goodness.g_test(AGREEMENT, int(count), square, 1), whole))
        return [goodness.allowing(test, allowed) for test, allowed in tested if test]


def _cells(seen: dict[tuple[int, ...], tuple[float, int]]) -> tuple[NDArray[Any], NDArray[Any]]:
    """The number of a prompt's texts with each beginning, and its probability.

    Beginnings that are not expected often enough, seen or not, are counted together.
    """
    shares, counts = np.array(list(seen.values())).T
    often = shares * counts.sum() >= goodness.EXPECTED
    others = max(1 - shares[often].sum(), shares[~often].sum())  # The sum may be rounded.
    return np.append(counts[often], counts[~often].sum()), np.append(shares[often], others)


def _pooled(name: str, tables: Iterable[tuple[NDArray[Any], NDArray[Any]]]) -> GTest | None:
    """A G-test of counts and shares, prompt by prompt; None if all are too rare."""
    statistic, degrees, drawn = 0.0, 0, 0
    for observed, shares in tables:
        count = int(observed.sum())
        expected = shares / shares.sum() * count
        g, d = goodness.g_statistic(observed.astype(float), expected)
        statistic, degrees, drawn = statistic + g, degrees + d, drawn + count
    return goodness.g_test(name, drawn, statistic, degrees) if degrees else None


def _shape(sample: Sample) -> tuple[int, int]:
    """The widths to which a sample's source and text are padded, so that few programs compile."""
    beginning = len(sample.tokens) <= BEGINNING
    return padded(len(sample.source)), BEGINNING if beginning else -(-len(sample.tokens) // 32) * 32


def _scores(pair: Pair, batch: Sequence[Sample], sampling: Sampling) -> _Scores:
    """Scores a batch of one shape; each distinct source is read once."""
    width, length = _shape(batch[0])
    places = {source: row for row, source in enumerate(dict.fromkeys(x.source for x in batch))}
    more = [batch[0].source] * (power_of_two(len(places)) - len(places))
    sources = filled([*places, *more], width, pair.target.pad_id)
    tokens = filled([sample.tokens for sample in batch], length)
    rows = np.array([places[sample.source] for sample in batch], np.int32)
    relative = tuple(float(rounding(1.0, pair.target.config, dtype)) for dtype in (None, WIDEST))
    # At temperature 0 tokens are compared with the argmax only; a uniform draft stands for none.
    drafted = not sampling.greedy and not isinstance(pair.draft, UniformDraft)
    models = Models(pair.target, pair.draft if drafted else None)
    params = pair.params if drafted else Params(pair.params.target)
    inputs = sources, rows, tokens, sampling, relative
    scores = jax.device_get(_score(models, params, *inputs, pair.vocabulary.size))
    there = np.arange(length) < np.array([[len(sample.tokens)] for sample in batch])
    if not np.isfinite(scores.agreement_variance[there]).all():
        raise ValueError(
            f"The probabilities of {pair.names[0]} or {pair.names[1]} are not finite: its weights "
            "are damaged, or its dtype is too narrow for it (--dtype); --draft uniform audits "
            "without a draft."
        )
    return scores
