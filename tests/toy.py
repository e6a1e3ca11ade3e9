"""Models on four tokens, and what Algorithm 1 must do with them, enumerated in float64.

The models are tables of the next token by the two before it, behind the package's interfaces; the
probabilities are NumPy alone and share no code with the package.
"""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array
from scipy import stats

from speculative.drafts import Draft, Proposal
from speculative.models.interface import Chunk, Extended, Model, Started
from speculative.ragged import move_rows
from speculative.sampling import Sampling
from speculative.types import Rows, Tokens

VOCABULARY = 4
"""Tokens 0 (also the start), 1 (ends a row), 2 and 3."""

PADDED = VOCABULARY + 1
"""Rows of a table: the last pads the vocabulary, is the likeliest, and must never be chosen."""

EOS = 1
ENDS = (EOS,)

Probabilities = dict[tuple[int, ...], float]
"""Probabilities of outcomes."""

NOTHING = Started((), {})
"""A target's start, for drafts that do not look at it."""

Walk = tuple[int, int, int]
"""Where a row is: its token before last, its last token, how many tokens it has."""


@struct.dataclass
class MarkovState:
    """The tokens seen, in a cache that also holds stale ones beyond `lengths`."""

    lengths: Rows
    seen: Tokens


@dataclasses.dataclass(frozen=True)
class MarkovModel(Model):
    """Logits depend on the last two tokens: its parameters are a table [V, V, V].

    A state that kept a rejected token, or missed an accepted one, shows in the second index; so
    does a branch that sees another one.
    """

    pad_id: ClassVar[int] = 0
    decoder_only: ClassVar[bool] = False

    @property
    def vocab_size(self) -> int:
        return PADDED

    def first(self, inputs) -> Rows:
        return jnp.zeros(inputs.shape[0], jnp.int32)

    def start(self, params, inputs, cache_length, encoded=None, layers=()) -> Started:
        batch = inputs.shape[0]
        # Stale from the start, so that nothing leans on a cache of zeros.
        seen = jnp.full((batch, cache_length), VOCABULARY - 1, jnp.int32)
        return Started(MarkovState(jnp.zeros(batch, jnp.int32), seen), {})

    def extend(self, params, state, chunk, at=None, layers=()) -> Extended:
        """Its only hidden state is the token that was fed."""
        tokens = chunk.tokens
        rows = jnp.arange(tokens.shape[0])[:, None]
        places = state.lengths[:, None] + jnp.arange(tokens.shape[1])
        seen = state.seen.at[rows, places].set(tokens)
        at_before = places - 1
        if chunk.positions is not None and chunk.mask is not None:
            at_before = _before_in_branches(state.lengths - chunk.begun, chunk)
        before = jnp.where(at_before >= 0, seen[rows, at_before], 0)
        logits = params[before, tokens]
        if at is not None:
            logits = logits[rows, at[:, None]]
        hidden = {name: tokens[..., None] for name in layers}
        return Extended(logits, MarkovState(state.lengths + tokens.shape[1], seen), hidden)

    def rewind(self, state, lengths) -> MarkovState:
        return MarkovState(lengths, state.seen)

    def keep(self, state, length, path, count) -> MarkovState:
        starts = state.lengths - length
        return MarkovState(
            starts + count, move_rows(state.seen, starts[:, None] + path, starts, axis=1)
        )


def _before_in_branches(text: Rows, chunk: Chunk) -> Array:
    """Where in the cache the token before each of a chunk's is, [B, L]; -1 if there is none.

    It is what the token sees of the branches one position earlier, or the last of the `text` [B].
    """
    assert chunk.positions is not None and chunk.mask is not None
    one_earlier = chunk.positions[:, None] == chunk.behind[..., None] - 1
    seen = chunk.mask & one_earlier  # [B or 1, L, M]
    in_branch = jnp.where(seen.any(axis=-1), seen.argmax(axis=-1), -1)
    return text[:, None] + in_branch


@dataclasses.dataclass(frozen=True)
class CertainDraft(Draft):
    """Guesses that are certain, hence q None: its parameters are a table [V] of successors."""

    def start(self, params, inputs, cache_length, target) -> tuple[()]:
        return ()

    def propose(self, params, state, last, numbers, sampling, vocab_size, history=None) -> Proposal:
        guesses = [last]
        for _ in range(numbers.shape[1]):
            guesses.append(params[guesses[-1]])
        return Proposal(jnp.stack(guesses[1:], axis=1), None, state)

    def commit(self, params, proposal, accepted, hidden) -> tuple[()]:
        return ()


