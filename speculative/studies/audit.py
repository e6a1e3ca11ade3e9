"""Whether samples that any program made are a target's own: `speculative audit`.

The program is not run: its samples come from a file, a text a line, and are scored by the target.
At temperature 0 every token must be the target's argmax, but for near ties. At others tests look at
first tokens, at every token and at pairs of neighbours, and at the likelihood: see docs/audit.md.
"""

import dataclasses
import functools
import itertools
import json
import math
import pathlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from speculative import checks
from speculative.decoding import Decoding
from speculative.grouping import batches, filled, padded
from speculative.measurement import goodness, teacher_forced
from speculative.measurement.exactness import rounding
from speculative.measurement.goodness import GTest
from speculative.models.interface import Model
from speculative.pair import Pair
from speculative.progress import OnProgress
from speculative.ragged import power_of_two
from speculative.sampling import Sampling, standardise
from speculative.types import Fields, Inputs, PyTree, Rows, Tokens

FEWEST = goodness.EXPECTED * goodness.PAIR_CELLS**2 * 2
"""Tokens with which a pair of neighbours is expected in each cell often enough."""

BEGINNING = 3  # Tokens of a text that are tested together, where a prompt has many samples.
ROWS = 64  # Texts that are scored at a time,
NUMBERS = 2**24  # or as many as have so many probabilities: 64 MiB of float32.

CERTAIN = 1e-4  # Nats that -ln p varies by where float32 cannot tell by how much.

