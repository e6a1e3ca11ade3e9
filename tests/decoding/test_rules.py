"""Algorithm 1's arithmetic against the algorithm itself, line by line in float64 NumPy."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from speculative.decoding.rule import EXACT, Rule, Token, leading, residual, verify
from speculative.decoding.rules import Block, Simulated, select
from speculative.sampling import Sampling

VOCABULARY = 6
verified = jax.jit(verify, static_argnames="lenience")


@functools.partial(jax.jit, static_argnames=("rule", "sampling"))
def verified_by(rule: Rule, guesses, logits, q, sampling: Sampling, uniforms):
    """One compiled program: operation by operation takes ten times as long."""
    return rule.verify(guesses, logits, q, sampling, uniforms)


def algorithm_1(
    guesses: np.ndarray, p: np.ndarray, q: np.ndarray, r: np.ndarray, u: np.ndarray, lenience: float
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
    # Every number of accepted guesses occurred.
    assert set(accepted.tolist()) == set(range(gamma + 1))


@pytest.mark.parametrize("lenience", [1.0, 0.7, 0.3, 0.05])
def test_a_tested_guess_has_the_distribution_of_appendix_a5(lenience: float) -> None:
    """min(q, p / l) + (1 - beta) / (1 - l beta) max(0, p - l q), over a grid of random numbers."""
    _, p, q, _, _ = random_case(5, 8, 1)
    grid = ((np.arange(4096) + 0.5) / 4096).astype(np.float32)

    def shares(p: np.ndarray, q: np.ndarray, r: np.ndarray, u: np.ndarray, guess: int) -> tuple:
        """Over a grid [N]: the share accepted, and the shares [V] of the next tokens."""
        rows = [np.broadcast_to(x, (len(grid), *x.shape)) for x in (p, q)]
        guesses = np.full((len(grid), 1), guess, np.int32)
        two = np.stack([u, u], axis=1)
        accepted, token = verified(guesses, *rows, r[:, None], two, lenience=lenience)
        counts = np.bincount(np.asarray(token), minlength=VOCABULARY)
        return np.asarray(accepted).mean(), counts / len(grid)

    never, half = np.full_like(grid, 1 - 2**-24), np.full_like(grid, 0.5)
    for p_row, q_row in zip(p, q, strict=True):
        found = np.zeros(VOCABULARY)
        for guess in np.flatnonzero(q_row[0]).tolist():
            accepted, _ = shares(p_row, q_row, grid, half, guess)
            rejected, correction = shares(p_row, q_row, never, grid, guess)
            found[guess] += q_row[0, guess] * accepted
            if accepted < 1:
                assert rejected == 0
                found += q_row[0, guess] * (1 - accepted) * correction
        p_here, q_here = p_row[0].astype(np.float64), q_row[0].astype(np.float64)
        beta = np.minimum(p_here / lenience, q_here).sum()
        left = np.maximum(0, p_here - lenience * q_here)
        closed = np.minimum(q_here, p_here / lenience) + (1 - beta) / (1 - lenience * beta) * left
        np.testing.assert_allclose(found, closed, atol=2e-3)
        assert (closed <= p_here / lenience + 1e-9).all()
        got = Token(lenience).acceptance(jnp.log(p_row[0]), q_row[0], Sampling())
        np.testing.assert_allclose(got, beta, rtol=1e-5)


def uniform_rows(*rows: list[float]) -> Array:
    return jnp.asarray([rows], jnp.float32)


def test_equal_distributions_always_accept() -> None:
    guesses, p, _, _, u = random_case(0, 500, 4)
    guesses = p[:, :-1].argmax(axis=-1).astype(np.int32)
    almost_one = np.full((500, 4), 1 - 2**-24, np.float32)
    accepted, _ = verified(guesses, p, p[:, :-1], almost_one, u)
    assert (accepted == 4).all()


@pytest.mark.parametrize(
    ("p", "q", "r", "accepted"),
    [
        ([0.0, 1.0], [1.0, 0.0], 0.0, 0),
        # Both may underflow, and there is no division by q.
        ([0.25, 0.75], [0.0, 1.0], 1 - 2**-24, 1),
        ([0.0, 1.0], [0.0, 1.0], 0.0, 0),
    ],
)
def test_guesses_of_probability_zero(
    p: list[float], q: list[float], r: float, accepted: int
) -> None:
    """They are accepted if and only if the target's is positive."""
    after = [0.0, 1.0] if accepted else [1.0, 0.0]
    given = uniform_rows(p, after), uniform_rows(q), jnp.full((1, 1), r), jnp.full((1, 2), 0.9)
    found = verified(jnp.array([[0]]), *given)
    assert (found[0].item(), found[1].item()) == (accepted, 1)


