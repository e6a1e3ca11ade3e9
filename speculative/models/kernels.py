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
from absl import logging
from jax import Array

SOURCE = pathlib.Path(__file__).with_name("kernels.cc")
TARGETS = ("speculative_product", "speculative_product_int8", "speculative_attend")
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
        scales: [O] what int8 values are multiples of; empty for float32.
    """

    values: Array
    scales: Array


def panels(kernel: Array, rounded: bool = False) -> Panels:
    """Lays a kernel [I, O] out; rounded to int8 with a scale for each output, if asked for."""
    kernel = kernel.astype(jnp.float32)
    scales = jnp.zeros(0)
    if rounded:
        scales = jnp.abs(kernel).max(axis=0) / 127
        scales = jnp.where(scales > 0, scales, 1)
        kernel = jnp.rint(kernel / scales).astype(jnp.int8)
    padded = jnp.pad(kernel, ((0, 0), (0, -kernel.shape[1] % PANEL)))
    return Panels(padded.reshape(kernel.shape[0], -1, PANEL).swapaxes(0, 1), scales)


def product(
    kernel: Panels,
    x: Array,
    features: int,
    norm: Array | None = None,
    add: Array | None = None,
) -> Array:
    """The product of x [..., I] with panels of `features` outputs: [..., features], float32.

    `norm` [I] is the scale of a T5 layer norm of x before the product; `add` [..., features] is
    added to the product.
    """
    rows = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
    norm = jnp.zeros(0) if norm is None else norm.astype(jnp.float32)
    add = jnp.zeros((0, 0)) if add is None else add.reshape(-1, features).astype(jnp.float32)
    shape = jax.ShapeDtypeStruct((rows.shape[0], features), jnp.float32)
    name = "speculative_product" + ("_int8" if kernel.scales.size else "")
    y = jax.ffi.ffi_call(name, shape)(kernel.values, kernel.scales, rows, norm, add)
    return y.reshape(*x.shape[:-1], features)


def attend(query: Array, keys: Array, values: Array, bias: Array) -> Array:
    """Unscaled dot-product attention: query [B, L, N, H] -> [B, L, N, H], float32.

    Keys and values are [B * N, K, H]; the bias broadcasts to [B, N, L, K], masks included.
    """
    shape = jax.ShapeDtypeStruct(query.shape, jnp.float32)
    arguments = (x.astype(jnp.float32) for x in (query, keys, values, bias))
    return jax.ffi.ffi_call("speculative_attend", shape)(*arguments)
