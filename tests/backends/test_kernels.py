"""Products and attention in C++ and by XLA, against float64 NumPy."""

import functools
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speculative.backends import (
    Attending,
    Cache,
    Norm,
    Projection,
    Weight,
    Xla,
    quantized,
    xla,
)
from speculative.backends.cpu import kernels
from speculative.backends.cpu.prepacked import Cpu
from speculative.backends.xla import FEW
from speculative.types import ACTIVATIONS, QUANTIZE, ROUNDED
from tests.backends import emulated
from tests.numpy_models import activated

WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 9, FEW, FEW + 1, 70, 150)
SHAPES = ((1, 1), (6, 10), (37, 64), (64, 33), (384, 1152), (1024, 384))
"""Inputs and outputs: within a panel, not a multiple of one, enough for several threads."""

needs_compiler = pytest.mark.skipif(not kernels.native(), reason="no C++ compiler")


@functools.partial(jax.jit, static_argnums=1)
def panels(kernel: jax.Array, held: str = "none") -> Weight:
    weight = Weight(kernel) if held == "none" else quantized(kernel)
    return kernels.panels(weight, rounds=held == ROUNDED)


@functools.partial(jax.jit, static_argnums=2)
def gated_panels(first: jax.Array, second: jax.Array, held: str = "none") -> Weight:
    both = (Weight(one) if held == "none" else quantized(one) for one in (first, second))
    return kernels.panels(*both, rounds=held == ROUNDED)


def layer_norm(scale: Any, size: int) -> Norm:
    """T5's, or a GPT's where as many shifts follow the scales."""
    shifted = scale.size > size
    return Norm(scale[:size], scale[size:] if shifted else None, 1e-5 if shifted else 1e-6)


@functools.partial(jax.jit, static_argnums=(2, 5))
def products(
    kernel: Weight,
    xs: list[jax.Array],
    features: int,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    activation: str = "linear",
    adds: list[jax.Array] | None = None,
) -> list[jax.Array]:
    """`kernels.products` of each x, compiled together; `scale` is that of `layer_norm`."""
    projection = Projection(kernel, (features,), bias)
    norm = None if scale is None else layer_norm(scale, xs[0].shape[-1])
    shapes, both = [(*x.shape[:-1], features) for x in xs], (activation, "linear")
    return [
        kernels.products(x, [projection], shape, norm, both, residual=add)[0]
        for x, shape, add in zip(xs, shapes, adds or [None] * len(xs), strict=True)
    ]


def product(kernel: Weight, x: jax.Array | np.ndarray, features: int, *given: Any) -> jax.Array:
    return products(kernel, [x], features, *given)[0]


@functools.partial(jax.jit, static_argnums=(2, 3))
def gated(
    both: Weight, xs: list[jax.Array], features: int, names: tuple[str, str], scale: jax.Array
) -> list[jax.Array]:
    """`Cpu.gated` of each x after a T5's norm, compiled together."""
    projection, norm = Projection(both, (features, features)), layer_norm(scale, scale.size)
    return [Cpu().gated(x, [projection], norm, names) for x in xs]


@functools.partial(jax.jit, static_argnums=(2, 3))
def by_head(several: list[Weight], x: jax.Array, heads: int, size: int) -> list[jax.Array]:
    return Cpu().of_source(x, [Projection(each, (heads * size,)) for each in several], heads)


@functools.partial(jax.jit, static_argnums=4)
def attend(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array, scale: float) -> jax.Array:
    return kernels.attention(q, k, v, Attending(bias, scale))


@functools.partial(jax.jit, static_argnums=2)
def attend_self(
    projected: jax.Array, bias: jax.Array, heads: int, cache: tuple[np.ndarray, ...]
) -> tuple[jax.Array, ...]:
    """With scores scaled by 0.3; the cache is keys, values and starts."""
    keys, values, starts = map(jnp.asarray, cache)
    caches = Cache(keys, values, starts, projected.shape[1])
    return kernels.self_attention(projected, heads, Attending(bias, 0.3), caches)


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


def norm(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """T5's, or a GPT's where as many shifts follow the scales."""
    x, size = x.astype(np.float64), x.shape[-1]
    if scale.size == size:
        return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6) * scale
    away = x - x.mean(axis=-1, keepdims=True)
    normed = away / np.sqrt((away**2).mean(axis=-1, keepdims=True) + 1e-5)
    return normed * scale[:size] + scale[size:]


