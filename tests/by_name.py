"""Weights that are drawn by the names of tensors, so that golden files need not hold them."""

import zlib

import numpy as np


def weights(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A tensor of transformers' name, float32; no norm and no bias is as a new model has it."""
    draws = np.random.default_rng(zlib.crc32(name.encode()))
    if "norm" in name:
        return draws.uniform(0.5, 1.5, shape).astype(np.float32)
    std = 0.3 if name.endswith("bias") else 0.5 if "embed" in name else 1.5 * shape[-1] ** -0.5
    return draws.normal(0.0, std, shape).astype(np.float32)
