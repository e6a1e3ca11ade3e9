"""What decoding on CPU spends its time on, in C++: products with a few positions, attention.

XLA's products on CPU make a pass over gamma + 1 positions about twice as dear as a pass over
one, although it reads the same weights, and its attention is a dozen small operations a layer.
`kernels.cc` does better. The machine's own C++ compiler compiles it when it is first used;
without one XLA's operations serve.
"""

import ctypes
import functools
import hashlib
import os
import pathlib
import shutil
import subprocess
import tempfile
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax import Array

from speculative.models.config import ACTIVATIONS

SOURCE = pathlib.Path(__file__).with_name("kernels.cc")
TARGETS = tuple(
    "speculative_" + name
    for name in (
        "product",
        "product_int8",
        "gated",
        "gated_int8",
        "heads",
        "heads_int8",
        "attend",
        "attend_self",
        "attend_cached",
        "total",
    )
)
FLAGS = ("-O3", "-march=native", "-std=c++17", "-pthread")

PANEL = 32
"""Outputs that the product sums side by side; `kPanel` in the source."""


def cache_folder() -> pathlib.Path:
    """Where compiled programs are kept between runs."""
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "speculative"


@functools.cache
def native() -> bool:
    """Whether `kernels.cc` serves: compiles it, or finds it compiled, and tells XLA of it."""
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")), None)
    if compiler is None:
        logging.warning("No C++ compiler found: decoding on CPU will be slower.")
        return False
    try:
        library = ctypes.CDLL(str(_compiled(compiler)))
    except (OSError, subprocess.CalledProcessError) as error:
        lines = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        said = next((line for line in lines if "error" in line), lines[0])
        logging.warning(
            "%s could not compile %s (%s): decoding on CPU will be slower.", compiler, SOURCE, said
        )
        return False
    for name in TARGETS:
        handler = jax.ffi.pycapsule(getattr(library, name))
        jax.ffi.register_ffi_target(name, handler, platform="cpu")
    return True


