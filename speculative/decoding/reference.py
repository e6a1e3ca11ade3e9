"""Speculative decoding on one page: Algorithm 1 of Leviathan et al. (arXiv 2211.17192) in NumPy.

Here a model is a function from a text to the logits of its next token, without caches or batches,
so that the acceptance of guesses is easy to follow; `next_logits` wraps a real model. The compiled
loop (speculative/decoding/loop.py) emits the same tokens from the same random numbers, and tests
compare the two. To try an idea, change this file first; docs/extending.md shows how to carry the
change into the compiled loop.

`verify` and `decode` are the paper's algorithm, `decode_coupled` and `grow` are coupled
verification and trees of guesses; block.py has block verification, in JAX and in NumPy. All
arithmetic after the models' logits is in float64 and shares nothing with the compiled rules (`Rule`
and `Token` in rule.py, the others in rules.py), so tests of those use this file as an independent
check.
"""

from collections.abc import Callable, Collection

import jax
import jax.numpy as jnp
import numpy as np

from speculative.models.interface import Chunk, Model
from speculative.ragged import power_of_two
from speculative.sampling import Sampling
from speculative.tree import Growth
from speculative.types import Inputs, PyTree

Text = list[int]  # The tokens of an output so far.
NextLogits = Callable[[Text], np.ndarray]  # The logits [V] of the token after a text.
# Three uniform numbers in [0, 1) per position, [positions, 3]: DRAFT draws the guess, ACCEPT tests
# it, CORRECT draws its replacement, or the token after the last guess.
Random = np.ndarray
DRAFT, ACCEPT, CORRECT = 0, 1, 2


def verify(
    guesses: list[int],
    p: np.ndarray,
    q: np.ndarray,
    r: np.ndarray,
    correct: np.ndarray,
    lenience: float = 1.0,
) -> tuple[int, int]:
    """The last three parts of Algorithm 1: how many guesses are accepted, and the next token.

    p [gamma + 1, V] and q [gamma, V] are the distributions that are sampled from (`standardise`).
    r[i] in [0, 1) tests guess i: it is accepted with probability min(1, p(x) / q(x)). The next
    token, at index n, is drawn with correct[n]: after a rejection from max(p - q, 0), normalised,
    and from p if all guesses were accepted. Lenience l < 1 replaces q by l q, which accepts
    more guesses above temperature 0 and is not exact (appendix A.5); `decode` leaves it at 1.
    """
    q = lenience * q
    n = 0
    while n < len(guesses) and r[n] * q[n, guesses[n]] < p[n, guesses[n]]:
        n += 1
    residual = np.maximum(p[n] - q[n], 0.0) if n < len(guesses) else p[n]
    # If p equals q up to rounding, the residual can be 0 everywhere.
    return n, draw(residual if residual.sum() > 0 else p[n], correct[n])


def decode(
    target: NextLogits,
    draft: NextLogits,
    random: Random,
    *,
    gamma: int,
    sampling: Sampling,
    max_length: int,
    eos_ids: Collection[int],
    verify: Callable[..., tuple[int, int]] = verify,
) -> list[Text]:
    """Repeats Algorithm 1 until a text ends; returns the tokens of each step.

    A step stands for one call of a Transformer, which gives the logits of all its positions. The
    steps together are the output, which is distributed like the target's own samples, whatever the
    draft is: token x is emitted by acceptance with probability min(p(x), q(x)), and by correction
    with the remaining max(p(x) - q(x), 0).

    `random` covers at least `max_length + gamma` positions, and gamma is at least 1. The numbers of
    guesses after the first rejected one are used again in the next step, which is sound because
    these guesses were never tested. With a `verify` that looks at all guesses, like block
    verification, this loop is not exact: such a rule needs new numbers in each step.
    """
    text: Text = []
    steps: list[Text] = []
    while len(text) < max_length and not ended(text, eos_ids):
        at = random[len(text) :]
        # The draft samples gamma guesses, one after another.
        guesses: Text = []
        q = []
        for i in range(gamma):
            q.append(standardise(draft(text + guesses), sampling))
            guesses.append(draw(q[i], at[i, DRAFT]))
        # The target scores all of them, which a Transformer does in one pass.
        p = [standardise(target(text + guesses[:i]), sampling) for i in range(gamma + 1)]
        # Guesses are accepted until one is rejected, and another token follows them.
        numbers = at[:gamma, ACCEPT], at[: gamma + 1, CORRECT]
        accepted, token = verify(guesses, np.stack(p), np.stack(q), *numbers)
        steps.append(cut([*guesses[:accepted], token], max_length - len(text), eos_ids))
        text += steps[-1]
    return steps


def decode_coupled(
    target: NextLogits,
    draft: NextLogits,
    noise: np.ndarray,
    *,
    gamma: int,
    sampling: Sampling,
    max_length: int,
    eos_ids: Collection[int],
    nodes: int = 0,
) -> list[Text]:
    """Coupled verification: fixed noise determines each token, so no draft can change the text.

    The argmax of log-probability plus standard Gumbel noise is a sample from p. Target and draft
    use the same `noise` [positions, V] for it, which often makes them choose the same token (Daliri
    et al., arXiv 2408.07978). At temperature 0 no noise is used.

    A guess is accepted if it equals the target's token, so several can be tried at a position: with
    `nodes` > 0 the guesses form a tree of at most `nodes` guesses and depth at most gamma, and the
    path that the target's tokens follow is accepted. `noise` covers at least `max_length + gamma`
    positions.
    """
    text: Text = []
    steps: list[Text] = []

    def choose(logits: np.ndarray, position: int) -> int:
        return int(perturbed(logits, sampling, noise[position]).argmax())

    while len(text) < max_length and not ended(text, eos_ids):
        tree = grow(draft, text, noise, sampling, gamma, nodes) if nodes else None
        path: Text = []
        while True:  # The target scores all guesses in one pass; only those on the path matter.
            token = choose(target(text + path), len(text) + len(path))
            if tree is not None:
                right = (*path, token) in tree
            elif len(path) < gamma:
                right = token == choose(draft(text + path), len(text) + len(path))
            else:
                right = False  # No guess is left.
            if not right:
                break
            path.append(token)
        steps.append(cut([*path, token], max_length - len(text), eos_ids))
        text += steps[-1]
    return steps