@needs_compiler
@pytest.mark.parametrize("held", QUANTIZE)
@pytest.mark.parametrize("extras", [0, 1, 2], ids=["plain", "of a T5", "of a GPT"])
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_product(inputs: int, outputs: int, extras: int, held: str) -> None:
    """Against the same numbers in float64; of int8 with scales, and x rounded as it is there."""
    generator = np.random.default_rng(inputs)
    whole = generator.integers(-127, 128, size=(inputs, outputs))
    whole[0] = 127  # Every output's largest, so that rounding finds these very numbers again.
    scales = generator.uniform(0.5, 1.5, size=outputs).astype(np.float32) / np.sqrt(inputs) / 64
    kernel = (whole * scales).astype(np.float32)
    prepacked = panels(kernel, held)
    assert prepacked.values.dtype == ("float32" if held == "none" else "int8")
    scale = 1 + 0.2 * numbers(extras * inputs)
    # Off the middle, which T5's norm leaves in and a GPT's takes out.
    xs = [0.3 + numbers(positions, inputs) for positions in WIDTHS]
    adds = [numbers(positions, outputs, seed=1) for positions in WIDTHS]
    bias, activation = numbers(outputs, seed=2), ("linear", "relu", "gelu")[extras]
    given = (scale, bias, activation, adds) if extras else ()
    if held == ROUNDED:
        seen = [rounded(x) for x in (normed(xs, scale) if extras else xs)]
    else:
        seen = [norm(x, scale) if extras else x.astype(np.float64) for x in xs]
    for x, add, y in zip(seen, adds, products(prepacked, xs, outputs, *given), strict=True):
        want = activated(activation, x @ kernel + bias) + add if extras else x @ kernel
        np.testing.assert_allclose(y, want, atol=3e-5)


@needs_compiler
@pytest.mark.parametrize("held", QUANTIZE)
def test_no_number_in_gives_no_number_out(held: str) -> None:
    kernel = panels(numbers(20, 40), held)
    x = numbers(4, 20)
    x[1, 3], x[2, 19], x[3] = np.nan, np.inf, 0
    y = product(kernel, x, 40)
    assert np.isfinite(y[0]).all() and not np.isfinite(y[1:3]).any() and (y[3] == 0).all()


def normed(xs: list[np.ndarray], scale: np.ndarray) -> list[np.ndarray]:
    """As kernels compute it, in float32: what they round depends on its last bit."""
    size = xs[0].shape[1]
    eye = panels(np.eye(size, dtype=np.float32))
    return [np.asarray(y) for y in products(eye, xs, size, scale)]


def rounded(x: np.ndarray) -> np.ndarray:
    """Each position to 255 multiples of a 127th of its greatest, float64."""
    peak = np.abs(x).max(axis=1, keepdims=True)
    return np.rint(x * (np.float32(127) / peak)).astype(np.float64) * (peak / np.float32(127))


def laid_flat(values: jax.Array, inputs: int) -> np.ndarray:
    """Panels of int8 as the kernel [I, O] that they were."""
    parts = np.asarray(values).reshape(len(values), -1, 32, 4)
    return parts.transpose(1, 3, 0, 2).reshape(-1, 32 * len(values))[:inputs].astype(np.float64)


@needs_compiler
def test_rounding_is_to_the_nearest_of_255_multiples() -> None:
    kernel = numbers(64, 33)
    kernel[:, 7] = 0
    values, both = panels(kernel, ROUNDED)
    scales, sums = np.asarray(both).reshape(-1, 2, 32).swapaxes(0, 1)
    scales = np.ravel(scales)[:33]
    np.testing.assert_array_equal(np.ravel(sums)[:33], laid_flat(values, 64)[:, :33].sum(axis=0))
    whole = laid_flat(values, 64)[:, :33]
    want = np.where(kernel.any(axis=0), np.abs(kernel).max(axis=0) / 127, 1)
    np.testing.assert_allclose(scales, want, rtol=1e-6)
    assert (np.abs(whole * scales - kernel) <= scales * 0.5001).all()


