"""Weights prepacked for decoding on CPU, and what computes with them.

A small model is bound by the number of operations, so kernels that share an input are fused:
query, key and value, and the two inputs of a gated feed-forward layer.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from speculative.backends.cpu import kernels
from speculative.backends.prepacked import FUSED, GATED, split
from speculative.backends.xla import Parts, Xla
from speculative.types import PyTree


class Cpu(Xla):
    """Products and attention by `kernels`; kernels are `kernels.Panels`, float32 or int8."""

    def product(
        self, kernel, x, features, dtype, out_dtype=None, norm=None, *, dropout=None, **after
    ) -> Array:
        """In one call, norm and sum included; there is no dropout with prepacked weights."""
        y = kernels.product(kernel, x, features, norm.numbers if norm else None, **after)
        return y.astype(out_dtype or dtype)

    def tied(self, kernel, embedding, x, norm) -> Array:
        """With a prepacked copy of the embedding."""
        return self.product(kernel, x, len(embedding), str(x.dtype), "float32", norm)

    def project(self, fused, denses, x, norm) -> Parts:
        """One product, which attention reads whole."""
        assert fused is not None, "prepacked kernels are fused"
        return (self._fused(fused, denses, x, norm),)

    def gated(self, fused, denses, x, norm, activations) -> Array:
        """In one call."""
        y = kernels.gated(fused.kernel, x, denses[0].features, activations, norm.numbers)
        return y.astype(denses[0].dtype)

    def heads(self, denses, x, heads) -> list[Array]:
        """In one call for all of them."""
        prepacked = [dense.prepacked for dense in denses]
        return kernels.heads(prepacked, x, heads, denses[0].features // heads)

    def attend(self, query, keys, values, bias, heads, scale) -> Array:
        """In one call; float32."""
        split = query.reshape(*query.shape[:2], heads, -1)
        return kernels.attend(split, keys, values, bias, scale).reshape(query.shape)

    def attend_self(self, projected, bias, heads, scale, cache) -> tuple[Array, Array, Array]:
        """In one call, float32, which writes into caches of float32 in place."""
        if cache is not None and cache[0].dtype != jnp.float32:
            parts = tuple(jnp.split(projected[0], 3, axis=-1))
            return super().attend_self(parts, bias, heads, scale, cache)
        mixed, keys, values = kernels.attend_self(projected[0], bias, heads, scale, cache)
        return mixed.reshape(*mixed.shape[:2], -1), keys, values


def prepack(params: PyTree, quantized: bool = False) -> PyTree:
    """The same parameters for decoding: {"params": what stays, "prepacked": the kernels}.

    With `quantized`, kernels become int8 with a scale for each output. Where `kernels` cannot be
    compiled, parameters stay as they are stored, which XLA multiplies as fast.
    """
    return _prepack(params, quantized) if kernels.native() else params


@functools.partial(jax.jit, static_argnames="quantized")
def _prepack(params: PyTree, quantized: bool) -> PyTree:
    """As `prepack`; compiled once for models of the same sizes."""
    lay_out = functools.partial(_panels, quantized=quantized)
    return split(params, lay_out, FUSED, lambda embedding: lay_out((), embedding.T))


def _panels(fused: tuple[str, ...], *group: Array, quantized: bool) -> Any:
    """Kernels [in, out] as panels for `kernels`."""
    if fused == GATED:
        return kernels.gated_panels(*group, quantized=quantized)
    return kernels.panels(jnp.concatenate(group, axis=1), quantized)
