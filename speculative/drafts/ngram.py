"""N-gram tables as drafts: c is almost 0 and alpha modest (section 3.6)."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array, lax

from speculative.drafts.base import Draft, Proposal, guess
from speculative.drafts.growing import Level, grow
from speculative.drafts.tables import COMMAND, FileKind
from speculative.processors import History
from speculative.progress import OnProgress
from speculative.ragged import read_rows
from speculative.types import PAD_ID, Rows, State
from speculative.vocabulary import Vocabulary

LONGEST = 3  # Tokens of the longest n-grams.
WIDTH = 256  # Followers that a context keeps by default.
COLUMNS = ("unigram", "children", "token", "total", "distinct", "kept", "follower", "count")
TABLE = FileKind("ngrams.npz", "n-gram counts", COMMAND, ("order", *COLUMNS))


@struct.dataclass
class NgramParams:
    """Parameters of an `NgramDraft`: a trie of contexts, each with the tokens that followed it.

    Node 0 is the empty context, and a child's context has one more token to the left. Children
    of a node are neighbours, sorted by that token. The last node stands for all contexts that
    were not kept: it has neither children nor followers.
    """

    unigram: Array  # [V] float32, q after the empty context.
    token: Array  # [M] int32, the leftmost token of each node's context.
    child: Array  # [M + 1] int32: node i's children are those from child[i] to child[i + 1].
    backoff: Array  # [M] float32, the weight of the shorter context.
    first: Array  # [M + 1] int32: node i's followers are those from first[i] to first[i + 1].
    follower: Array  # [E] int32 tokens.
    share: Array  # [E] float32, a follower's own part of q, c(h, w) / (c(h) + T(h)).
    width: int = struct.field(pytree_node=False)  # The most followers of a node.


@dataclasses.dataclass(frozen=True)
class NgramDraft(Draft):
    """Guesses from the frequencies of the tokens that followed the last ones in a corpus.

    Its state is the `order` - 2 tokens before the last one, [B, order - 2], -1 where there is
    none. Its parameters come from `load`, with the same order or a higher one.

    Attributes:
        order: tokens per n-gram: 1 guesses without context, 2 from the last token.
        decoder_only: see `CopyDraft`.
    """

    order: int
    decoder_only: bool = False
    grows = True

    def __post_init__(self) -> None:
        _require_order(self.order)

    def start(self, params, inputs, cache_length, target) -> Array:
        """The end of the prompts; a source is not used as context."""
        size = max(self.order - 2, 0)
        if not self.decoder_only:
            return jnp.full((inputs.shape[0], size), -1, jnp.int32)
        padded = jnp.pad(inputs, ((0, 0), (size, 0)), constant_values=-1)
        return read_rows(padded, (inputs >= 0).sum(axis=1) - 1, size)

    def propose(self, params, state, last, numbers, sampling, vocab_size, history=None) -> Proposal:
        """Looks up one row of the table per guess; the new state holds the known tokens."""

        def step(carry: tuple[Array, History | None], number: Array) -> Any:
            context, history = carry
            row = distribution(params, context)[:, :vocab_size]
            row = row if sampling.greedy and history is None else jnp.log(row)
            token, q = guess(row, number, sampling, history)
            context = jnp.concatenate([context, token[:, None]], axis=1)[:, 1:]
            return (context, history and history.followed_by(token)), (token, q)

        known = jnp.concatenate([state, last[:, None]], axis=1)
        context = known[:, known.shape[1] - (self.order - 1) :]
        _, drawn = lax.scan(step, (context, history), numbers.swapaxes(0, 1))
        guesses, q = jax.tree.map(lambda x: x.swapaxes(0, 1), drawn)
        return Proposal(guesses, q, known)

    def grow(
        self, params, state, last, noise, sampling, vocab_size, growth, history=None
    ) -> Proposal:
        """Looks up one row of the table for each node."""
        known = jnp.concatenate([state, last[:, None]], axis=1)
        size = self.order - 1

        def logits(contexts: Array) -> Array:
            """[B, W, n] -> [B, W, V]."""
            batch, width, _ = contexts.shape
            q = distribution(params, contexts.reshape(batch * width, -1))[:, :vocab_size]
            return jnp.log(q).reshape(batch, width, -1)

        def read(state: State, level: Level) -> tuple[Array, State]:
            before = jnp.repeat(known[:, None], level.paths.shape[1], axis=1)
            text = jnp.concatenate([before, level.paths], axis=2)
            begin = known.shape[1] + level.depth - size
            return logits(lax.dynamic_slice_in_dim(text, begin, size, axis=2)), state

        first = logits(known[:, None, known.shape[1] - size :])[:, 0]
        grown = grow(first, (), read, noise, sampling, growth, history=history)
        return Proposal(grown.guesses, None, known, grown.tree)

    def commit(self, params, proposal, accepted, hidden) -> Array:
        """Removes rejected guesses, and tokens too far back to matter."""
        text = jnp.concatenate([proposal.state, proposal.guesses], axis=1)
        return read_rows(text, accepted + 1, max(self.order - 2, 0))


def distribution(params: NgramParams, context: Array) -> Array:
    """The distribution q [B, V] after `context` [B, n], oldest token first, -1 where there is none.

    This is the interpolated back-off of Witten and Bell (1991): with h' for a context h without
    its oldest token, c for counts and T(h) for the number of distinct tokens that followed h,

        q(w | h) = (c(h, w) + T(h) q(w | h')) / (c(h) + T(h)),

    and (c(w) + 1) / (N + V) without a context. The share of followers that were not kept goes to
    h', and so does all of q after a context that was not kept.
    """
    batch = context.shape[0]
    # Without the barrier XLA would sum a shared row just once, in a different order: draws from it
    # would then depend, by rounding, on the number of rows.
    q = lax.optimization_barrier(jnp.broadcast_to(params.unigram, (batch, *params.unigram.shape)))
    node = jnp.zeros(batch, jnp.int32)
    for token in context.T[::-1]:
        node = _child(params, node, token)
        at = params.first[node][:, None] + jnp.arange(params.width)
        share = jnp.where(at < params.first[node + 1][:, None], params.share[at], 0.0)
        q = params.backoff[node][:, None] * q
        q = q.at[jnp.arange(batch)[:, None], params.follower[at]].add(share)
    return q


def _child(params: NgramParams, node: Rows, token: Array) -> Rows:
    """The node of each context extended by `token` [B] on the left, or the last node."""
    low, end = params.child[node], params.child[node + 1]

    def halve(_: int, span: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = span
        middle = (low + high) // 2
        right = (low < high) & (params.token[middle] < token)
        return jnp.where(right, middle + 1, low), jnp.where(right, high, middle)

    low, _ = lax.fori_loop(0, params.unigram.shape[0].bit_length(), halve, (low, end))
    found = (low < end) & (params.token[low] == token)
    return jnp.where(found, low, params.token.shape[0] - 1)


def count_ngrams(
    sequences: Sequence[np.ndarray],
    order: int,
    vocab_size: int,
    width: int = WIDTH,
    min_count: int = 1,
    start: int = PAD_ID,
    on_progress: OnProgress = lambda what, share: None,
) -> dict[str, np.ndarray]:
    """Counts which tokens follow which contexts of up to `order` - 1 tokens.

    Contexts are numbered breadth first, children of a context by token; 0 is the empty one. A
    context keeps its `width` most frequent followers, if they followed it `min_count` times.
    Sequences are arrays [length] of tokens, each ending with its end-of-sequence token; the token
    `start` is put before each. Memory holds several copies of all tokens and distinct n-grams.

    Returns:
        order []; unigram [V], the count of each token; children [M], the number of contexts that
        extend each one; for every context but the empty one, [M - 1]: token, its leftmost;
        total, how many tokens followed it; distinct, how many different ones; kept, how many of
        these are kept; and for the kept ones, context by context, [E]: follower, the token,
        ascending; count, how often it followed.

    Raises:
        ValueError: there is nothing to count or nothing left, a token is outside the vocabulary,
            the order is not in [1, `LONGEST`], or another argument is below 1.
    """
    _require_order(order)
    for name, value in (("width", width), ("min_count", min_count)):
        if value < 1:
            raise ValueError(f"The {name} of n-grams must be at least 1, not {value}.")
    rows = [sequence for sequence in sequences if len(sequence)]
    if not rows:
        raise ValueError("Counting n-grams needs at least one sequence that is not empty.")
    tokens = np.concatenate(rows)
    for token in (tokens.min(), tokens.max()):
        if not 0 <= token < vocab_size:
            raise ValueError(
                f"Token {token} is outside the vocabulary of {vocab_size} pieces; count tokens "
                "that were made with this vocabulary."
            )
    unigram = np.bincount(tokens, minlength=vocab_size)
    # Each sequence follows the start token, which is not counted.
    before = np.concatenate([np.arange(len(row) + 1) for row in rows])
    text = np.full(len(before), start, np.int32)
    text[before > 0] = tokens

    # A context is a number whose digits are its tokens, in the base of the vocabulary's size, the
    # last one first, so that contexts ascend in the order of their numbers.
    context, shorter = np.zeros(len(text), np.int64), np.zeros(1, np.int64)
    children, levels = [], [[np.zeros(0, np.int64)] * 6]
    for size in range(1, order):
        on_progress("counting n-grams", (size - 1) / (order - 1))
        context = context * vocab_size + np.roll(text, size)
        pairs = (context * vocab_size + text)[before >= size]
        pairs, count = np.unique(pairs, return_counts=True)
        longer, follower = np.divmod(pairs, vocab_size)
        longer, first, distinct = np.unique(longer, return_index=True, return_counts=True)
        total = np.add.reduceat(count, first)
        owner = np.repeat(np.arange(len(longer)), distinct)
        by_count = np.lexsort((-count, owner))
        rank = np.arange(len(count)) - first[owner]
        keep = np.sort(by_count[(count[by_count] >= min_count) & (rank < width)])
        kept = np.bincount(owner[keep], minlength=len(longer))
        # The parent of a context that stays has been seen as often, and stays too.
        stays = kept > 0
        if size == 1 and not stays.any():
            raise ValueError(f"No pair of tokens was seen {min_count} times; lower min_count.")
        parent, token = np.divmod(longer[stays], vocab_size)
        children.append(np.bincount(np.searchsorted(shorter, parent), minlength=len(shorter)))
        shorter = longer[stays]
        columns = [token, total[stays], distinct[stays], kept[stays], follower[keep], count[keep]]
        levels.append(columns)
    children = np.concatenate([*children, np.zeros(len(shorter), np.int64)])
    columns = map(np.concatenate, zip(*levels, strict=True))
    return dict(zip(TABLE.arrays, (np.array(order), unigram, children, *columns), strict=True))


def ngram_params(table: dict[str, np.ndarray], order: int) -> NgramParams:
    """Parameters of an `NgramDraft` of this order from `count_ngrams` of this order or higher.

    Raises:
        ValueError: the order is not in [1, `LONGEST`] or above the table's, or counts contradict
            each other.
    """
    _require_order(order)
    unigram, children, token, total, distinct, kept, follower, count = _columns(table)
    if order > (largest := int(table["order"])):
        raise ValueError(
            f"The table holds n-grams of up to {largest} tokens, not {order}: use order "
            f"{largest}, or count again with --order={order}."
        )
    contexts = 1  # The number of contexts of at most 0, 1, 2 ... tokens.
    for _ in range(order - 1):
        contexts = 1 + int(children[:contexts].sum())
    kept = kept[: contexts - 1]
    owner = np.repeat(np.arange(1, contexts), kept)
    share = count[: len(owner)] / (total + distinct)[owner - 1]
    arrays = {
        "unigram": (unigram + 1) / (unigram + 1).sum(),
        "token": np.pad(token[: contexts - 1], 1),
        "child": np.r_[1, children[:contexts], 0].cumsum().clip(max=contexts),
        "backoff": 1.0 - np.bincount(owner, share, minlength=contexts + 1),
        "first": np.r_[0, 0, kept, 0].cumsum(),
        "follower": follower[: len(owner)],
        "share": share,
    }
    # `jnp.asarray` would compile a program for each shape.
    return NgramParams(**jax.device_put(arrays), width=int(kept.max(initial=0)))


def load(path: str | pathlib.Path, vocabulary: Vocabulary, order: int) -> NgramParams:
    """Parameters of an `NgramDraft` of this order, from counts that `TABLE.save` wrote.

    Raises:
        ValueError: see `FileKind.loaded` and `ngram_params`; or the number of pieces differs.
    """
    with TABLE.loaded(path, vocabulary) as table:
        params = ngram_params(table, order)
        if (size := len(table["unigram"])) != vocabulary.size:
            raise ValueError(
                f"The counts are of {size} pieces, but {vocabulary.path} has {vocabulary.size}; "
                f"count again with it ({COMMAND})."
            )
        return params


def _columns(table: dict[str, np.ndarray]) -> list[np.ndarray]:
    """The counts; raises ValueError unless types, sizes and ranges fit each other.

    Whether q sums to 1 is tested wherever q is used.
    """
    columns = [table[name] for name in COLUMNS]
    fits = all(x.dtype.kind in "iu" and x.ndim == 1 for x in (table["order"][None], *columns))
    if fits:
        columns = [x.astype(np.int64) for x in columns]
        unigram, children, token, total, distinct, kept, follower, count = columns
        sizes = {len(children) - 1, children.sum(), *map(len, (token, total, distinct, kept))}
        fits = len(sizes) == 1 and kept.sum() == len(follower) == len(count)
        fits &= min(x.min(initial=0) for x in columns) >= 0
        fits &= max(token.max(initial=0), follower.max(initial=0)) < len(unigram)
    if not fits:
        raise ValueError(f"The counts contradict each other; count again with {COMMAND}.")
    return columns


def _require_order(order: int) -> None:
    if not 1 <= order <= LONGEST:
        raise ValueError(f"The order of n-grams must lie in [1, {LONGEST}], not {order}.")
