"""This package: plainly and speculatively, in one dispatch a text."""

import jax
import jax.numpy as jnp
import numpy as np

from speculative.decoding import random_draws
from speculative.pair import SOURCE_LENGTHS, load, load_random
from speculative.peers.system import Setting


class Ours:
    """See `system.System`."""

    def __init__(self, setting: Setting) -> None:
        """Loads the pair."""
        if setting.random:
            self._pair = load_random(setting.target, "uniform", "float32")
        else:
            self._pair = load(setting.target, setting.draft or "uniform", "float32")
        self._setting = setting
        self.ways = ("plain", "speculative") if setting.draft else ("plain",)
        self._start = jax.jit(self._pair.target.start, static_argnums=2)

    def decode(self, way: str, source: list[int]) -> list[int]:
        """See `system.System`."""
        gamma = {"plain": 0, "speculative": self._setting.gamma}[way]
        config = self._pair.decoding(gamma=gamma, max_length=self._setting.max_length)
        config = config if self._setting.ends else config.endless
        draws = random_draws(0, np.array([0]), config.capacity)
        return self._pair.result(self._pair.run(self._row(source), draws, config)).tokens

    def prefill(self, source: list[int]) -> None:
        """See `system.System`."""
        cache = self._setting.max_length + 16
        jax.block_until_ready(self._start(self._pair.params.target, self._row(source), cache))

    def _row(self, source: list[int]) -> jax.Array:
        padding = 0, padded(len(source)) - len(source)
        return jnp.asarray(np.pad(np.array(source, np.int32), padding)[None])


def padded(length: int) -> int:
    """The width to which `Pair.encode` pads a source; beyond its limit, the length itself."""
    return next((width for width in SOURCE_LENGTHS if length <= width), length)