def target_table() -> np.ndarray:
    """Logits [V, V, V] of the target: uneven, ends a row at about one token in seven."""
    rng = np.random.default_rng(11)
    logits = rng.normal(0.0, 1.2, (PADDED, PADDED, PADDED))
    logits[..., EOS] = rng.normal(-0.3, 0.7, (PADDED, PADDED))
    logits[0, 0] = [0.2, -1.5, 0.5, 0.0, 0.0]
    # One context in which a token is impossible, so that q can be positive where p is 0.
    logits[..., 2, 3] = -np.inf
    logits[..., -1] = 9.0
    return logits


def near_table() -> np.ndarray:
    """Logits of a draft that is right most of the time."""
    rng = np.random.default_rng(12)
    return target_table() + rng.normal(0.0, 0.4, (PADDED, PADDED, PADDED))


def far_table() -> np.ndarray:
    """Logits of a draft that knows nothing of the target."""
    rng = np.random.default_rng(13)
    logits = rng.normal(0.0, 1.5, (PADDED, PADDED, PADDED))
    logits[..., -1] = 9.0
    return logits


def disjoint_table() -> np.ndarray:
    """Logits of a draft whose support differs from the target's.

    After a 2 it guesses what the target never says, after a 3 half of what the target says,
    elsewhere never the end.
    """
    logits = far_table()
    logits[..., 2, :VOCABULARY] = [-np.inf, -np.inf, -np.inf, 0.0]
    logits[..., 3, :VOCABULARY] = [0.0, -np.inf, -np.inf, 0.5]
    logits[..., [0, 1, 4], EOS] = -np.inf
    return logits


def params(table: np.ndarray) -> Array:
    """The parameters of a `MarkovModel`."""
    return jax.device_put(table.astype(np.float32))


def certain_table() -> np.ndarray:
    """Each token's certain successor."""
    return np.array([2, 0, 0, 1, 0])


def certain_distribution() -> np.ndarray:
    """The q [V, V, V] of a `CertainDraft`."""
    one_hot = np.eye(VOCABULARY)[certain_table()[:VOCABULARY]]
    return np.broadcast_to(one_hot, (VOCABULARY,) * 3)


