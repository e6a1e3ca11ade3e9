"""Trees of guesses, grown level by level (`tree.Growth`)."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array, lax

from speculative.drafts.base import allowed
from speculative.models.interface import Chunk
from speculative.processors import History
from speculative.sampling import Sampling, greatest, greatest_few, log_weights
from speculative.tree import Growth, Tree
from speculative.types import Flags, Guesses, Logits, Rows, State

# The target's choice is the draft's first one more often than the draft's own probability says, at
# temperature 0 as well as with shared noise. Trees grow by this power of the probability.
SHARPER = 1.6


class Level(NamedTuple):
    """Nodes of one depth that a draft reads next, W per row."""

    chunk: Chunk  # Their tokens [B, W], their positions, and which nodes read before they see.
    parents: Array  # [B, W] int32, indices into the level above; arbitrary in the first level.
    paths: Array  # [B, W, D] the tokens from the first guess on; the first `depth` count.
    depth: Array  # Guesses on each path, an integer.


@struct.dataclass
class ReadTree:
    """A model that has read nodes of a tree, `count` of them in each row."""

    model: State
    read_as: Array  # See `Grown`.
    count: Array | int


class Grown(NamedTuple):
    """A tree of guesses."""

    guesses: Guesses  # [B, N]; -1 in rows whose logits are not finite.
    tree: Tree
    read_as: Array  # [B, N] int32, each guess's number among the nodes read; -1 if not read.
    state: State  # The state after the last `read`.


def grow(
    logits: Logits,
    state: State,
    read: Callable[[State, Level], tuple[Logits, State]],
    noise: Array | None,
    sampling: Sampling,
    growth: Growth,
    tokens: np.ndarray | None = None,
    history: History | None = None,
) -> Grown:
    """Grows a tree from logits [B, V] of its first guesses.

    `read` returns the logits [B, W, V] after each node of a level. `noise` [B, D, V] belongs to the
    D positions; it is None if all rows are greedy. Successors are ranked as in `sampling.choose`.
    With `tokens` [V], logits cover those tokens only.
    """
    batch, width, depth = len(logits), growth.WIDTH, growth.depth
    shares = np.array(growth.shares or (1.0,) * growth.BRANCHES, np.float32)
    branches = min(len(shares), logits.shape[-1])
    many, levels = width * branches, np.arange(depth)
    own_noise = None if noise is None else (noise if tokens is None else noise[..., tokens])

    def successors(
        logits: Array, noise: Array | None, paths: Array, count: Array | int, total: Array
    ) -> tuple[Array, Array, Flags]:
        """The likeliest successors of each of K nodes: tokens and their paths' log-likelihoods."""
        if history is not None:
            counts = jnp.full((1, logits.shape[1]), count, jnp.int32)
            logits = allowed(logits, history.process_paths(logits, paths, counts))
        finite = jnp.isfinite(greatest(logits, sampling)).all(axis=1)
        if noise is not None:
            warm = log_weights(logits, sampling) + noise[:, None]
            logits = jnp.where(sampling.cold(3), logits, warm) if sampling.mixed else warm
        best, at = greatest_few(logits, branches)
        if growth.shares is None:
            chances = SHARPER * best - jax.nn.logsumexp(SHARPER * logits, axis=-1, keepdims=True)
        else:
            chances = jnp.where(best > -jnp.inf, jnp.asarray(np.log(shares[:branches])), -jnp.inf)
        found = at if tokens is None else jnp.asarray(tokens)[at]
        likely = total[..., None] + jnp.minimum(jnp.where(finite[:, None, None], chances, 0), 0)
        return found.reshape(batch, -1), likely.reshape(batch, -1), finite

    # The candidates of the first level; there are fewer, because all have one parent.
    paths = jnp.zeros((batch, width, depth), jnp.int32)
    total = jnp.zeros((batch, 1))
    noise_0 = None if own_noise is None else own_noise[:, 0]
    found, likely, finite = successors(logits[:, None], noise_0, paths[:, :1], 0, total)
    more = (0, 0), (0, many - branches)
    found, likely = jnp.pad(found, more), jnp.pad(likely, more, constant_values=-jnp.inf)
    ranks = _ranks(likely)

    def chosen(found: Array, likely: Array, ranks: Array) -> tuple[Array, Array, Array]:
        """The candidates of a level that are read: [B, W] tokens, likelihoods, parents."""
        taken = ranks[:, None] == jnp.arange(width)[:, None]  # [B, W, candidates]
        parents = jnp.asarray(np.arange(many) // branches)
        return _of(taken, found), _of(taken, likely), _of(taken, parents[None])

    positions = jnp.asarray(np.arange(growth.read) // width)[None]
    begun = jnp.arange(growth.read)

    def level(carry: Any, given: tuple[Array, Array | None]) -> Any:
        """Reads the nodes of one depth, and finds the candidates of the next."""
        (state, (found, likely, ranks), seen, paths, finite), (above, noise) = carry, given
        nodes, total, parents = chosen(found, likely, ranks)
        own = begun == above * width + jnp.arange(width)[:, None]  # [W, nodes read]
        of_parent = parents[..., None] == jnp.arange(width)
        seen = jnp.einsum("bwp,bpm->bwm", of_parent * 1.0, seen * 1.0) > 0.5
        seen |= own
        paths = jnp.take_along_axis(paths, parents[..., None], axis=1)
        paths = jnp.where(jnp.arange(depth) == above, nodes[..., None], paths)
        chunk = Chunk(nodes, positions, seen, above * width)
        logits, state = read(state, Level(chunk, parents, paths, above + 1))
        found, likely, fine = successors(logits, noise, paths, above + 1, total)
        candidates = found, likely, _ranks(likely)
        return (state, candidates, seen, paths, finite & fine), candidates

    first = found, likely, ranks
    seen = jnp.zeros((batch, width, growth.read), bool)
    later = None if own_noise is None else own_noise[:, 1:].swapaxes(0, 1)
    found, likely, ranks = (x[:, None] for x in first)
    if depth > 1:
        carry = state, first, seen, paths, finite
        (state, *_, finite), others = lax.scan(level, carry, (jnp.asarray(levels[:-1]), later))
        found, likely, ranks = (
            jnp.concatenate([one[:, None], more.swapaxes(0, 1)], axis=1)
            for one, more in zip(first, others, strict=True)
        )  # [B, D, candidates]

    # A node's place is after its parent's, which is likelier or, if equally likely, comes first.
    places = 1 + _ranks(likely.reshape(batch, -1)).reshape(likely.shape)
    of_slot = ranks[:, :, None] == jnp.arange(width)[:, None]  # [B, D, W, candidates]
    slots = jnp.where(of_slot, places[:, :, None], 0).sum(axis=-1)
    parents = jnp.pad(jnp.repeat(slots, branches, axis=2)[:, :-1], ((0, 0), (1, 0), (0, 0)))
    is_read = (ranks < width) & (levels < depth - 1)[:, None]
    read_as = jnp.where(is_read, levels[:, None] * width + ranks, -1)
    by_rank = jnp.broadcast_to(jnp.asarray(np.arange(many) % branches), likely.shape)
    whole = (x.reshape(batch, -1) for x in (found, parents, read_as, by_rank))
    taken = places.reshape(batch, 1, -1) == 1 + jnp.arange(growth.nodes)[:, None]
    guesses, parents, read_as, by_rank = (_of(taken, x) for x in whole)
    guesses = jnp.where(finite[:, None], guesses, -1)
    return Grown(guesses, Tree(parents, by_rank, depth), read_as, state)


def _ranks(likely: Array) -> Array:
    """The rank of each of [B, K]: how many are greater, or equal and before it."""
    at = jnp.arange(likely.shape[1])
    one, other = likely[:, :, None], likely[:, None]
    before = (other > one) | ((other == one) & (at < at[:, None]))
    return before.sum(axis=-1, dtype=jnp.int32)


def _of(taken: Flags, values: Array) -> Array:
    """Selects values [B or 1, K] by flags [B, n, K]: [B, n]; 0 where none is taken."""
    return jnp.where(taken, values[:, None], 0).sum(axis=-1)


def as_tree(guesses: Guesses, growth: Growth) -> tuple[Guesses, Tree]:
    """A chain [B, D] as a tree of `growth.nodes` guesses, padded with copies of the first."""
    batch, depth = guesses.shape
    more = growth.nodes - depth
    filled = jnp.concatenate([guesses, jnp.repeat(guesses[:, :1], more, axis=1)], axis=1)
    parents = jnp.asarray(np.pad(np.arange(depth), (0, more)), jnp.int32)
    parents = jnp.broadcast_to(parents, (batch, growth.nodes))
    return filled, Tree(parents, 0 * parents, depth)


def nodes_read(read_as: Array, path: Array, accepted: Rows) -> tuple[Array, Rows]:
    """The nodes that were read on an accepted path [B, D + 1]: their numbers [B, D] and count [B].

    Only the last node of a path may be unread.
    """
    numbers = jnp.take_along_axis(read_as, jnp.maximum(path[:, 1:] - 1, 0), axis=1)
    on_path = jnp.arange(numbers.shape[1]) < accepted[:, None]
    return jnp.maximum(numbers, 0), (on_path & (numbers >= 0)).sum(axis=1)
