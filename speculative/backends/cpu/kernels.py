"""Products with a few positions, attention, softmax and Gumbel noise in C++.

With XLA's products on CPU a pass over gamma + 1 positions costs about twice as much as over one,
although it reads the same weights, and attention is a dozen small operations per layer. The
machine's C++ compiler compiles `kernels.cc` on first use; without a compiler XLA is used instead.
"""

import atexit
import ctypes
import functools
import hashlib
import os
import pathlib
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax import Array, lax

from speculative.backends.xla import Attending, Cache, Norm, Projection, Weight
from speculative.types import ACTIVATIONS

SOURCE = pathlib.Path(__file__).with_name("kernels.cc")  # Includes the headers next to it.
# Compiles for this processor, with the flag that every compiler for it, even Apple's, understands.
NATIVE = "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"
FLAGS = ("-O3", NATIVE, "-std=c++17", "-pthread")
TARGETS = (
    "product_float32",
    "product_int8",
    "product_int8_rounded",
    "attend",
    "attend_self",
    "attend_whole",
    "softmax",
    "gumbel",
    "total",
)
PANEL = 32  # Outputs that a product sums side by side; `kPanel` in `product.h`.
FOUR = 4  # Inputs that are multiplied at a time by int8 kernels.
FLOAT32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)


def cache_folder() -> pathlib.Path:
    """The folder that keeps compiled programs, or a temporary one if it cannot be written."""
    return _writable(os.environ.get("XDG_CACHE_HOME") or "~/.cache")


@functools.cache
def _writable(parent: str) -> pathlib.Path:
    folder = pathlib.Path(parent, "speculative")
    try:
        folder = folder.expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home folder.
        temporary = tempfile.mkdtemp(prefix="speculative-")
        atexit.register(shutil.rmtree, temporary, ignore_errors=True)
        logging.warning(
            "%s cannot be written (%s): compiled programs are kept for this run only, in %s; give "
            "another folder (XDG_CACHE_HOME).",
            *(folder, getattr(error, "strerror", error), temporary),
        )
        return pathlib.Path(temporary)


def compiler() -> str | None:
    """The C++ compiler's command, if there is one."""
    return os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")), None)


@functools.cache
def native() -> bool:
    """Whether `kernels.cc` can be used; compiles it if necessary, and registers it with XLA."""
    if (command := compiler()) is None:
        logging.warning("No C++ compiler found: decoding on CPU will be slower.")
        return False
    try:
        library = ctypes.CDLL(str(_compiled(command)))
    except (OSError, subprocess.CalledProcessError) as error:
        lines = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        reason = next((line for line in lines if "error" in line), lines[0])
        slow = "%s could not compile %s (%s): decoding on CPU will be slower."
        logging.warning(slow, command, SOURCE, reason)
        return False
    for name in map("speculative_{}".format, TARGETS):
        handler = jax.ffi.pycapsule(getattr(library, name))
        jax.ffi.register_ffi_target(name, handler, platform="cpu")
    return True