@needs_compiler
@pytest.mark.parametrize("held", QUANTIZE)
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_a_product_does_not_depend_on_the_positions_beside_it(
    inputs: int, outputs: int, held: str
) -> None:
    """To the last bit: why a verify pass sees the logits of decoding token by token."""
    kernel = panels(numbers(inputs, outputs), held)
    x, scale = numbers(max(WIDTHS), inputs), 1 + 0.2 * numbers(inputs)
    add, bias = numbers(len(x), outputs, seed=1), numbers(outputs, seed=2)
    alone = [
        product(kernel, x[i : i + 1], outputs, scale, bias, "linear", [add[i : i + 1]])
        for i in range(len(x))
    ]
    xs, adds = ([rows[:positions] for positions in WIDTHS] for rows in (x, add))
    for y in products(kernel, xs, outputs, scale, bias, "linear", adds):
        np.testing.assert_array_equal(y, np.concatenate(alone)[: len(y)])


def zeroed(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Positions [L, I] of which two of three are 0, as padding is, and which are not."""
    kept = np.arange(len(x)) % 3 == 1
    return x * kept[:, None], kept


@needs_compiler
@pytest.mark.parametrize("held", QUANTIZE)
@pytest.mark.parametrize("extras", [0, 1, 2], ids=["plain", "of a T5", "of a GPT"])
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES[1::2])
def test_positions_that_are_0(inputs: int, outputs: int, extras: int, held: str) -> None:
    """The others are as if alone, to the bit; of nothing comes the bias and what is added."""
    kernel = panels(numbers(inputs, outputs) / np.float32(np.sqrt(inputs)), held)
    bias = numbers(outputs, seed=2)
    given = (None, bias, "gelu") if extras == 2 else (1 + 0.2 * numbers(inputs), None, "linear")
    nothing = activated("gelu", bias) if extras == 2 else np.zeros(outputs)
    found = [zeroed(numbers(positions, inputs)) for positions in WIDTHS]
    adds = [numbers(positions, outputs, seed=1) * extras for positions in WIDTHS]
    named = dict(zip(("scale", "bias", "activation"), given if extras else (), strict=False))
    call = functools.partial(products, kernel, features=outputs, **named)
    kept_adds = [add[kept] for add, (_, kept) in zip(adds, found, strict=True)]
    alone = [np.asarray(x[kept]) for x, kept in found if kept.any()]
    together = call(xs=[x for x, _ in found], adds=adds)
    # None is left of one.
    expected = [np.zeros((0, outputs)), *call(xs=alone, adds=kept_adds[1:])]
    for (_, kept), add, y, want in zip(found, adds, together, expected, strict=True):
        y = np.asarray(y)
        np.testing.assert_array_equal(y[kept], want)
        np.testing.assert_allclose(y[~kept], nothing + add[~kept], atol=3e-6)


@needs_compiler
@pytest.mark.parametrize("held", QUANTIZE)
def test_positions_that_are_0_are_not_multiplied(held: str) -> None:
    """Nor do kernels that are no numbers make anything but 0 of them."""
    one = panels(numbers(24, 64), held)
    both = gated_panels(numbers(24, 64), numbers(24, 64, seed=1), held)
    none = np.nan if held == "none" else 1
    one, both = (
        Weight(values * none, None if scales is None else scales * np.nan)
        for values, scales in (one, both)
    )
    x, kept = zeroed(numbers(9, 24))
    x[0] = -x[0]  # Of -0 too.
    found = [
        product(one, x, 64),
        gated(both, [x], 64, ("gelu", "linear"), np.ones(24))[0],
        by_head([one], x[None], 1, 64)[0][0, 0],
    ]
    for y in found:
        np.testing.assert_array_equal(np.isnan(y).all(axis=1), kept)
        np.testing.assert_array_equal(np.asarray(y)[~kept], 0)


@needs_compiler
@pytest.mark.parametrize("held", QUANTIZE)
def test_positions_that_are_0_are_shifted_by_a_norm(held: str) -> None:
    """A GPT's logits have a norm with a shift, and no bias."""
    kernel = numbers(24, 64) / 5
    shifted = numbers(2 * 24)
    x = np.zeros((3, 24), np.float32)
    seen = norm(x, shifted)
    want = (rounded(seen.astype(np.float32)) if held == ROUNDED else seen) @ kernel
    y = product(panels(kernel, held), x, 64, shifted)
    np.testing.assert_allclose(y, want, atol=3e-5 if held == "none" else 0.05)
    assert np.abs(want).max() > 0.5


@needs_compiler
@pytest.mark.parametrize("held", QUANTIZE)
def test_positions_that_are_0_in_gated_products_and_heads(held: str) -> None:
    """The others are as if alone there too, and of nothing comes nothing."""
    both = gated_panels(numbers(24, 64), numbers(24, 64, seed=1), held)
    names, scale = ("gelu", "linear"), np.ones(24)
    several = [panels(numbers(24, 64, seed=seed), held) for seed in range(3)]
    x, kept = zeroed(numbers(2 * 37, 24))
    for found, alone in [
        [gated(both, [given], 64, names, scale)[0] for given in (x, x[kept])],
        *(
            (y.transpose(0, 2, 1, 3).reshape(74, 64), want[0].transpose(1, 0, 2).reshape(-1, 64))
            for y, want in zip(
                by_head(several, x.reshape(2, 37, 24), 4, 16),
                by_head(several, x[kept][None], 4, 16),
                strict=True,
            )
        ),
    ]:
        np.testing.assert_array_equal(np.asarray(found)[kept], alone)
        np.testing.assert_array_equal(np.asarray(found)[~kept], 0)


@needs_compiler
@pytest.mark.parametrize("held", QUANTIZE)
@pytest.mark.parametrize("first", ACTIVATIONS)
@pytest.mark.parametrize("second", ["linear", "relu"])
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES[1::2])
def test_gated_products(inputs: int, outputs: int, first: str, second: str, held: str) -> None:
    """Products between -30 and 30, where activations reach their limits, in float64."""
    generator = np.random.default_rng([inputs, outputs])
    pair = generator.integers(-127, 128, size=(2, inputs, outputs))
    pair[:, 0] = 127  # As above, rounding finds these very numbers again.
    scales = generator.uniform(0.5, 1.5, size=(2, 1, outputs)) / np.sqrt(inputs) / 16
    one, other = (pair * scales).astype(np.float32)
    both = gated_panels(one, other, held)
    scale = 1 + 0.2 * numbers(inputs)
    xs = [numbers(positions, inputs) for positions in WIDTHS]
    rounds = held == ROUNDED
    seen = [rounded(x) for x in normed(xs, scale)] if rounds else [norm(x, scale) for x in xs]
    for x, y in zip(seen, gated(both, xs, outputs, (first, second), scale), strict=True):
        want = activated(first, x @ one) * activated(second, x @ other)
        np.testing.assert_allclose(y, want, atol=3e-4, rtol=3e-5)


