"""Algorithm 1's arithmetic: accept, correct, and the bonus token. Pure, float32.

Leviathan et al., arXiv 2211.17192, section 2.3. All functions take a batch of rows; random
numbers are arguments. Lenience l in (0, 1] (appendix A.5) puts l q in the place of q: more guesses
stand, and no token is likelier than p / l. At l = 1 decoding is exact.
"""

import math

import jax.numpy as jnp
from jax import Array

from speculative.sampling import categorical, first


def acceptance(p: Array, q: Array, lenience: float = 1.0) -> Array:
    """beta, the chance that a guess from q is accepted against p: sum min(p / l, q) over V.

    Definition 3.1, equations 3.2 to 3.5 and appendix A.5: [..., V], [..., V] -> [...].
    """
    return jnp.minimum(p / lenience, q).sum(axis=-1)


def near_best(logits: Array, lenience: float) -> Array:
    """The tokens with p(x) >= l max p, where p is the softmax: [..., V] -> [..., V] bool.

    What stands for an argmax (A.5; the paper prints <=, a slip). Logits tell, without softmax.
    """
    return logits - logits.max(axis=-1, keepdims=True) >= math.log(lenience)


def lenient_best(guesses: Array, best: Array, logits: Array, lenience: float) -> Array:
    """`best` [B, G + 1] for `verify_greedy`, with a guess in its place where that is `near_best`.

    Args:
        guesses: [B, G] tokens.
        best: [B, G + 1] the target's argmax at each position.
        logits: [B, G + 1, V] of the target.
        lenience: l.
    """
    near = near_best(logits[:, :-1], lenience)
    stands = jnp.take_along_axis(near, guesses[..., None], axis=-1)[..., 0]
    return best.at[:, :-1].set(jnp.where(stands, guesses, best[:, :-1]))


def residual(p: Array, q: Array) -> Array:
    """What a rejected guess leaves to sample from: max(0, p - q), not normalised, [..., V].

    Where nothing is left (p equals q up to rounding, so a rejection had next to no chance) it
    is p itself, which keeps the draw well-defined.
    """
    left = jnp.maximum(p - q, 0.0)
    return jnp.where(left.sum(axis=-1, keepdims=True) > 0, left, p)


def leading(accepted: Array) -> Array:
    """The number of leading True values: [B, G] -> [B] int32."""
    return first(~accepted)


def verify(
    guesses: Array,
    p: Array,
    q: Array,
    accept_uniform: Array,
    correct_uniform: Array,
    lenience: float = 1.0,
) -> tuple[Array, Array]:
    """Accepts a prefix of the guesses and draws the token that follows it.

    Guess x_i is accepted with probability min(1, p_i(x_i) / (l q_i(x_i))), tested as
    r l q < p so that q = 0 needs no division and p = 0 is never accepted. The next token comes
    from the residual at the first rejection, or from the target's last distribution.

    Args:
        guesses: [B, G] tokens drawn from q.
        p: [B, G + 1, V] target probabilities, standardised.
        q: [B, G, V] draft probabilities, standardised.
        accept_uniform: [B, G] in [0, 1), one a guess.
        correct_uniform: [B, G + 1] in [0, 1), one a position; that of the next token is used.
        lenience: l.

    Returns:
        accepted [B], between 0 and G; next_token [B].
    """
    p_guess = jnp.take_along_axis(p[:, :-1], guesses[..., None], axis=-1)[..., 0]
    q_guess = jnp.take_along_axis(q, guesses[..., None], axis=-1)[..., 0]
    accepted = leading(accept_uniform * (lenience * q_guess) < p_guess)
    at = accepted[:, None, None]
    p_next = jnp.take_along_axis(p, at, axis=1)[:, 0]
    # Beyond the last guess there is nothing to subtract: q = 0 gives the bonus token from p.
    q_next = jnp.take_along_axis(jnp.pad(q, ((0, 0), (0, 1), (0, 0))), at, axis=1)[:, 0]
    uniform = jnp.take_along_axis(correct_uniform, accepted[:, None], axis=1)[:, 0]
    return accepted, categorical(residual(p_next, lenience * q_next), uniform)


def verify_greedy(guesses: Array, best: Array) -> tuple[Array, Array]:
    """`verify` where every distribution is one-hot: a guess stands if it is the argmax.

    Args:
        guesses: [B, G] tokens.
        best: [B, G + 1] the target's argmax at each position.

    Returns:
        accepted [B]; next_token [B].
    """
    accepted = leading(guesses == best[:, :-1])
    return accepted, jnp.take_along_axis(best, accepted[:, None], axis=1)[:, 0]
