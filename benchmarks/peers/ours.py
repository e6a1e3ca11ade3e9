"""This package: autoregressive and speculative decoding, in one dispatch per text.

The target is held in float32 and, in ways that say so, in int8.
"""

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.peers.system import Setting
from speculative import grouping
from speculative.decoding import Decoding
from speculative.loading import load
from speculative.sampling import Sampling


class Ours:
    """See `system.Program`."""

    def __init__(self, setting: Setting) -> None:
        draft, self._setting = setting.draft or "uniform", setting
        arguments = setting.target, draft, "float32", None, setting.random
        self._pair, in_int8 = (load(*arguments, quantize=held) for held in ("none", "int8"))
        gammas = {"autoregressive": 0} | ({"speculative": setting.gamma} if setting.draft else {})
        self._ways = {way: (self._pair, gamma) for way, gamma in gammas.items()}
        self._ways |= {f"{way}, int8": (in_int8, gamma) for way, gamma in gammas.items()}
        self.ways = tuple(self._ways)
        self._start = jax.jit(self._pair.target.start, static_argnums=2)

    def decode(self, way: str, source: list[int]) -> list[int]:
        pair, gamma = self._ways[way]
        vocabulary, max_length = pair.vocabulary, self._setting.max_length
        ends = () if self._setting.random else vocabulary.eos_ids
        config = Decoding(vocabulary.size, Sampling(0.0), gamma, max_length, ends)
        draws = config.draws(0, np.array([0]))
        return pair.results(pair.run(self._padded(source), draws, config))[0].tokens

    def prefill(self, source: list[int]) -> None:
        cache = self._setting.max_length + 16
        jax.block_until_ready(self._start(self._pair.params.target, self._padded(source), cache))

    def _padded(self, source: list[int]) -> jax.Array:
        return padded(source, self._pair.target.pad_id)


def padded(source: list[int], pad: int = 0) -> jax.Array:
    """A source or prompt [1, S], padded as by `Pair.encode`."""
    return jnp.asarray(grouping.filled([source], grouping.padded(len(source)), pad))