def standardise(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Section 2.2 for logits [..., V], a row at a time; ties stay together."""
    logits = np.asarray(logits, np.float64)
    probabilities = np.zeros_like(logits)
    for row in np.ndindex(logits.shape[:-1]):
        probabilities[row] = _standardise_row(logits[row], sampling)
    return probabilities


def _standardise_row(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    if sampling.temperature == 0:
        return (np.arange(len(logits)) == logits.argmax()).astype(np.float64)
    weights = np.exp((logits - logits.max()) / sampling.temperature)
    if 0 < sampling.top_k < len(weights):
        weights[weights < sorted(weights, reverse=True)[sampling.top_k - 1]] = 0.0
    weights /= weights.sum()
    mass = 0.0
    for weight in sorted(weights, reverse=True):
        mass += weight
        if mass >= sampling.top_p < 1:
            weights[weights < weight] = 0.0
            break
    weights[weights < sampling.min_p * weights.max()] = 0.0
    return weights / weights.sum()


def distribution(table: np.ndarray, sampling: Sampling) -> np.ndarray:
    """What a table [V + 1, V + 1, V + 1] comes to over the vocabulary: [V, V, V]."""
    return standardise(table[:VOCABULARY, :VOCABULARY, :VOCABULARY], sampling)


def enumerated(next_token: Callable[[tuple[int, ...]], np.ndarray], length: int) -> Probabilities:
    """The distribution of whole outputs, by the p [V] of the token after a text.

    They end at the end token, or are cut at `length` tokens.
    """
    probabilities: Probabilities = {}
    growing: Probabilities = {(): 1.0}
    while growing:
        prefix, chance = growing.popitem()
        p = next_token(prefix)
        for token in np.flatnonzero(p).tolist():
            text = (*prefix, token)
            over = token == EOS or len(text) == length
            (probabilities if over else growing)[text] = chance * p[token]
    return probabilities


def output_probabilities(p: np.ndarray, length: int) -> Probabilities:
    """That of the target's outputs."""
    return enumerated(lambda prefix: p[(0, 0, *prefix)[-2:]], length)


def tested(p: np.ndarray, q: np.ndarray, lenience: float) -> tuple[np.ndarray, np.ndarray]:
    """What a tested guess emits, [V] both: as an accepted guess and as a correction (A.5).

    Together they are one: beta = sum min(p / l, q) is accepted, and max(0, p - l q), whose sum is
    1 - l beta, shares the rest.
    """
    accepted = np.minimum(p / lenience, q)
    beta, left = accepted.sum(), np.maximum(p - lenience * q, 0.0)
    return accepted, left * ((1 - beta) / (1 - lenience * beta)) if beta < 1 else 0 * left


def lenient_probabilities(
    p: np.ndarray, q: np.ndarray, lenience: float, gamma: int, length: int
) -> tuple[Probabilities, Probabilities]:
    """The laws of whole outputs and of the number of target calls; at l = 1 the first is p's own.

    What comes next depends on the text and on how many guesses of the step stand already.
    """
    outputs: Probabilities = defaultdict(float)
    calls: Probabilities = defaultdict(float)
    states: dict[tuple[tuple[int, ...], int, int], float] = {((), 0, 1): 1.0}
    while states:
        grown: dict[tuple[tuple[int, ...], int, int], float] = defaultdict(float)
        for (prefix, stand, call), chance in states.items():
            here = (0, 0, *prefix)[-2:]
            ways = [(p[here], 0, call + 1)]  # The bonus token.
            if stand < gamma:
                accepted, corrected = tested(p[here], q[here], lenience)
                ways = [(accepted, stand + 1, call), (corrected, 0, call + 1)]
            for weights, stands, at_call in ways:
                for token in np.flatnonzero(weights):
                    text, mass = (*prefix, int(token)), chance * weights[token]
                    if token == EOS or len(text) == length:
                        outputs[text] += mass
                        calls[(call,)] += mass
                    else:
                        grown[text, stands, at_call] += mass
        states = grown
    return dict(outputs), dict(calls)


def calls_probabilities(p: np.ndarray, q: np.ndarray, gamma: int, length: int) -> Probabilities:
    """The distribution of the number of target calls an output takes, from Algorithm 1.

    Mass walks over the states of a row, one target call after another.
    """
    probabilities: Probabilities = defaultdict(float)
    calls = 0

    def emit(state: Walk, weights: np.ndarray, onto: dict[Walk, float]) -> None:
        _, last, held = state
        for token in np.flatnonzero(weights):
            if token == EOS or held + 1 == length:
                probabilities[(calls,)] += weights[token]
            else:
                onto[last, int(token), held + 1] += weights[token]

    between: dict[Walk, float] = {(0, 0, 0): 1.0}
    while between:
        calls += 1
        within, between = between, defaultdict(float)
        for _ in range(gamma):
            accepted: dict[Walk, float] = defaultdict(float)
            for state, chance in within.items():
                p_here, q_here = p[state[:2]], q[state[:2]]
                emit(state, chance * np.minimum(p_here, q_here), accepted)
                emit(state, chance * np.maximum(p_here - q_here, 0.0), between)
            within = accepted
        for state, chance in within.items():
            emit(state, chance * p[state[:2]], between)
    return dict(probabilities)


def p_value(outcomes: Counter[tuple[int, ...]], probabilities: Probabilities) -> float:
    """Pearson's chi-square test of outcomes against a distribution; 0 if one was impossible.

    Cells are pooled, rarest first, until each expects 5 outcomes.
    """
    assert abs(sum(probabilities.values()) - 1) < 1e-9
    if outcomes.keys() - probabilities.keys():
        return 0.0
    total = outcomes.total()
    observed, expected = [0.0], [0.0]
    for outcome in sorted(probabilities, key=lambda outcome: probabilities[outcome]):
        if expected[-1] >= 5:
            observed.append(0.0)
            expected.append(0.0)
        observed[-1] += outcomes[outcome]
        expected[-1] += total * probabilities[outcome]
    o, e = np.array(observed), np.array(expected)
    return float(stats.chi2.sf(((o - e) ** 2 / e).sum(), len(e) - 1)) if len(e) > 1 else 1.0
