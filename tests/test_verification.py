"""Algorithm 1's arithmetic against the algorithm itself, line by line in float64 NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from speculative.verification import (
    acceptance,
    leading,
    lenient_best,
    residual,
    verify,
    verify_greedy,
)

VOCABULARY = 6
verified = jax.jit(verify, static_argnames="lenience")


def algorithm_1(
    guesses: np.ndarray,
    p: np.ndarray,
    q: np.ndarray,
    r: np.ndarray,
    u: np.ndarray,
    lenience: float,
) -> tuple[int, int]:
    """One row: [G], [G + 1, V], [G, V], [G], [G + 1] -> accepted, next token."""
    gamma = len(guesses)
    q = lenience * q
    # n = min({i - 1 | r_i > p_i(x) / (l q_i(x))} and gamma)
    rejected = [
        i
        for i in range(gamma)
        if q[i, guesses[i]] > 0 and r[i] >= p[i, guesses[i]] / q[i, guesses[i]]
    ]
    n = min([*rejected, gamma])
    # p' = norm(max(0, p_{n+1} - l q_{n+1})), or p_{n+1} itself beyond the last guess.
    weights = np.maximum(0, p[n] - q[n]) if n < gamma else p[n]
    weights = weights / weights.sum()
    return n, int(np.searchsorted(np.cumsum(weights), u[n], side="right"))


def random_case(seed: int, rows: int, gamma: int) -> tuple[np.ndarray, ...]:
    """Guesses drawn from q, distributions with zeros in them, and random numbers; float32."""
    rng = np.random.default_rng(seed)
    p = rng.dirichlet(np.full(VOCABULARY, 0.5), (rows, gamma + 1))
    q = rng.dirichlet(np.full(VOCABULARY, 0.5), (rows, gamma))
    q = np.where(rng.random((rows, 1, 1)) < 0.5, 0.2 * q + 0.8 * p[:, :-1], q)
    p[rng.random(p.shape) < 0.15] = 0.0
    q[rng.random(q.shape) < 0.15] = 0.0
    p[..., 0] += 1e-3
    q[..., -1] += 1e-3
    p /= p.sum(axis=-1, keepdims=True)
    q /= q.sum(axis=-1, keepdims=True)
    chosen = rng.random((rows, gamma, 1))
    guesses = np.minimum((q.cumsum(axis=-1) <= chosen).sum(axis=-1), VOCABULARY - 1)
    r, u = rng.random((rows, gamma)), rng.random((rows, gamma + 1))
    return (guesses.astype(np.int32), *(x.astype(np.float32) for x in (p, q, r, u)))


@pytest.mark.parametrize("lenience", [1.0, 0.5, 0.3, 0.1])
@pytest.mark.parametrize("gamma", [1, 4, 7])
def test_verify_is_algorithm_1(gamma: int, lenience: float) -> None:
    case = random_case(gamma, 2000, gamma)
    accepted, token = (np.asarray(x) for x in verified(*case, lenience=lenience))
    wide = [x.astype(np.float64) if x.dtype == np.float32 else x for x in case]
    expected = np.array([algorithm_1(*row, lenience=lenience) for row in zip(*wide, strict=True)])
    np.testing.assert_array_equal(accepted, expected[:, 0])
    np.testing.assert_array_equal(token, expected[:, 1])
    # All the ways to go were taken.
    assert set(accepted.tolist()) == set(range(gamma + 1))


@pytest.mark.parametrize("lenience", [1.0, 0.7, 0.3, 0.05])
def test_a_tested_guess_emits_the_law_of_appendix_a5(lenience: float) -> None:
    """min(q, p / l) + (1 - beta) / (1 - l beta) max(0, p - l q), over a grid of random numbers."""
    _, p, q, _, _ = random_case(5, 8, 1)
    grid = ((np.arange(4096) + 0.5) / 4096).astype(np.float32)

    def shares(p: np.ndarray, q: np.ndarray, r: np.ndarray, u: np.ndarray, guess: int) -> tuple:
        """Of a grid [N]: the share accepted, and the shares [V] of the next tokens."""
        rows = [np.broadcast_to(x, (len(grid), *x.shape)) for x in (p, q)]
        guesses = np.full((len(grid), 1), guess, np.int32)
        two = np.stack([u, u], axis=1)
        accepted, token = verified(guesses, *rows, r[:, None], two, lenience=lenience)
        counts = np.bincount(np.asarray(token), minlength=VOCABULARY)
        return np.asarray(accepted).mean(), counts / len(grid)

    never, half = np.full_like(grid, 1 - 2**-24), np.full_like(grid, 0.5)
    for p_row, q_row in zip(p, q, strict=True):
        law = np.zeros(VOCABULARY)
        for guess in np.flatnonzero(q_row[0]).tolist():
            accepted, _ = shares(p_row, q_row, grid, half, guess)
            rejected, correction = shares(p_row, q_row, never, grid, guess)
            law[guess] += q_row[0, guess] * accepted
            if accepted < 1:
                assert rejected == 0
                law += q_row[0, guess] * (1 - accepted) * correction
        p_here, q_here = p_row[0].astype(np.float64), q_row[0].astype(np.float64)
        beta = np.minimum(p_here / lenience, q_here).sum()
        left = np.maximum(0, p_here - lenience * q_here)
        closed = np.minimum(q_here, p_here / lenience) + (1 - beta) / (1 - lenience * beta) * left
        np.testing.assert_allclose(law, closed, atol=2e-3)
        assert (closed <= p_here / lenience + 1e-9).all()
        np.testing.assert_allclose(acceptance(p_here, q_here, lenience), beta, rtol=1e-5)


def uniform_rows(*rows: list[float]) -> Array:
    return jnp.asarray([rows], jnp.float32)


def test_equal_distributions_always_accept() -> None:
    guesses, p, _, _, u = random_case(0, 500, 4)
    guesses = p[:, :-1].argmax(axis=-1).astype(np.int32)
    almost_one = np.full((500, 4), 1 - 2**-24, np.float32)
    accepted, _ = verified(guesses, p, p[:, :-1], almost_one, u)
    assert (accepted == 4).all()


def test_a_guess_the_target_never_says_is_never_accepted() -> None:
    p, q = uniform_rows([0.0, 1.0], [1.0, 0.0]), uniform_rows([1.0, 0.0])
    accepted, token = verified(jnp.array([[0]]), p, q, jnp.zeros((1, 1)), jnp.full((1, 2), 0.9))
    assert (accepted.item(), token.item()) == (0, 1)


def test_a_guess_of_probability_zero_needs_no_division() -> None:
    """Both may underflow: q = 0 accepts what the target may say, and nothing else."""
    p, q = uniform_rows([0.25, 0.75], [0.0, 1.0]), uniform_rows([0.0, 1.0])
    almost_one = jnp.full((1, 1), 1 - 2**-24)
    accepted, token = verified(jnp.array([[0]]), p, q, almost_one, jnp.zeros((1, 2)))
    assert (accepted.item(), token.item()) == (1, 1)
    p = uniform_rows([0.0, 1.0], [1.0, 0.0])
    accepted, token = verified(jnp.array([[0]]), p, q, jnp.zeros((1, 1)), jnp.zeros((1, 2)))
    assert (accepted.item(), token.item()) == (0, 1)


def test_where_no_residual_is_left_the_target_speaks() -> None:
    """A q that rounding lifted to p or above: the draw is the target's, never NaN or token 0."""
    p = jnp.array([[0.0, 0.0, 1.0], [0.25, 0.25, 0.5]])
    q = jnp.array([[0.0, 0.0, 1.0], [0.25 + 2**-20, 0.25, 0.5]])
    np.testing.assert_array_equal(residual(p, q), p)


