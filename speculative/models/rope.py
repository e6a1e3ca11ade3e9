"""Rotary positions, which rotate queries and keys (Su et al., arXiv 2104.09864)."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import Array

from speculative.backends import Rotation


@dataclasses.dataclass(frozen=True)
class Rope:
    """The angles by which each pair of a head's features is rotated.

    Attributes:
        base: the wavelengths of pairs are powers of it.
        factor: wavelengths are stretched by it.
        bounds: as in Llama 3.1, which does not stretch short wavelengths: two divisors and a number
            of positions. A wavelength above the positions over the first divisor is stretched, one
            below the positions over the second is not, and one between the two is a mixture.
            Empty: all are stretched alike.
    """

    base: float = 10_000.0
    factor: float = 1.0
    bounds: tuple[float, ...] = ()

    def frequencies(self, size: int) -> np.ndarray:
        """Radians per position, float32 [H / 2], for heads of size H."""
        exponents = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
        radians = 1 / np.float32(self.base) ** exponents
        if not self.bounds:
            return radians / np.float32(self.factor)
        low, high, positions = self.bounds
        turns = positions * radians / (2 * np.pi)  # The positions over the wavelength.
        kept = np.clip((turns - low) / (high - low), 0, 1)
        return ((1 - kept) * radians / self.factor + kept * radians).astype(np.float32)

    def rotation(self, positions: Array, size: int) -> Rotation:
        """The rotation of positions [B or 1, L]: cosines and sines [B or 1, L, H / 2], float32."""
        angles = positions[..., None].astype(jnp.float32) * self.frequencies(size)
        return Rotation(jnp.cos(angles), jnp.sin(angles))