def grow(
    draft: NextLogits, text: Text, noise: np.ndarray, sampling: Sampling, depth: int, nodes: int
) -> set[tuple[int, ...]]:
    """Grows a tree of guesses: repeatedly adds the likeliest path that is not yet in it.

    The tree is returned as the set of its paths from the root. A path's score is the product of its
    tokens' probabilities (EAGLE-2, Li et al., arXiv 2406.16858). The softmax of log q plus noise
    estimates how likely the target, with the same noise, chooses a token; with any other estimate
    the output would be just as exact. The compiled loop reads whole levels of the tree at once and
    scores paths somewhat differently (`tree.Growth`, `drafts.growing`), so it may need more or
    fewer steps for the same text.
    """
    tree: set[tuple[int, ...]] = set()
    candidates: list[tuple[float, tuple[int, ...]]] = []
    path: tuple[int, ...] = ()
    likely = 0.0
    while True:
        if len(path) < depth:
            scores = perturbed(draft([*text, *path]), sampling, noise[len(text) + len(path)])
            scores = scores - np.logaddexp.reduce(scores)
            best = np.argsort(-scores)[: Growth.BRANCHES].tolist()  # At most so many per guess.
            candidates += [(likely + scores[token], (*path, token)) for token in best]
        if len(tree) == nodes or not candidates:
            return tree
        candidates.sort()
        likely, path = candidates.pop()
        tree.add(path)


def perturbed(logits: np.ndarray, sampling: Sampling, noise: np.ndarray) -> np.ndarray:
    """Scores [..., V] whose argmax is the next token: log p + noise; logits at temperature 0."""
    if sampling.greedy:
        return np.asarray(logits, np.float64)
    with np.errstate(divide="ignore"):
        return np.log(standardise(logits, sampling)) + noise


def ended(text: Text, eos_ids: Collection[int]) -> bool:
    """Whether the last token ends the text."""
    return bool(text) and text[-1] in eos_ids


def cut(block: Text, room: int, eos_ids: Collection[int]) -> Text:
    """A step's tokens, cut after an end token or at the length limit."""
    ends = (i for i, token in enumerate(block, 1) if token in eos_ids)
    return block[: min(room, next(ends, room))]


def one_hot(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    """Distributions [..., V] with all probability on tokens [...]."""
    return (np.arange(vocab_size) == tokens[..., None]).astype(np.float64)


def standardise(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """The distributions [..., V] that are sampled from (section 2.2).

    Temperature, top-k, top-p and min-p apply in this order; equal values are kept or removed
    together.
    """
    logits = np.asarray(logits, np.float64)
    if sampling.greedy:
        return one_hot(logits.argmax(axis=-1), logits.shape[-1])
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        smallest = np.sort(logits, axis=-1)[..., -sampling.top_k, None]
        logits = np.where(logits >= smallest, logits, -np.inf)
    p = np.exp(logits - logits.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    if sampling.top_p < 1:
        descending = -np.sort(-p, axis=-1)
        needed = np.cumsum(descending, axis=-1) - descending < sampling.top_p
        smallest = np.where(needed, descending, np.inf).min(axis=-1, keepdims=True)
        p = np.where(p >= smallest, p, 0.0)
        p /= p.sum(axis=-1, keepdims=True)
    if sampling.min_p > 0:
        p = np.where(p >= sampling.min_p * p.max(axis=-1, keepdims=True), p, 0.0)
        p /= p.sum(axis=-1, keepdims=True)
    return p


def draw(weights: np.ndarray, uniform: float) -> int:
    """The first token whose cumulative weight exceeds `uniform` times the total: [V] -> token."""
    running = np.cumsum(np.asarray(weights, np.float64))
    token = np.searchsorted(running, uniform * running[-1], side="right")
    # If uniform times the total rounds up to the total: the last token that has any weight.
    return int(min(token, np.argmax(running >= running[-1])))


def next_logits(
    model: Model, params: PyTree, inputs: Inputs, vocab_size: int, encoded: jax.Array | None = None
) -> NextLogits:
    """Wraps a model for one source or prompt [1, S]; each text is computed from scratch, uncached.

    `encoded` is the target's encoder output, for a draft that reads it.
    """

    @jax.jit
    def run(params: PyTree, tokens: jax.Array) -> jax.Array:
        state = model.start(params, inputs, tokens.shape[1], encoded).state
        return model.extend(params, state, Chunk(tokens)).logits

    def logits(text: Text) -> np.ndarray:
        fed = [int(model.first(inputs)[0]), *text]
        # Few lengths limit compilation; a token's logits do not depend on those after it.
        padded = np.zeros((1, power_of_two(len(fed))), np.int32)
        padded[0, : len(fed)] = fed
        return np.asarray(run(params, jnp.asarray(padded)))[0, len(fed) - 1, :vocab_size]

    return logits