def test_a_residual_that_underflows_is_one_of_its_own_tokens() -> None:
    """Differences of an ulp or less than the smallest normal number still name a token."""
    tiny = np.float32(2**-126)
    p = np.array([[[0.5, 0.5 - tiny, 0.0, tiny], [0.25] * 4]], np.float32)
    for q_row in ([0.5 + 2**-24, 0.5, 0.0, 0.0], [0.5, 0.5 - 2**-25, 0.0, 0.0]):
        q = np.array([[q_row]], np.float32)
        left = np.maximum(p[:, 0] - q[:, 0], 0)
        for u in (0.0, 0.5, 1 - 2**-24):
            _, token = verified(
                np.array([[2]], np.int32), p, q, np.full((1, 1), 0.5, np.float32),
                np.full((1, 2), u, np.float32),
            )  # fmt: skip
            assert left[0, token.item()] > 0


def test_residual_is_the_positive_part() -> None:
    p = jnp.array([0.5, 0.25, 0.25, 0.0])
    q = jnp.array([0.125, 0.5, 0.25, 0.125])
    np.testing.assert_array_equal(residual(p, q), [0.375, 0.0, 0.0, 0.0])


def test_acceptance_is_one_minus_the_distance() -> None:
    """Definition 3.1 and equations 3.2 to 3.5: D = sum |p - (p + q) / 2|."""
    _, p, q, _, _ = random_case(9, 100, 4)
    p = p[:, :-1].astype(np.float64)
    distance = np.abs(p - (p + q) / 2).sum(axis=-1)
    beta = acceptance(jnp.asarray(p, jnp.float32), jnp.asarray(q))
    np.testing.assert_allclose(beta, 1 - distance, rtol=1e-5)


