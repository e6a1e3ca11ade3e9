"""Rotary positions: queries and keys are turned by their place (Su et al., arXiv 2104.09864)."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import Array

from speculative.backends import Rotation


@dataclasses.dataclass(frozen=True)
class Rope:
    """The angles by which each pair of a head's features is turned.

    Attributes:
        base: what the wavelengths of pairs are powers of.
        factor: by which wavelengths are stretched.
        bounds: of Llama 3.1, whose short wavelengths are not stretched: the shares of a number of
            positions, and that number. A wavelength above the positions over the first is
            stretched, one below the positions over the second is not, and between the two it is a
            mixture. Empty: all are stretched alike.
    """

    base: float = 10_000.0
    factor: float = 1.0
    bounds: tuple[float, ...] = ()

    def frequencies(self, size: int) -> np.ndarray:
        """Radians a position, float32 [H / 2], for heads of a size H."""
        exponents = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
        found = 1 / np.float32(self.base) ** exponents
        if not self.bounds:
            return found / np.float32(self.factor)
        low, high, positions = self.bounds
        turns = positions * found / (2 * np.pi)  # Of the positions; a wavelength is their inverse.
        kept = np.clip((turns - low) / (high - low), 0, 1)
        return ((1 - kept) * found / self.factor + kept * found).astype(np.float32)

    def rotation(self, positions: Array, size: int) -> Rotation:
        """That of positions [B or 1, L]: cosines and sines [B or 1, L, H / 2], float32."""
        angles = positions[..., None].astype(jnp.float32) * self.frequencies(size)
        return Rotation(jnp.cos(angles), jnp.sin(angles))