def _compiled(compiler: str) -> pathlib.Path:
    """The shared library for this processor, made anew when source, compiler or JAX change."""

    def run(*arguments: str) -> str:
        command = [compiler, *FLAGS, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    # What the compiler predefines names its version and the processor's instructions.
    machine = run("-dM", "-E", "-x", "c++", os.devnull)
    identity = hashlib.sha256((SOURCE.read_text() + machine + jax.__version__).encode())
    path = cache_folder() / f"kernels-{identity.hexdigest()[:16]}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = pathlib.Path(folder) / path.name
            run(
                "-w", "-shared", "-fPIC", f"-I{jax.ffi.include_dir()}", str(SOURCE), "-o", str(made)
            )
            made.replace(path)  # Another process may be making it too.
    return path


class Panels(NamedTuple):
    """A kernel [I, O] as `product` reads it.

    Attributes:
        values: [O / 32, I, 32], filled up with zeros; float32 or int8.
        scales: [O / 32, 32] what int8 values are multiples of; empty for float32.
    """

    values: Array
    scales: Array


def panels(kernel: Array, rounded: bool = False) -> Panels:
    """Lays a kernel [I, O] out; rounded to int8 with a scale for each output, if asked for."""
    kernel = kernel.astype(jnp.float32)
    kernel = jnp.pad(kernel, ((0, 0), (0, -kernel.shape[1] % PANEL)))
    scales = jnp.zeros((0, PANEL))
    if rounded:
        scales = jnp.abs(kernel).max(axis=0) / 127
        scales = jnp.where(scales > 0, scales, 1)
        kernel = jnp.rint(kernel / scales).astype(jnp.int8)
        scales = scales.reshape(-1, PANEL)
    return Panels(kernel.reshape(kernel.shape[0], -1, PANEL).swapaxes(0, 1), scales)


class Gated(NamedTuple):
    """The two kernels [I, O] of a gated layer as `gated` reads them.

    Attributes:
        panels: of both, taking turns.
    """

    panels: Panels


def gated_panels(first: Array, second: Array, rounded: bool = False) -> Gated:
    """Lays the two kernels [I, O] of a gated layer out; see `panels`."""

    def take_turns(one: Array, other: Array) -> Array:
        return jnp.stack([one, other], axis=1).reshape(-1, *one.shape[1:])

    both = panels(first, rounded), panels(second, rounded)
    return Gated(Panels(*map(take_turns, *both)))


def product(
    kernel: Panels,
    x: Array,
    features: int,
    norm: Array | None = None,
    bias: Array | None = None,
    activation: str = "linear",
    add: Array | None = None,
) -> Array:
    """The product of x [..., I] with panels of `features` outputs: [..., features], float32.

    `norm` is the scale [I] of a T5 layer norm of x before the product, or the scale and the shift
    [2 * I] of a GPT's. The product is added to the bias [features], then activated by one of
    `config.ACTIVATIONS`, then added to `add` [..., features].
    """
    bias = jnp.zeros(0) if bias is None else bias.astype(jnp.float32)
    add = jnp.zeros((0, 0)) if add is None else add.reshape(-1, features).astype(jnp.float32)
    first = np.int64(ACTIVATIONS.index(activation))
    return _multiply("product", kernel, x, features, norm, bias, add, first=first)


def gated(
    kernels: Gated,
    x: Array,
    features: int,
    activations: tuple[str, ...],
    norm: Array | None = None,
) -> Array:
    """A gated layer of x [..., I]: the activated products, multiplied, [..., features], float32.

    `norm` is as in `product`; activations are two of `config.ACTIVATIONS`.
    """
    first, second = (np.int64(ACTIVATIONS.index(name)) for name in activations)
    return _multiply("gated", kernels.panels, x, features, norm, first=first, second=second)


def _multiply(
    name: str,
    kernel: Panels,
    x: Array,
    features: int,
    norm: Array | None,
    *added: Array,
    **attributes: np.int64,
) -> Array:
    rows = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
    norm = jnp.zeros(0) if norm is None else norm.astype(jnp.float32)
    shape = jax.ShapeDtypeStruct((rows.shape[0], features), jnp.float32)
    call = jax.ffi.ffi_call(f"speculative_{name}" + ("_int8" if kernel.scales.size else ""), shape)
    y = call(kernel.values, kernel.scales, rows, norm, *added, **attributes)
    return y.reshape(*x.shape[:-1], features)


def heads(kernels: list[Panels], x: Array, count: int, size: int) -> list[Array]:
    """Products of x [B, S, I] with panels of so many heads of a size each, for attention to read.

    Returns:
        For each kernel [B, N, S, H], float32.
    """
    name = "speculative_heads" + ("_int8" if kernels[0].scales.size else "")
    shape = jax.ShapeDtypeStruct((x.shape[0], count, x.shape[1], size), jnp.float32)
    call = jax.ffi.ffi_call(name, [shape] * len(kernels))
    parts = [part for kernel in kernels for part in kernel]
    return list(call(x.astype(jnp.float32), *parts))


def attend(query: Array, keys: Array, values: Array, bias: Array, scale: float) -> Array:
    """Dot-product attention: query [B, L, N, H] -> [B, L, N, H], float32.

    Keys and values are [B * N, K, H]; the bias broadcasts to [B, N, L, K], masks included. The
    scale is that of the products of queries and keys.
    """
    shape = jax.ShapeDtypeStruct(query.shape, jnp.float32)
    arguments = (x.astype(jnp.float32) for x in (query, keys, values, bias))
    return jax.ffi.ffi_call("speculative_attend", shape)(*arguments, scale=np.float32(scale))


def attend_self(
    projected: Array, bias: Array, heads: int, scale: float
) -> tuple[Array, Array, Array]:
    """Self-attention among positions of which projected [B, L, 3 * N * H] has all.

    Bias and scale are as in `attend`.

    Returns:
        [B, L, N, H], keys [B * N, L, H] and values, float32.
    """
    batch, length, width = projected.shape
    size = width // (3 * heads)
    shape = jax.ShapeDtypeStruct((batch, length, heads, size), jnp.float32)
    cache = jax.ShapeDtypeStruct((batch * heads, length, size), jnp.float32)
    call = jax.ffi.ffi_call("speculative_attend_self", (shape, cache, cache))
    arguments = projected.astype(jnp.float32), bias.astype(jnp.float32)
    mixed, keys, values = call(*arguments, scale=np.float32(scale))
    return mixed, keys, values


def attend_cached(
    projected: Array, keys: Array, values: Array, bias: Array, starts: Array, scale: float
) -> tuple[Array, Array, Array]:
    """Self-attention of new positions, whose keys and values enter the caches first, in place.

    Args:
        projected: [B, L, 3 * N * H] queries, keys and values of the new positions.
        keys: [B * N, K, H] float32, as are the values.
        values: [B * N, K, H].
        bias: as in `attend`.
        starts: [B] where each row's new positions enter.
        scale: as in `attend`.

    Returns:
        [B, L, N, H], float32, and the new caches.

    Raises:
        ValueError: there are more new positions than the caches have.
    """
    if projected.shape[1] > keys.shape[1]:
        raise ValueError(
            f"A chunk of {projected.shape[1]} positions does not fit a cache of {keys.shape[1]}."
        )
    heads, size = keys.shape[0] // starts.shape[0], keys.shape[2]
    cache = jax.ShapeDtypeStruct(keys.shape, jnp.float32)
    shape = jax.ShapeDtypeStruct((*projected.shape[:2], heads, size), jnp.float32)
    call = jax.ffi.ffi_call(
        "speculative_attend_cached", (shape, cache, cache), input_output_aliases={1: 1, 2: 2}
    )
    arguments = projected.astype(jnp.float32), keys, values, bias.astype(jnp.float32), starts
    mixed, new_keys, new_values = call(*arguments, scale=np.float32(scale))
    return mixed, new_keys, new_values


def total(values: Array) -> Array:
    """The sum of float32 values [N], as fast as they can be read; to measure how fast that is."""
    return jax.ffi.ffi_call("speculative_total", jax.ShapeDtypeStruct((), jnp.float32))(values)