@needs_compiler
@pytest.mark.parametrize("first", ACTIVATIONS)
def test_what_is_no_number_stays_none_through_a_gated_product(first: str) -> None:
    both = gated_panels(np.eye(32), np.eye(32))
    x = np.ones((2, 32), np.float32)
    x[1, 5] = np.nan
    y = np.asarray(gated(both, [x], 32, (first, "linear"), np.ones(32))[0])
    assert np.isfinite(y[0]).all()
    assert np.isnan(y[1]).all()


@needs_compiler
def test_callers_on_several_threads_do_not_disturb_each_other() -> None:
    """The helpers serve one caller at a time; the others work alone, to the same result."""
    kernel, x = panels(numbers(384, 1152)), numbers(6, 384)
    want = product(kernel, x, 1152)
    with ThreadPoolExecutor(4) as pool:
        for y in pool.map(lambda _: product(kernel, x, 1152), range(400)):
            np.testing.assert_array_equal(y, want)


@needs_compiler
def test_a_chain_of_products() -> None:
    """Each begins the moment the last one ends: a part that comes late, or never, shows."""
    size, times = 37 * 32, 150  # On two threads 4 chunks of 9 panels, and a last one of 1.
    orthogonal = np.linalg.qr(numbers(size, size))[0]
    x, kernel = numbers(40, size), panels(orthogonal)

    @jax.jit
    def chain(kernel: Weight, x: jax.Array) -> jax.Array:
        projection = Projection(kernel, (size,))
        return jax.lax.fori_loop(0, times, lambda _, y: Cpu().product(y, projection), x)

    want = x @ np.linalg.matrix_power(orthogonal.astype(np.float64), times)
    np.testing.assert_allclose(chain(kernel, x), want, atol=1e-3)