def test_leading_stops_at_the_first_false() -> None:
    every = np.array([[(i >> k) & 1 for k in range(4)] for i in range(16)], bool)
    expected = [([*row.tolist(), False]).index(False) for row in every]
    np.testing.assert_array_equal(leading(jnp.asarray(every)), expected)


@pytest.mark.parametrize("gamma", [1, 4])
def test_verify_greedy_is_verify_on_one_hots(gamma: int) -> None:
    rng = np.random.default_rng(gamma)
    best = rng.integers(0, VOCABULARY, (300, gamma + 1)).astype(np.int32)
    guesses = np.where(rng.random((300, gamma)) < 0.7, best[:, :-1], 0).astype(np.int32)
    r, u = (rng.random((300, n)).astype(np.float32) for n in (gamma, gamma + 1))
    one_hot = np.eye(VOCABULARY, dtype=np.float32)
    expected = verified(guesses, one_hot[best], one_hot[guesses], r, u)
    got_pair = verify_greedy(jnp.asarray(guesses), jnp.asarray(best))
    for got, want in zip(got_pair, expected, strict=True):
        np.testing.assert_array_equal(got, want)
    assert set(np.asarray(expected[0]).tolist()) == set(range(gamma + 1))


@pytest.mark.parametrize("lenience", [0.5, 0.1])
def test_lenient_argmax(lenience: float) -> None:
    """A guess stands while p(x) >= l max p; then the argmax follows."""
    rng = np.random.default_rng(6)
    logits = rng.normal(0.0, 1.5, (500, 4, VOCABULARY)).astype(np.float32)
    logits[::7, :, 2] = -np.inf
    guesses = rng.integers(0, VOCABULARY, (500, 3)).astype(np.int32)
    guesses = np.where(rng.random((500, 3)) < 0.5, logits[:, :-1].argmax(axis=-1), guesses)
    best = logits.argmax(axis=-1)
    lenient = lenient_best(jnp.asarray(guesses), jnp.asarray(best), jnp.asarray(logits), lenience)
    exact = verify_greedy(jnp.asarray(guesses), jnp.asarray(best))
    accepted, token = verify_greedy(jnp.asarray(guesses), lenient)
    p = np.exp(logits.astype(np.float64))
    p /= p.sum(axis=-1, keepdims=True)
    for row in range(500):
        n = 0
        while n < 3 and p[row, n, guesses[row, n]] >= lenience * p[row, n].max():
            n += 1
        assert (accepted[row], token[row]) == (n, best[row, n])
    assert (np.asarray(accepted) > exact[0]).any()