def _compiled(compiler: str) -> pathlib.Path:
    """The library for this processor; compiled again when the source, compiler or JAX changes."""

    def run(*arguments: str) -> str:
        command = [compiler, *FLAGS, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    # Predefined macros name the compiler's version and the processor's instructions.
    machine = run("-dM", "-E", "-x", "c++", os.devnull)
    files = [SOURCE, *sorted(SOURCE.parent.glob("*.h"))]
    source = "".join(file.read_text() for file in files)
    identity = hashlib.sha256((source + machine + jax.__version__).encode())
    path = cache_folder() / f"kernels-{identity.hexdigest()[:16]}.so"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = pathlib.Path(folder) / path.name
            include = f"-I{jax.ffi.include_dir()}"
            run("-w", "-shared", "-fPIC", include, str(SOURCE), "-o", str(made))
            made.replace(path)  # Another process may be making it too.
    return path


def panels(*weights: Weight, rounds: bool = False) -> Weight:
    """Lays kernels [I, O] out as `products` reads them, padded with zeros.

    Values are [O / 32, I, 32], float32, or int8 with scales [O / 32, 32] of the outputs. If the
    products with an int8 kernel also round each position of their input to int8 (`rounds`), values
    are [O / 32, I / 4, 128], four inputs for each of 32 outputs, and scales are [O / 32, 64]: those
    of the outputs, and the sums of their values. Panels of the two kernels of a gated layer
    alternate.
    """
    return jax.tree.map(
        lambda *parts: jnp.stack(parts, axis=1).reshape(-1, *parts[0].shape[1:]),
        *(_panels(weight, rounds) for weight in weights),
    )


def _panels(weight: Weight, rounds: bool) -> Weight:
    values, scales = weight
    room = -values.shape[1] % PANEL
    values = values.astype(jnp.float32 if scales is None else jnp.int8)
    values = jnp.pad(values, ((0, 0), (0, room)))
    if scales is not None:
        scales = jnp.pad(scales, (0, room)).reshape(-1, PANEL)
    if scales is None or not rounds:
        return Weight(values.reshape(values.shape[0], -1, PANEL).swapaxes(0, 1), scales)
    sums = values.sum(axis=0, dtype=jnp.int32).astype(jnp.float32).reshape(-1, PANEL)
    values = jnp.pad(values, ((0, -len(values) % FOUR), (0, 0)))
    values = values.reshape(len(values) // FOUR, FOUR, -1, PANEL).transpose(2, 0, 3, 1)
    return Weight(values.reshape(*values.shape[:2], -1), jnp.concatenate([scales, sums], axis=1))


def products(
    x: Array,
    projections: Sequence[Projection],
    shape: tuple[int, ...],
    norm: Norm | None = None,
    activations: Sequence[str] = ("linear", "linear"),
    heads: int = 1,
    source: int = 1,
    residual: Array | None = None,
) -> Sequence[Array]:
    """Products of normed x [..., I] with panels, each float32 of this shape, in one call.

    A single product gets its bias and the first of `activations`; those of a gated layer's two
    kernels get one activation each and are multiplied. Products are [..., O], or [B, N, S, H] for
    x [B, S, I] with `heads` N and a `source` of S. A residual of that shape is added last.
    """
    of_norm = jnp.zeros(0) if norm is None else norm.scale.astype(jnp.float32)
    if norm and norm.shift is not None:
        of_norm = jnp.concatenate([of_norm, norm.shift.astype(jnp.float32)])
    bias = projections[0].bias
    bias = jnp.zeros(0) if bias is None else bias.astype(jnp.float32)
    add = jnp.zeros(0) if residual is None else residual.astype(jnp.float32)
    weights = [part for each in projections for part in each.weight if part is not None]
    first, second = map(ACTIVATIONS.index, activations)
    whole = {"heads": heads, "source": source, "first": first, "second": second}
    attributes = {name: np.int64(value) for name, value in whole.items()}
    rounds = weights[0].shape[2] > PANEL
    target = f"speculative_product_{weights[0].dtype}{'_rounded' if rounds else ''}"
    call = jax.ffi.ffi_call(target, [FLOAT32(shape)] * len(projections))
    epsilon = np.float32(norm.epsilon if norm else 0)
    inputs = x.astype(jnp.float32), of_norm, bias, add, *weights
    return call(*inputs, **attributes, epsilon=epsilon)


def attention(q: Array, k: Array, v: Array, spec: Attending) -> Array:
    """Attention of queries [B, L, N, H] to keys and values [B, K, T, H]: [B, L, N, H], float32."""
    arguments = (x.astype(jnp.float32) for x in (q, k, v, spec.bias))
    call = jax.ffi.ffi_call("speculative_attend", FLOAT32(q.shape))
    return call(*arguments, scale=np.float32(spec.scale), cap=np.float32(spec.soft_cap or 0))


def self_attention(
    projected: Array, heads: int, spec: Attending, cache: Cache
) -> tuple[Array, Array, Array]:
    """Self-attention of new positions, whose queries, keys and values lie side by side.

    `projected` [B, L, (N + 2 K) * H] gives [B, L, N, H], and the cache's keys and values, float32,
    into which the new ones are first written in place.

    Raises:
        ValueError: there are more new positions than the cache has.
    """
    batch, length, _ = projected.shape
    room, size = cache.keys.shape[2:]
    if length > room:
        raise ValueError(f"A chunk of {length} positions does not fit a cache of {room}.")
    results = FLOAT32((batch, length, heads, size)), *[FLOAT32(cache.keys.shape)] * 2
    norms, turns, epsilon = jnp.zeros((0, 0)), jnp.zeros((2, 1, 0, 0)), 0.0
    if spec.norms:
        norms = jnp.stack([norm.scale.astype(jnp.float32) for norm in spec.norms])
        epsilon = spec.norms[0].epsilon
    if spec.rotation:
        turns = jnp.stack(spec.rotation)
    inputs = cache.starts, norms, turns, cache.keys, cache.values
    call = jax.ffi.ffi_call("speculative_attend_self", results, input_output_aliases={5: 1, 6: 2})
    numbers = {"scale": spec.scale, "cap": spec.soft_cap or 0.0, "epsilon": epsilon}
    attributes = {name: np.float32(value) for name, value in numbers.items()}
    mixed, keys, values = call(projected, spec.bias.astype(jnp.float32), *inputs, **attributes)
    return mixed, keys, values


def whole_attention(projected: Array, heads: int, spec: Attending) -> Array:
    """Attention among all positions of texts: [B, L, 3 * N * H] -> [B, L, N, H], float32.

    The bias is [B or 1, 1, 1, L]. Positions after the last key that it does not mask are padding,
    and their results are 0.
    """
    batch, length, width = projected.shape
    shape = batch, length, heads, width // (3 * heads)
    call = jax.ffi.ffi_call("speculative_attend_whole", FLOAT32(shape))
    table = spec.by_distance
    table = jnp.zeros((1, 2 * length - 1)) if table is None else table.astype(jnp.float32)
    mask = jnp.broadcast_to(spec.bias.astype(jnp.float32), (batch, 1, 1, length))
    return call(projected.astype(jnp.float32), table, mask, scale=np.float32(spec.scale))


def softmax(x: Array) -> Array:
    """The softmax over the last axis of x [..., V], float32.

    XLA computes it in a loop that its older emitter does not vectorise, or in several threads,
    which wait for the threads of our products.
    """
    target, shape = "speculative_softmax", FLOAT32(x.shape)
    call = jax.ffi.ffi_call(target, shape, vmap_method="broadcast_all")
    return on_cpu(call, jax.nn.softmax, x)


def on_cpu(kernel: Callable[[Array], Array], other: Callable[[Array], Array], x: Array) -> Array:
    """Applies a kernel to x on a CPU, if it can be used, and XLA's form elsewhere."""
    if jax.default_backend() != "cpu" or not native():
        return other(x)
    # A program for a TPU may be compiled on a machine without one.
    return lax.platform_dependent(x, cpu=kernel, default=other)


def gumbel(keys: Array, vocab_size: int) -> Array:
    """The noise [..., V] for positions' keys [..., 2], uint32; see `noise`.

    XLA's threefry takes 10 times as long, and is not vectorised.
    """
    shape = FLOAT32((*keys.shape[:-1], vocab_size))
    return jax.ffi.ffi_call("speculative_gumbel", shape)(keys)


def total(values: Array) -> Array:
    """The sum of float32 values [N], as fast as they can be read; measures that speed."""
    return jax.ffi.ffi_call("speculative_total", FLOAT32(()))(values)