def test_a_residual_of_zero_gives_way_to_p() -> None:
    """If rounding lifted q to p or above, the draw is from p, never NaN or token 0."""
    p = jnp.array([[0.0, 0.0, 1.0], [0.25, 0.25, 0.5]])
    q = jnp.array([[0.0, 0.0, 1.0], [0.25 + 2**-20, 0.25, 0.5]])
    np.testing.assert_array_equal(residual(p, q), p)


def test_a_tiny_residual_gives_one_of_its_own_tokens() -> None:
    """Differences of one ulp, or below the smallest normal number, still give a token."""
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
    beta = EXACT.acceptance(jnp.log(jnp.asarray(p)), jnp.asarray(q), Sampling())
    np.testing.assert_allclose(beta, 1 - distance, rtol=1e-5)


def test_leading_stops_at_the_first_false() -> None:
    every = np.array([[(i >> k) & 1 for k in range(4)] for i in range(16)], bool)
    expected = [([*row.tolist(), False]).index(False) for row in every]
    np.testing.assert_array_equal(leading(jnp.asarray(every)), expected)


def by_rule(rule: Token, guesses: np.ndarray, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A rule's result at temperature 0, where it needs neither q nor random numbers."""
    uniforms = jnp.zeros((*logits.shape[:2], 3))
    found = verified_by(rule, guesses, logits, None, Sampling(0.0), uniforms)
    return np.asarray(found[0]), np.asarray(found[1])


@pytest.mark.parametrize("gamma", [1, 4])
def test_at_temperature_0_a_rule_is_algorithm_1_on_one_hots(gamma: int) -> None:
    rng = np.random.default_rng(gamma)
    logits = rng.normal(size=(300, gamma + 1, VOCABULARY)).astype(np.float32)
    best = logits.argmax(axis=-1).astype(np.int32)
    guesses = np.where(rng.random((300, gamma)) < 0.7, best[:, :-1], 0).astype(np.int32)
    r, u = (rng.random((300, n)).astype(np.float32) for n in (gamma, gamma + 1))
    one_hot = np.eye(VOCABULARY, dtype=np.float32)
    expected = verified(guesses, one_hot[best], one_hot[guesses], r, u)
    for got, want in zip(by_rule(Token(), guesses, logits), expected, strict=True):
        np.testing.assert_array_equal(got, want)
    assert set(np.asarray(expected[0]).tolist()) == set(range(gamma + 1))


@pytest.mark.parametrize("lenience", [0.5, 0.1])
def test_lenient_argmax(lenience: float) -> None:
    """Guesses are accepted while p(x) >= l max p; then the argmax follows."""
    rng = np.random.default_rng(6)
    logits = rng.normal(0.0, 1.5, (500, 4, VOCABULARY)).astype(np.float32)
    logits[::7, :, 2] = -np.inf
    guesses = rng.integers(0, VOCABULARY, (500, 3)).astype(np.int32)
    guesses = np.where(rng.random((500, 3)) < 0.5, logits[:, :-1].argmax(axis=-1), guesses)
    best = logits.argmax(axis=-1)
    exact, _ = by_rule(Token(), guesses, logits)
    accepted, token = by_rule(Token(lenience), guesses, logits)
    p = np.exp(logits.astype(np.float64))
    p /= p.sum(axis=-1, keepdims=True)
    for row in range(500):
        n = 0
        while n < 3 and p[row, n, guesses[row, n]] >= lenience * p[row, n].max():
            n += 1
        assert (accepted[row], token[row]) == (n, best[row, n])
    assert (accepted > exact).any()


SAMPLINGS = [Sampling(0.0), Sampling(1.0), Sampling(0.7, top_k=3), Sampling(1.3, top_p=0.8)]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize(
    "rule", [Token(), Token(0.3), Block(), Simulated(0.6), Simulated(0.6, Block())]
)
def test_a_rule_is_its_float64_reference(
    rule: Rule, sampling: Sampling, deterministic: bool
) -> None:
    guesses, p, q, _, _ = random_case(8, 400, 4)
    logits = np.log(np.maximum(p, 1e-30)) + 3
    uniforms = jnp.asarray(np.random.default_rng(0).random((400, 5, 3)), jnp.float32)
    given = None if deterministic else jnp.asarray(q)
    got = verified_by(rule, guesses, logits, given, sampling, uniforms)
    q64 = [None] * len(guesses) if deterministic else q.astype(np.float64)
    wide = logits.astype(np.float64), q64, np.asarray(uniforms, np.float64)
    want = [
        rule.verify_reference(row[0].tolist(), row[1], row[2], sampling, row[3])
        for row in zip(guesses, *wide, strict=True)
    ]
    np.testing.assert_array_equal(np.stack(got, axis=1), want)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kind", [Token, Block])
def test_a_rule_without_a_twin_is_asked_for_its_device_form(
    kind: type[Rule], deterministic: bool
) -> None:
    single = type("Single", (kind,), {"verify_reference": Rule.verify_reference})()
    guesses, p, q, _, _ = random_case(8, 20, 4)
    logits, uniforms = np.log(np.maximum(p, 1e-30)), np.random.default_rng(0).random((20, 5, 3))
    for row in range(20):
        own = None if deterministic else q[row].astype(np.float64)
        given = guesses[row].tolist(), logits[row], own, Sampling(), uniforms[row]
        assert single.verify_reference(*given) == kind().verify_reference(*given)


@pytest.mark.parametrize("rule", [Token(), Token(0.3), Block()])
def test_no_guess_is_accepted_from_minus_one_on(rule: Rule) -> None:
    """At T = 0 the result is the reference's without the guesses from a -1 on."""
    sampling = Sampling(0.0)
    guesses, p, _, _, _ = random_case(9, 600, 4)
    logits = jnp.log(np.maximum(p, 1e-30))
    uniforms = jnp.asarray(np.random.default_rng(1).random((600, 5, 3)), jnp.float32)
    limits = np.arange(600) % 5
    kept = np.arange(4) < limits[:, None]
    masked = jnp.where(kept, guesses, -1)
    got = verified_by(rule, masked, logits, None, sampling, uniforms)
    assert (np.asarray(got[0]) == limits).any()
    wide = (np.asarray(x, np.float64) for x in (logits, uniforms))
    want = [
        rule.verify_reference(row[:n].tolist(), x[: n + 1], None, sampling, u[: n + 1])
        for n, row, x, u in zip(limits, guesses, *wide, strict=True)
    ]
    np.testing.assert_array_equal(np.stack(got, axis=1), want)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_a_rules_acceptance_is_the_share_of_guesses_that_it_accepts(sampling: Sampling) -> None:
    """40,000 guesses from q at one position; within five standard errors (2e-6 by chance)."""
    for rule in (Token(), Token(0.4), Block(), Simulated(0.35)):
        rng = np.random.default_rng(4)
        logits = rng.normal(size=(2, VOCABULARY)).astype(np.float32)
        q = rng.dirichlet(np.ones(VOCABULARY)).astype(np.float32)
        guesses = rng.choice(VOCABULARY, (40_000, 1), p=q / q.sum())
        rows = [np.broadcast_to(x, (40_000, *x.shape)) for x in (logits, q[None])]
        uniforms = jnp.asarray(rng.random((40_000, 2, 3)), jnp.float32)
        accepted, _ = verified_by(rule, guesses, *rows, sampling, uniforms)
        beta = float(rule.acceptance(jnp.asarray(logits[0]), jnp.asarray(q), sampling))
        error = np.sqrt(beta * (1 - beta) / 40_000)
        assert abs(np.asarray(accepted).mean() - beta) <= 5 * error


@pytest.mark.parametrize("lenience", [0.0, -0.5, 1.5, float("nan"), "half"])
def test_a_lenience_out_of_range_is_named(lenience: Any) -> None:
    with pytest.raises(ValueError, match=f"lenience.*{lenience}"):
        select(lenience=lenience)


def test_a_rule_is_chosen_by_name() -> None:
    assert select() == Token() == EXACT
    assert select("token", 0.5, 0.3) == Simulated(0.3, Token(0.5))
    assert [rule.exact for rule in (EXACT, Block(), Token(0.5), Simulated(0.3))] == [True] * 2 + [
        False
    ] * 2
    with pytest.raises(ValueError, match="no verification 'blocks'; known are token, block"):
        select("blocks")
    assert select("block") == Block()
    with pytest.raises(ValueError, match="lenience = 0.5 is for token verification, not for block"):
        select("block", 0.5)
    with pytest.raises(ValueError, match=r"simulated_alpha must lie in \[0, 1\], not 1.5"):
        select(simulated_alpha=1.5)
