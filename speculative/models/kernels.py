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

import jax
import jax.numpy as jnp
from absl import logging
from jax import Array

SOURCE = pathlib.Path(__file__).with_name("kernels.cc")
TARGETS = ("speculative_product", "speculative_attend")
FLAGS = ("-O3", "-march=native", "-std=c++17")

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
        said = (getattr(error, "stderr", None) or str(error)).strip().partition("\n")[0]
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


def panels(kernel: Array) -> Array:
    """A kernel [I, O] as `product` reads it: [O / 32, I, 32], filled up with zeros."""
    inputs, outputs = kernel.shape
    padded = jnp.pad(kernel.astype(jnp.float32), ((0, 0), (0, -outputs % PANEL)))
    return padded.reshape(inputs, -1, PANEL).swapaxes(0, 1)


def product(
    kernel: Array,
    x: Array,
    features: int,
    scale: Array | None = None,
    add: Array | None = None,
) -> Array:
    """The product of x [..., I] with panels of `features` outputs: [..., features], float32.

    `scale` [I] is that of a T5 layer norm of x before the product; `add` [..., features] is
    added to the product.
    """
    rows = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
    scale = jnp.zeros(0) if scale is None else scale
    add = jnp.zeros((0, 0)) if add is None else add.reshape(-1, features)
    shape = jax.ShapeDtypeStruct((rows.shape[0], features), jnp.float32)
    call = jax.ffi.ffi_call("speculative_product", shape)
    y = call(kernel, rows, scale.astype(jnp.float32), add.astype(jnp.float32))
    return y.reshape(*x.shape[:-1], features)


def attend(query: Array, keys: Array, values: Array, bias: Array) -> Array:
    """Unscaled dot-product attention: query [B, L, N, H] -> [B, L, N, H], float32.

    Keys and values are [B * N, K, H]; the bias broadcasts to [B, N, L, K], masks included.
    """
    shape = jax.ShapeDtypeStruct(query.shape, jnp.float32)
    arguments = (x.astype(jnp.float32) for x in (query, keys, values, bias))
    return jax.ffi.ffi_call("speculative_attend", shape)(*arguments)
