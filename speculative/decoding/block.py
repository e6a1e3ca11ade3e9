"""Block verification: the guesses of a step are verified together (Sun et al., arXiv 2403.10444).

This is Algorithm 2 there. Let p_0 = 1, and let p_i = min(1, p_(i-1) p(x_i) / q(x_i)) be the
probability with which the first i guesses are kept as a block. Given these guesses, Z_i = sum over
x of max(0, p_i p(x) - q(x)) is the mass of the target left after them. i guesses pass with
probability h_i = Z_i / (Z_i + 1 - p_i), or 1 where that is 0/0; the largest i that passes is
accepted. After the last guess q is 0, so h is p_i there.
"""

import jax.numpy as jnp
import numpy as np
from jax import Array

from speculative.decoding.reference import draw


def kept(guesses: Array, p: Array, q: Array) -> tuple[Array, Array]:
    """The arrays of p_i and h_i for 0 to G guesses, both [B, G + 1].

    Guesses are [B, G]; p and q [B, G + 1, V] are standardised, and q is 0 after the last guess.
    """
    chosen = guesses[..., None]
    p_guess = jnp.take_along_axis(p[:, :-1], chosen, axis=-1)[..., 0]
    q_guess = jnp.take_along_axis(q[:, :-1], chosen, axis=-1)[..., 0]
    whole = [jnp.ones(len(guesses), p.dtype)]
    for i in range(guesses.shape[1]):
        joint = whole[-1] * p_guess[:, i]
        certain = (joint >= q_guess[:, i]) & (joint > 0)
        whole.append(jnp.where(certain, 1.0, joint / jnp.where(joint > 0, q_guess[:, i], 1.0)))
    kept = jnp.stack(whole, axis=1)
    left = jnp.maximum(kept[..., None] * p - q, 0.0).sum(axis=-1)
    total = left + (1 - kept)
    return kept, jnp.where(total > 0, left / jnp.where(total > 0, total, 1.0), 1.0)


def largest(passed: Array) -> Array:
    """The largest number of guesses that passes, even if fewer fail: [B, G] -> [B] int32."""
    sizes = jnp.arange(1, passed.shape[1] + 1)
    return jnp.max(jnp.where(passed, sizes, 0), axis=1, initial=0)


def verify_reference(
    guesses: list[int], p: np.ndarray, q: np.ndarray, r: np.ndarray, correct: np.ndarray
) -> tuple[int, int]:
    """The number of accepted guesses and the token after them, as from `reference.verify`.

    Entry i of r [G] tests the first i + 1 guesses.
    """
    whole, passes = [1.0], []
    for i, guess in enumerate(guesses):
        joint = whole[-1] * p[i, guess]
        whole.append(min(1.0, joint / q[i, guess]) if joint else 0.0)
    for i, own in enumerate(whole):
        left = np.maximum(own * p[i] - q[i], 0.0).sum() if i < len(guesses) else own
        total = left + 1 - own
        passes.append(left / total if total else 1.0)
    n = max([i for i in range(1, len(whole)) if r[i - 1] < passes[i]], default=0)
    left = np.maximum(whole[n] * p[n] - q[n], 0.0) if n < len(guesses) else p[n]
    return n, draw(left if left.sum() > 0 else p[n], correct[n])