TWO_CORES = """
import os, sys
os.sched_setaffinity(0, range(os.cpu_count()))
cores = sorted(os.sched_getaffinity(0))[:2]
if len(cores) < 2:
    sys.exit(77)
os.sched_setaffinity(0, cores)  # Before JAX counts them.
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""


@pytest.mark.long
@needs_compiler
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores cannot be chosen here")
def test_kernels_on_two_threads() -> None:
    """The larger tests of this file on two cores; a worker of the whole suite has but one."""
    done = run_this_file(
        "-c", TWO_CORES, "-k", "chain or several_threads or (heads or attention) and 64"
    )
    if done.returncode == 77:
        pytest.skip("one core alone")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.skipif(
    not all(map(shutil.which, emulated.TOOLS)),
    reason="not installed: " + " or ".join(emulated.TOOLS),
)
def test_kernels_on_arm() -> None:
    """The tests of this file that take an emulator seconds."""
    which = "(product or attention or heads) and not (384 or chain or xla)"
    plugin = ["-m", "pytest", "-p", "tests.backends.emulated"]
    done = run_this_file(*plugin, "-k", which, JAX_DISABLE_JIT="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout


def run_this_file(*options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The tests of this file in a process of their own."""
    environment = {key: value for key, value in os.environ.items() if "XDIST" not in key}
    return subprocess.run(
        [sys.executable, *options, "-q", "-p", "no:xdist", "-p", "no:cacheprovider", __file__],
        capture_output=True,
        text=True,
        env=environment | variables,
        cwd=pathlib.Path(__file__).parents[2],
    )


@pytest.mark.parametrize("positions", WIDTHS)
def test_the_product_of_xla(positions: int) -> None:
    """Also of an int8 kernel, whose outputs have scales."""
    kernel, x, bias = numbers(6, 10), numbers(1, positions, 6), numbers(10, seed=2)
    whole, scales = np.rint(20 * kernel).astype(np.int8), 0.1 * numbers(10, seed=3)
    scale = 1 + 0.2 * numbers(6)

    @jax.jit
    def multiply(weights: list[Weight], x: jax.Array) -> list[jax.Array]:
        projections = [Projection(weight, (10,), jnp.asarray(bias)) for weight in weights]
        return [Xla().product(x, each, layer_norm(scale, 6), "gelu") for each in projections]

    weights = [Weight(jnp.asarray(kernel)), Weight(jnp.asarray(whole), jnp.asarray(scales))]
    found = multiply(weights, x)
    for y, each in zip(found, (kernel, whole * scales), strict=True):
        want = activated("gelu", norm(x, scale) @ each + bias)
        np.testing.assert_allclose(y, want, atol=1e-5)


