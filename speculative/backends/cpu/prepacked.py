"""Weights prepacked for decoding on CPU, and the backend that computes with them.

A small model is bound by the number of operations, so kernels that share an input are fused:
query, key and value, and the two inputs of a gated feed-forward layer.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array

from speculative.backends.cpu import kernels
from speculative.backends.prepacked import FUSED, GATED, Prepacked, beside, for_xla, split
from speculative.backends.xla import Weight, Xla
from speculative.types import ROUNDED, PyTree


@dataclasses.dataclass(frozen=True)
class Cpu(Xla):
    """Products and attention by `kernels`; weights are its `panels`, float32 or int8."""

    def product(self, x, projection, norm=None, activation="linear", out_dtype=None) -> Array:
        """See `Xla.product`; takes one call."""
        shape, both = (*x.shape[:-1], sum(projection.sizes)), (activation, "linear")
        (y,) = kernels.products(x, [projection], shape, norm, both)
        return y.astype(out_dtype or x.dtype)

    def add_product(self, residual, x, projection) -> Array:
        """See `Xla.add_product`; takes one call."""
        (y,) = kernels.products(x, [projection], residual.shape, residual=residual)
        return y.astype(x.dtype)

    def gated(self, x, projections, norm, activations) -> Array:
        """See `Xla.gated`; takes one call."""
        shape = *x.shape[:-1], projections[0].sizes[0]
        (y,) = kernels.products(x, projections, shape, norm, activations)
        return y.astype(x.dtype)

    def of_source(self, x, projections, heads) -> list[Array]:
        """See `Xla.of_source`; takes one call for all projections."""
        batch, source, _ = x.shape
        shape = batch, heads, source, projections[0].sizes[0] // heads
        results = kernels.products(x, projections, shape, heads=heads, source=source)
        return [y.astype(x.dtype) for y in results]

    def attention(self, q, k, v, spec) -> Array:
        """See `Xla.attention`; takes one call, unless biases are `by_distance`."""
        if spec.by_distance is not None:
            return super().attention(q, k, v, spec)
        return kernels.attention(q, k, v, spec).astype(q.dtype)

    def self_attention(
        self, x, projections, norm, heads, spec, cache
    ) -> tuple[Array, Array, Array]:
        """See `Xla.self_attention`; takes two calls, and writes float32 caches in place."""
        (fused,) = projections
        plain = not (spec.norms or spec.rotation or spec.soft_cap) and len({*fused.sizes}) == 1
        whole = cache is None and spec.bias.shape[1:3] == (1, 1) and plain
        chunk = cache is not None and x.dtype == jnp.float32 and spec.by_distance is None
        if not (whole or chunk):
            return super().self_attention(x, projections, norm, heads, spec, cache)
        projected = self.product(x, fused, norm)
        if cache is not None:
            return kernels.self_attention(projected, heads, spec, cache)
        _, *new = jnp.split(projected, 3, axis=-1)
        keys, values = (self.by_head(y, heads) for y in new)
        return kernels.whole_attention(projected, heads, spec).astype(x.dtype), keys, values


def prepack(params: PyTree, quantize: str = "none") -> PyTree:
    """Prepacks parameters for decoding on CPU.

    Kernels are int8 with a scale for each output if they already were, or if `quantize` says so. If
    `kernels` cannot be compiled, XLA computes the products.
    """
    return _prepack(params, quantize) if kernels.native() else for_xla(params, quantize)


@functools.partial(jax.jit, static_argnames="quantize")
def _prepack(params: PyTree, quantize: str) -> Prepacked:
    """See `prepack`; compiled once for models of the same sizes."""
    backend = Cpu(quantize == ROUNDED)

    def lay_out(fused: tuple[str, ...], *group: Weight) -> Weight:
        group = group if fused == GATED else (beside(group),)
        return kernels.panels(*group, rounds=backend.rounds)

    return split(params, backend, FUSED, lay_out, tied=True, quantize=quantize != "none")