WIDEST = "bfloat16"
"""The number format whose rounding is the most that log-probabilities are excused by."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """A text that a program made."""

    number: int  # From 1; of a file's texts, the line.
    source: tuple[int, ...]  # The tokens of the source or prompt.
    tokens: list[int]  # With the end of sequence unless it was cut.
    logprobs: list[float] | None = None  # Natural logarithms, as the program computed them.


@dataclasses.dataclass(frozen=True)
class Unexplained:
    """A log-probability that a program gave and that rounding does not explain."""

    text: int  # The number of the text and the position of the token, from 1.
    position: int
    given: float | None  # None if it is not finite, as no token that was emitted has it.
    target: float  # The target's own, in nats as `given`.
    allowed: float  # How far rounding may take one from the other.

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
    """What was found in the samples of a program."""

    texts: int
    prompts: int
    tokens: int
    edges: int  # Tokens at the edge of top-k or top-p, where rounding decides; they are not tested.
    # Texts by their numbers and positions, from 1, of tokens that the target never says; at
    # temperature 0, of those that are not the argmax.
    impossible: list[tuple[int, int]]
    unexplained: list[Unexplained]  # Log-probabilities that are not the target's, even rounded.
    near_ties: int | None  # At temperature 0, tokens that are not the argmax by rounding alone.
    tests: list[GTest]  # Of what was sampled; none at temperature 0.
    largest_difference: float | None  # Of the program's log-probabilities from the target's.
    false_alarm: float  # The probability that `passed` is false for samples of the target.

    @property
    def passed(self) -> bool:
        """Whether no token is impossible, nothing is unexplained, no test fails (Bonferroni)."""
        level = self.false_alarm / max(1, len(self.tests))
        sampled = all(test.p_value >= level for test in self.tests)
        return sampled and not self.impossible and not self.unexplained

    def verdict(self) -> str:
        """What was found, in a sentence or two that begin with PASSED or FAILED."""
        plural, greedy = "s" * (self.prompts > 1), self.near_ties is not None
        said = f"{self.texts} texts of {self.prompts} prompt{plural}, {self.tokens} tokens; "
        if self.impossible:
            text, position = self.impossible[0]
            what = "are not the argmax" if greedy else "have probability 0"
            said += f"{len(self.impossible)} of them {what}, first token {position} of text {text}"
            said += "; " if greedy else "."
        if greedy:
            said += f"{self.near_ties} of them differ from the argmax by a near tie."
        elif not self.impossible:
            said += ", ".join(f"{test.name} p = {test.p_value:.3g}" for test in self.tests)
            said += f". The target's own samples fail with probability {self.false_alarm:g}."
            if self.largest_difference is not None and not self.unexplained:
                said += (
                    " The program's log-probabilities differ from the target's by up to "
                    f"{self.largest_difference:.2g}, which the tests allow for."
                )
            if self.edges:
                said += f" {self.edges} tokens at the edge of top-k or top-p were left out."
        if self.unexplained:
            said += (
                f" {len(self.unexplained)} of the program's log-probabilities are not those of "
                f"the target with these settings, in {WIDEST} or a finer format: "
                f"{self.unexplained[0]}; give those of the distribution that was sampled, or none."
            )
        return f"{'PASSED' if self.passed else 'FAILED'}: {said}"

    def fields(self) -> dict[str, Any]:
        """As `--json` prints it."""
        return dataclasses.asdict(self) | {"passed": self.passed, "verdict": self.verdict()}


Encode = Callable[[str], NDArray[np.int_]]


def read(path: pathlib.Path, encode: Encode, config: Decoding) -> list[Sample]:
    """The samples of a file of JSON lines with `prompt` or `prompt_tokens`, and `tokens`.

    Where a line has settings of sampling, they must be those of the audit, which `config` has.

    Raises:
        ValueError: a line is no sample; the message has its number. Or there are none.
    """
    if not path.is_file():
        raise ValueError(f"There is no file {path}; give one of samples, a JSON object a line.")
    found = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if line.strip():
            try:
                found.append(_sample(number, json.loads(line), encode, config))
            except (ValueError, TypeError, RecursionError, OverflowError) as error:
                raise ValueError(f"Line {number} of {path} is no sample: {error}") from error
    if not found:
        raise ValueError(f"{path} holds no samples; give one a line, as generate --json does.")
    return found


def _sample(number: int, fields: Any, encode: Encode, config: Decoding) -> Sample:
    if not isinstance(fields, dict):
        raise ValueError("it is no JSON object.")
    if "prompt_tokens" in fields:
        source = _whole_numbers(fields, "prompt_tokens", config.vocab_size)
    elif isinstance(fields.get("prompt"), str):
        source = encode(fields["prompt"]).tolist()
    else:
        raise ValueError("it has neither a prompt, a text, nor prompt_tokens.")
    if len(source) > checks.MAX_TOKENS:
        raise ValueError(f"its prompt has {len(source)} tokens, the limit is {checks.MAX_TOKENS}.")
    for name, told in dataclasses.asdict(config.sampling).items():
        if fields.get(name, told) != told:
            raise ValueError(
                f"its {name} is {fields[name]!r}, but the audit is of {told} (--{name})."
            )
    tokens, most = _whole_numbers(fields, "tokens", config.vocab_size), config.max_length
    if not 1 <= len(tokens) <= most:
        raise ValueError(f"it has {len(tokens)} tokens; there must be 1 to {most} (--max_length).")
    ends = [at for at, token in enumerate(tokens, 1) if token in config.eos_ids]
    if ends and ends[0] < len(tokens):
        end = tokens[ends[0] - 1]
        raise ValueError(f"{len(tokens) - ends[0]} tokens follow the end of sequence, {end}.")
    if not ends and len(tokens) < most:
        raise ValueError(
            f"it stops after {len(tokens)} tokens without the end of sequence, "
            f"{' or '.join(map(str, config.eos_ids))}, although {most} were allowed (--max_length)."
        )
    logprobs = fields.get("logprobs")
    if logprobs is not None:
        fits = isinstance(logprobs, list) and len(logprobs) == len(tokens)
        # Those that are not finite can be read, and are found unexplained.
        if not fits or any(type(x) not in (int, float) or 1e-6 < x < math.inf for x in logprobs):
            raise ValueError("logprobs must be a number of at most 0 for each token.")
        logprobs = [float(x) for x in logprobs]
    return Sample(number, tuple(source), tokens, logprobs)


def _whole_numbers(fields: Fields, name: str, vocab_size: int) -> list[int]:
    given = fields.get(name)
    if not isinstance(given, list) or not all(type(token) is int for token in given):
        raise ValueError(f"{name} must be a list of whole numbers.")
    if wrong := [token for token in given if not 0 <= token < vocab_size]:
        raise ValueError(f"{name} has {wrong[0]}; the target's tokens are 0 to {vocab_size - 1}.")
    return given


class _Scores(NamedTuple):
    """Of each token [B, L]: what the tests need of the target's distribution there."""

    below: Array  # The probability of all that are likelier, or as likely and before it.
    own: Array  # Its probability.
    entropy: Array  # Of the distribution, in nats.
    variance: Array  # Of -ln p there.
    near: Array  # Whether it is the best or is kept by top-k, top-p and min-p, but for rounding,
    near_widest: Array  # and whether it is but for the rounding of `WIDEST`.
    radius: Array  # How much the rounding of `WIDEST` changes a log-probability, of
    edge: Array  # which this much is by what it adds to or takes from the tokens that are kept.
    first: Array  # [B, V] the distribution of the first token.