@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize("shared", [1, 3])
def test_the_attention_of_xla(shared: int, soft_cap: float | None) -> None:
    """Of 6 heads, of which neighbours may share keys and values; also where kernels leave it."""
    q, k, v = numbers(2, 5, 6, 8), *numbers(2, 2, 6 // shared, 9, 8)
    bias = 3 * numbers(2, 6, 5, 9)
    spec = Attending(jnp.asarray(bias), 0.3, soft_cap)
    scores = 0.3 * np.einsum("blnh,bnth->bnlt", q.astype(np.float64), np.repeat(k, shared, axis=1))
    scores = (scores if soft_cap is None else soft_cap * np.tanh(scores / soft_cap)) + bias
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    want = np.einsum("bnlt,bnth->blnh", weights, np.repeat(v, shared, axis=1))
    for backend in (Xla(), Cpu() if kernels.native() else Xla()):
        found = backend.attention(jnp.asarray(q), jnp.asarray(k), jnp.asarray(v), spec)
        np.testing.assert_allclose(found, want, atol=1e-5)


@needs_compiler
@pytest.mark.parametrize(("heads", "size"), [(1, 1), (2, 8), (3, 20), (6, 64), (2, 100)])
@pytest.mark.parametrize("length", [1, 3, 8, 40])
def test_attention(heads: int, size: int, length: int) -> None:
    """Keys behind a mask, biases shared by heads, by queries, by rows or by none."""
    rows, scale, given = 2, 1.0 if length == 1 else 0.3, []
    for seen in (1, 15, 16, 70):
        query = numbers(rows, length, heads, size)
        keys, values = numbers(2, rows, heads, seen, size)
        for shape in ((rows, heads, length, seen), (rows, 1, 1, seen), (1, heads, length, seen)):
            bias = 3 * numbers(*shape)
            bias[..., max(1, seen - 3) :] = -1e10
            given.append((query, keys, values, bias))

    @jax.jit
    def attended(given: list[tuple[jax.Array, ...]]) -> list[jax.Array]:
        return [kernels.attention(q, k, v, Attending(bias, scale)) for q, k, v, bias in given]

    for (query, keys, values, bias), found in zip(given, attended(given), strict=True):
        scores = np.einsum("blnh,bnkh->bnlk", query.astype(np.float64), keys)
        weights = scale * scores + bias
        weights = np.exp(weights - weights.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        want = np.einsum("bnlk,bnkh->blnh", weights, values)
        np.testing.assert_allclose(found, want, atol=1e-5)


@needs_compiler
def test_of_many_queries_those_that_see_nothing_are_padding() -> None:
    """Causal, of rows that end early: behind their end there is 0, before it what float64 says."""
    rows, length, heads, size = 2, 40, 3, 8
    query, ends = numbers(rows, length, heads, size), np.array([40, 13])
    keys, values = numbers(2, rows, heads, length, size)
    index = np.arange(length)
    seen = (index[:, None] >= index) & (index < ends[:, None])[..., None]
    bias = np.where(seen, 0, -1e10).astype(np.float32)[:, None]
    q, k, v = map(jnp.asarray, (query, keys, values))
    found = kernels.attention(q, k, v, Attending(jnp.asarray(bias), 0.3))
    assert not np.asarray(found)[1, 13:].any()
    weights = np.exp(0.3 * np.einsum("blnh,bnkh->bnlk", query.astype(np.float64), keys))
    weights *= seen[:, None]
    weights /= np.maximum(weights.sum(axis=-1, keepdims=True), 1e-300)
    want = np.einsum("bnlk,bnkh->blnh", weights, values)
    np.testing.assert_allclose(found, want, atol=1e-5)


@pytest.mark.parametrize("backend", [Xla(), pytest.param(Cpu(), marks=needs_compiler)], ids=type)
@pytest.mark.parametrize(("heads", "size"), [(1, 1), (2, 8), (3, 20), (6, 64)])
@pytest.mark.parametrize("length", [1, 3, 40, 150])
def test_attention_of_whole_texts(
    heads: int, size: int, length: int, backend: Xla, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a bias by distance, among texts of other lengths; XLA takes many queries in blocks."""
    monkeypatch.setattr(xla, "QUERIES", 16)
    monkeypatch.setattr(xla, "BLOCK", 16)
    query, keys, values = numbers(3, 2, length, heads, size)
    by_distance, lengths = 3 * numbers(heads, 2 * length - 1), np.array([(length + 1) // 2, length])
    there = np.arange(length) < lengths[:, None]
    mask = np.where(there, np.float32(0), np.float32(-1e10))[:, None, None]
    spec = Attending(jnp.asarray(mask), 0.3, by_distance=jnp.asarray(by_distance))
    distance = np.arange(length) - np.arange(length)[:, None]
    scores = 0.3 * np.einsum("blnh,bknh->bnlk", query.astype(np.float64), keys)
    weights = scores + by_distance[:, distance + length - 1] + mask
    weights = np.exp(weights - weights.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    want = np.einsum("bnlk,bknh->blnh", weights, values)
    if isinstance(backend, Cpu):
        projected = np.stack([query, keys, values], axis=2).reshape(2, length, -1)
        found = np.asarray(kernels.whole_attention(jnp.asarray(projected), heads, spec))
        alone = jnp.asarray(projected[:1, : lengths[0]])
        shorter = by_distance[:, length - lengths[0] : length + lengths[0] - 1]
        of_one = Attending(jnp.zeros((1, 1, 1, lengths[0])), 0.3, by_distance=jnp.asarray(shorter))
        one = kernels.whole_attention(alone, heads, of_one)
        np.testing.assert_array_equal(found[0, : lengths[0]], one[0])
        np.testing.assert_array_equal(found[0, lengths[0] :], 0)
    else:
        by_head = (jnp.asarray(x).swapaxes(1, 2) for x in (keys, values))
        found = np.asarray(jax.jit(backend.attention)(jnp.asarray(query), *by_head, spec))
        causal = jnp.asarray(np.where(distance > 0, np.float32(-1e10), np.float32(0))[None, None])
        both = spec._replace(bias=spec.bias + causal)  # A row of the mask for each query.
        by_head = (jnp.asarray(x).swapaxes(1, 2) for x in (keys, values))
        last = jax.jit(backend.attention)(jnp.asarray(query), *by_head, both)[:, -1]
        np.testing.assert_allclose(last, want[:, -1], atol=1e-5)
    np.testing.assert_allclose(found[there], want[there], atol=1e-5)


@needs_compiler
@pytest.mark.parametrize("held", QUANTIZE)
@pytest.mark.parametrize(("heads", "size"), [(1, 1), (2, 8), (3, 20), (6, 64)])
def test_products_for_heads(heads: int, size: int, held: str) -> None:
    """Several kernels, whose panels end within heads or beyond them."""
    x, width = numbers(2, 37, 24), heads * size
    given = [numbers(24, width, seed=seed) for seed in range(5)]
    prepacked = [panels(kernel, held) for kernel in given]
    found = by_head(prepacked, x, heads, size)
    for kernel, y in zip(given, found, strict=True):
        if held != "none":
            kernel = np.multiply(*quantized(kernel), dtype=np.float64)
        rounds = held == ROUNDED
        seen = rounded(x.reshape(-1, 24)).reshape(x.shape) if rounds else x.astype(np.float64)
        want = (seen @ np.asarray(kernel)).reshape(2, 37, heads, size)
        np.testing.assert_allclose(y, want.transpose(0, 2, 1, 3), atol=3e-5)


@needs_compiler
def test_attention_depends_neither_on_queries_beside_nor_on_room_behind_the_mask() -> None:
    query, keys, values = numbers(1, 8, 6, 64), *numbers(2, 1, 6, 128, 64)
    bias = np.where(np.arange(128) > 50 + np.arange(8)[:, None], np.float32(-1e10), 0)[None, None]
    together = attend(query, keys, values, bias, 1.0)
    for i in range(8):
        short = attend(
            query[:, i : i + 1],
            keys[:, :, :64],
            values[:, :, :64],
            bias[:, :, i : i + 1, :64],
            1.0,
        )
        np.testing.assert_array_equal(together[:, i : i + 1], short)
    keys[:, :, 60:] = values[:, :, 60:] = np.nan  # Stale entries are not read.
    np.testing.assert_array_equal(attend(query, keys, values, bias, 1.0), together)


@needs_compiler
@pytest.mark.parametrize("shape", [(1,), (3, 5), (1, 4, 16), (2, 3, 8195)])
def test_softmax(shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(sum(shape)).normal(0, 20, shape).astype(np.float32)
    x[..., 2::3] = -np.inf
    weights = np.exp(x.astype(np.float64) - x.max(axis=-1, keepdims=True))
    exact = weights / weights.sum(axis=-1, keepdims=True)
    given = jnp.asarray(x)
    for found in (kernels.softmax(given), jax.vmap(kernels.softmax)(given[None])[0]):
        # Differences of 100 are rounded by 4e-6, and so are the exponents.
        np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-37)


@needs_compiler
def test_softmax_hides_no_number_that_is_none() -> None:
    x = np.zeros((4, 37), np.float32)
    x[0, 20], x[1, 3], x[2] = np.nan, np.inf, -np.inf
    found = np.asarray(kernels.softmax(jnp.asarray(x)))
    assert np.isnan(found[:3]).all()
    np.testing.assert_allclose(found[3], 1 / 37, rtol=1e-6)


@needs_compiler
def test_softmax_for_another_platform_is_its_own() -> None:
    x = jax.ShapeDtypeStruct((2, 9), np.float32)
    for platform, ours in (("cpu", True), ("tpu", False)):
        lowered = jax.jit(kernels.softmax).trace(x).lower(lowering_platforms=(platform,))
        assert ("speculative_softmax" in lowered.as_text()) is ours


@needs_compiler
def test_attention_hides_no_number_that_is_none() -> None:
    query, keys, values = numbers(1, 1, 1, 8), *numbers(2, 1, 1, 20, 8)
    keys[0, 0, 5, 0] = np.nan
    assert np.isnan(attend(query, keys, values, np.zeros((1, 1, 1, 20), np.float32), 1.0)).all()


@needs_compiler
def test_attention_where_everything_is_masked_is_the_mean() -> None:
    query, keys, values = numbers(1, 1, 1, 8), *numbers(2, 1, 1, 20, 8)
    y = attend(0 * query, keys, values, np.full((1, 1, 1, 20), -1e10, np.float32), 1.0)
    np.testing.assert_allclose(y[0, 0, 0], values[0, 0].mean(axis=0), atol=1e-6)


@needs_compiler
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_axes_before_the_last_and_types_are_kept(dtype: str) -> None:
    kernel, x = jnp.asarray(numbers(37, 64), dtype), jnp.asarray(numbers(3, 4, 37), dtype)
    projection = Projection(panels(kernel), (64,))
    y = Cpu().product(x, projection)
    assert (y.shape, y.dtype) == ((3, 4, 64), x.dtype)
    want = np.asarray(x, np.float64) @ np.asarray(kernel, np.float64)
    np.testing.assert_allclose(np.asarray(y, np.float64), want, rtol=1e-2, atol=1e-2)
    wide = Cpu().product(x, projection, out_dtype="float32")
    assert wide.dtype == jnp.float32
    np.testing.assert_allclose(wide, want, rtol=1e-5, atol=1e-5)


@pytest.fixture
def forgotten() -> Iterator[None]:
    kernels.native.cache_clear()
    yield
    kernels.native.cache_clear()


@pytest.mark.usefixtures("forgotten")
def test_without_a_compiler_xla_serves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernels.shutil, "which", lambda name: None)
    monkeypatch.delenv("CXX", raising=False)
    assert not kernels.native()
    assert "No C++ compiler" in caplog.text


@pytest.mark.usefixtures("forgotten")
def test_a_compiler_that_fails_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise subprocess.CalledProcessError(1, "c", stderr="kernels.cc:3: no such header\nmore")

    monkeypatch.setenv("CXX", "odd++")
    monkeypatch.setattr(kernels.subprocess, "run", fail)
    assert not kernels.native()
    assert "odd++ could not compile" in caplog.text
    assert "kernels.cc:3: no such header" in caplog.text
    assert "more" not in caplog.text


def compiler(folder: pathlib.Path) -> str:
    """A compiler that predefines `MACROS` of the environment, and makes empty files."""
    made = folder / "cc"
    made.write_text(
        '#!/bin/sh\ncase "$*" in *native*-dM*) echo "$MACROS"; exit;; *-dM*) exit;; esac\n'
        'for word; do [ "$last" = -o ] && : > "$word"; last=$word; done\n'
    )
    made.chmod(0o755)
    return str(made)


@pytest.mark.usefixtures("forgotten")
def test_each_processor_has_a_library_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """What the compiler predefines for this processor is part of its name."""
    monkeypatch.setenv("CXX", compiler(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = []
    for macros in ("#define __AVX2__ 1", "#define __AVX512F__ 1", "#define __AVX2__ 1"):
        monkeypatch.setenv("MACROS", macros)
        kernels.native.cache_clear()
        assert not kernels.native()  # An empty file is no library.
        found.append(len(list(kernels.cache_folder().glob("*.so"))))
    assert found == [1, 2, 2]


def test_a_cache_folder_that_cannot_be_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A temporary one serves, for the kernels too, and is spoken of once."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file" / "cache"))
    made = kernels._compiled(compiler(tmp_path))
    assert made.is_file()
    assert made.parent == kernels.cache_folder()
    (said,) = caplog.messages
    for words in (f"{tmp_path}/file/cache/speculative cannot", str(made.parent), "XDG_CACHE_HOME"):
        assert words in said


@needs_compiler
@pytest.mark.parametrize(("heads", "size"), [(1, 1), (2, 8), (3, 20), (6, 64)])
@pytest.mark.parametrize("length", [1, 3, 8])
def test_attention_on_caches(heads: int, size: int, length: int) -> None:
    """New keys and values enter at each row's own place, then all are attended to."""
    room, starts = 70, np.array([17, 40], np.int32)
    projected = numbers(2, length, 3 * heads * size)
    keys, values = numbers(2, 2, heads, room, size)
    bias = 3 * numbers(2, heads, length, room)
    after = np.arange(room) > (starts[:, None] + np.arange(length))[..., None]
    bias = np.where(after[:, None], np.float32(-1e10), bias)
    y, new_keys, new_values = jax.block_until_ready(
        attend_self(projected, bias, heads, (keys, values, starts))
    )
    query, *written = projected.reshape(2, length, 3, heads, size).transpose(2, 0, 1, 3, 4)
    for b, start in enumerate(starts):
        for cache, chunk in zip((keys, values), written, strict=True):
            cache[b, :, start : start + length] = chunk[b].transpose(1, 0, 2)
    np.testing.assert_array_equal(new_keys, keys)
    np.testing.assert_array_equal(new_values, values)
    np.testing.assert_array_equal(y, attend(query, keys, values, bias, 0.3))
