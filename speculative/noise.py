"""Gumbel noise that is fixed for each token at each position of a text, whichever model uses it.

The token x with the greatest log p(x) + g(x) is distributed as p if the g(x) are independent and
have Gumbel's distribution, P(g < y) = exp(-exp(-y)) (Gumbel, 1954; Maddison et al., 2014). Noise is
keyed by (seed, example, position, token), folded in one after the other like `jax.random.fold_in`,
so a vocabulary that is padded, or sharded over chips, has the same noise.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.random import threefry_2x32

from speculative.backends.cpu import kernels
from speculative.types import Rows


def keys_of(seed: int, examples: Array | np.ndarray) -> Array:
    """The keys of texts, [B, 2] uint32, from the numbers of their examples [B]."""
    return _keys_of(np.uint32(seed), examples)


@jax.jit
def _keys_of(seed: Array, examples: Array) -> Array:
    key = jax.random.key_data(jax.random.key(seed, impl="threefry2x32"))
    return _fold(key[None], examples.astype(jnp.uint32))


def gumbel(keys: Array, lengths: Rows, positions: int, vocab_size: int) -> Array:
    """The noise [B, positions, V] at the positions after `lengths` [B] of texts with these keys."""
    at = lengths[:, None].astype(jnp.uint32) + jnp.arange(positions, dtype=jnp.uint32)
    keys = _fold(keys[:, None], at)
    own, other = (functools.partial(f, vocab_size=vocab_size) for f in (kernels.gumbel, _of_keys))
    return kernels.on_cpu(own, other, keys)


def _fold(keys: Array, numbers: Array) -> Array:
    """`jax.random.fold_in` for keys [..., 2]: [..., 2]."""
    return jnp.stack(_words(keys, numbers), axis=-1)


def _words(keys: Array, numbers: Array) -> tuple[Array, Array]:
    """The two words, uint32, of keys [..., 2] folded with numbers, uint32."""
    shape = np.broadcast_shapes(keys.shape[:-1], numbers.shape)
    first, second = (jnp.broadcast_to(keys[..., i], shape) for i in (0, 1))
    words = jax.vmap(lambda a, b, n: threefry_2x32(jnp.stack([a, b]), jnp.stack([n * 0, n])))
    folded = words(first.ravel(), second.ravel(), jnp.broadcast_to(numbers, shape).ravel())
    return folded[:, 0].reshape(shape), folded[:, 1].reshape(shape)


def _of_keys(keys: Array, vocab_size: int) -> Array:
    """The noise [..., V] for positions' keys [..., 2]; `Gumbel` in `kernels.cc` does the same.

    For a uniform number v near 0 the noise is -log v. v has 48 bits, so the greatest noise is 34;
    24 bits would cut it at 17, and a less probable token could never be chosen. A number
    near 1 is represented by its distance to 1, with as many bits.
    """
    tokens = jnp.arange(vocab_size, dtype=jnp.uint32)
    first, second = _words(keys[..., None, :], tokens)
    above = first >> 31 == 1
    first, second = (jnp.where(above, ~word, word) for word in (first, second))
    high = (first >> 8).astype(jnp.int32).astype(jnp.float32)
    low = (((first & 0xFF) << 16) | (second >> 16)).astype(jnp.int32).astype(jnp.float32)
    v = high * 2.0**-24 + (low + 0.5) * 2.0**-48
    return -jnp.log(-jnp.where(above, jnp.log(v), jnp.log1p(-v)))