@functools.partial(jax.jit, static_argnames=("target", "vocab_size"))
def _score(
    target: Model,
    params: PyTree,
    source: Inputs,
    rows: Rows,
    tokens: Tokens,
    sampling: Sampling,
    relative: tuple[float, ...],
    vocab_size: int,
) -> _Scores:
    """Of texts [B, L] and the row [B] of each one's source [U, S].

    `relative` is the `rounding` of logits of magnitude 1 in the target's dtype and in `WIDEST`.
    """
    logits = teacher_forced.logits(target, params, source, tokens, rows)[..., :vocab_size]
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
        # At most those are kept that rounding can add, and at least those that it cannot take.
        most, least = (
            logits >= _least_kept(logits, sampling, radius) for radius in (widest, -widest)
        )
        least |= jnp.arange(vocab_size) == chosen
        edge = jnp.subtract(*(
            jax.nn.logsumexp(logits / sampling.temperature, axis=-1, where=kept)
            for kept in (most | least, least)
        ))  # fmt: skip
    radius = edge if sampling.greedy else widest / sampling.temperature + edge
    return _Scores(below, own, entropy, variance, near, near_widest, radius, edge, p[:, 0])


def _least_kept(logits: Array, sampling: Sampling, radius: Array) -> Array:
    """The least logit [..., 1] with which a token is kept, of logits [..., V].

    Rounding changes the difference of two logits by `radius` [...] at most, in the token's favour;
    if that is negative, to its disadvantage. A ratio of two probabilities, and so the odds of a
    set of tokens, then change by exp(radius / temperature) at most.
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
    """Raises ValueError if samples have so few tokens that they decide nothing."""
    count = sum(len(sample.tokens) for sample in samples)
    if not sampling.greedy and count < FEWEST:
        needed = math.ceil(FEWEST / (count / len(samples)))
        raise ValueError(
            f"{len(samples)} samples of {count} tokens decide nothing; it takes at least {FEWEST} "
            f"tokens, some {needed} such samples."
        )


def audit(
    pair: Pair,
    samples: Sequence[Sample],
    sampling: Sampling,
    false_alarm: float,
    on_progress: OnProgress = lambda what, share: None,
    seed: int = 0,
) -> Audit:
    """Tests samples against the target of a pair; its draft is not used.

    Where a program gave its log-probabilities, the tests allow for how far its distributions are
    from the target's by them: rounding in another dtype is no fault of its sampler. They allow for
    no more than the rounding of `WIDEST` explains, and what differs by more is a failure itself.
    `seed` is of the randomised transform.
    """
    rng, found, done = np.random.default_rng(seed), _Findings(), 0

    def most(shape: tuple[int, int]) -> int:
        return max(1, min(ROWS, NUMBERS // (shape[1] * pair.vocabulary.size)))

    ordered = sorted(samples, key=lambda sample: (_shape(sample), sample.source))
    for batch, rows in batches(ordered, _shape, most):
        on_progress("scoring", done / len(samples))
        done += len(batch)
        found.add(batch, _scores(pair, rows, sampling), sampling.greedy, rng)
    greedy = sampling.greedy
    return Audit(
        texts=len(samples),
        prompts=len({sample.source for sample in samples}),
        tokens=sum(len(sample.tokens) for sample in samples),
        edges=0 if greedy else found.edges,
        impossible=sorted(found.impossible),
        unexplained=sorted(found.unexplained, key=lambda one: (one.text, one.position)),
        near_ties=found.edges if greedy else None,
        tests=[] if greedy or found.impossible else found.tests(),
        largest_difference=None if greedy else max(found.differences, default=None),
        false_alarm=false_alarm,
    )


class _Findings:
    """What is gathered text by text."""

    def __init__(self) -> None:
        self.impossible: list[tuple[int, int]] = []
        self.unexplained: list[Unexplained] = []
        self.edges = 0
        self.differences: list[float] = []  # The largest of each text with log-probabilities.
        self._transformed: list[NDArray[np.float64]] = []
        # Of first tokens, beginnings and all tokens: how much likelier they are to the program than
        # to the target, in nats, the sum of squares, and the most that rounding explains.
        self._divergences = np.zeros((3, 3))
        self._likelihood = np.zeros(3)  # Sums of -ln p less the entropy, of variances, of tokens.
        # By source, of each beginning of its texts: its probability and how many texts have it.
        self._begins: dict[Any, dict[tuple[int, ...], tuple[float, int]]] = defaultdict(dict)
        self._first: dict[Any, tuple[NDArray[np.float32], list[int]]] = {}

    def add(
        self, batch: Sequence[Sample], scores: _Scores, greedy: bool, rng: np.random.Generator
    ) -> None:
        """Adds a batch of texts, whose rows come first in `scores`."""
        below, own, entropy, variance, near, near_widest, radius, at_edge = (
            np.asarray(x[: len(batch)], np.float64) for x in scores[:-1]
        )
        there = np.arange(own.shape[1]) < np.array([[len(sample.tokens)] for sample in batch])
        inside = there & (own > 0)
        # Log-probabilities tell of rounding in another dtype, which may let in others, too.
        told = np.array([[sample.logprobs is not None and not greedy] for sample in batch])
        edge = there & ~inside & (np.where(told, near_widest, near) > 0)
        self.edges += int(edge.sum())
        for row, position in np.argwhere(there & ~inside & ~edge):
            self.impossible.append((batch[row].number, int(position) + 1))
        p = np.where(inside, own, 1)
        surprise = -np.log(p)
        self._likelihood += [
            (surprise - entropy)[inside].sum(), variance[inside].sum(), inside.sum(),
        ]  # fmt: skip
        transformed = below + rng.random(own.shape) * own
        self._transformed += [x[kept] for x, kept in zip(transformed, inside, strict=True)]
        begun = (inside | ~there)[:, :BEGINNING].all(axis=1)
        chances = p[:, :BEGINNING].prod(axis=1)
        for row, sample in enumerate(batch):
            if inside[row, 0]:
                if sample.source not in self._first:  # Not all of its batch is kept.
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
        given, there = np.zeros_like(surprise), np.zeros_like(inside)
        for row, sample in enumerate(batch):
            if sample.logprobs is not None:
                at = row, slice(len(sample.tokens))
                given[at], there[at] = sample.logprobs, True
        finite = np.isfinite(given)
        compared = there & inside & finite
        differences = np.where(compared, given + surprise, 0.0)
        for row, position in np.argwhere(there & ~finite | (np.abs(differences) > radius)):
            at = row, position
            self.unexplained.append(
                Unexplained(
                    batch[row].number,
                    int(position) + 1,
                    float(given[at]) if finite[at] else None,
                    -float(surprise[at]),
                    float(radius[at]),
                )
            )
        self.differences += np.abs(differences[there.any(axis=1)]).max(axis=1).tolist()
        differences = differences.clip(-radius, radius)
        # Where logarithms of ratios lie in an interval of width w, the divergence is at most
        # w^2 / 8 (Hoeffding's lemma); tokens that are not kept add the logarithm of their share.
        most = np.where(compared, (radius - at_edge) ** 2 / 8 + at_edge, 0.0)
        for part, at in zip(self._divergences, (1, BEGINNING, None), strict=True):
            part += [x[:, :at].sum() for x in (differences, differences**2, most)]

    def tests(self) -> list[GTest]:
        """The tests of samples without impossible tokens."""
        # The mean of that is the divergence; three standard errors are added.
        total, squares, most = self._divergences.T
        first, beginnings, whole = np.minimum(np.maximum(total, 0) + 3 * np.sqrt(squares), most)
        of_first = [
            (np.bincount(tokens, minlength=len(p)), p.astype(np.float64))
            for p, tokens in self._first.values()
        ]
        excess, variance, count = self._likelihood
        # Of tokens that are all but certain, there is rounding alone.
        square = excess**2 / variance if variance > count * CERTAIN**2 else 0.0
        found = [
            (_pooled("first tokens", of_first), first),
            (_pooled(f"first {BEGINNING} tokens", map(_cells, self._begins.values())), beginnings),
            (goodness.of_tokens("tokens", self._transformed), whole),
            (goodness.of_pairs("tokens by the one before", self._transformed), whole),
            (goodness.g_test("log-likelihood", int(count), square, 1), whole),
        ]
        return [goodness.allowing(test, allowed) for test, allowed in found if test]


def _cells(seen: dict[tuple[int, ...], tuple[float, int]]) -> tuple[NDArray[Any], NDArray[Any]]:
    """How many of a prompt's texts have each beginning, and its probability.

    All beginnings but those that are expected often enough, seen or not, are counted together.
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
    """The widths of source and text to which a sample is padded, for few programs."""
    beginning = len(sample.tokens) <= BEGINNING
    return padded(len(sample.source)), BEGINNING if beginning else -(-len(sample.tokens) // 32) * 32


def _scores(pair: Pair, batch: Sequence[Sample], sampling: Sampling) -> _Scores:
    """Scores of a batch of one shape, whose sources, read once each, are filled up likewise."""
    width, length = _shape(batch[0])
    places = {source: row for row, source in enumerate(dict.fromkeys(x.source for x in batch))}
    more = [batch[0].source] * (power_of_two(len(places)) - len(places))
    sources = filled([*places, *more], width, pair.target.pad_id)
    tokens = filled([sample.tokens for sample in batch], length)
    rows = np.array([places[sample.source] for sample in batch], np.int32)
    relative = tuple(float(rounding(1.0, pair.target.config, dtype)) for dtype in (None, WIDEST))
    given = pair.target, pair.params.target, sources, rows, tokens, sampling, relative
    return jax.device_get(_score(*given, pair.vocabulary.size))
