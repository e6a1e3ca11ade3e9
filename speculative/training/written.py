"""Decodes many inputs with a model: texts to learn from, or to score."""

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Mapping

import jax
import numpy as np
from jax.sharding import Mesh

from speculative.backends import for_decoding, heads_together
from speculative.decoding import Decoding, Params, queue
from speculative.grouping import filled, groups, padded
from speculative.measurement import quality
from speculative.models import FlaxModel, sharding
from speculative.sampling import Sampling
from speculative.training.data import Examples, ragged
from speculative.types import PyTree
from speculative.vocabulary import Vocabulary

ROWS = 64  # Texts that are decoded at a time to be scored.


def answered(
    model: FlaxModel,
    params: PyTree,
    examples: Examples,
    decoding: Decoding,
    batch_size: int,
    positions: int = 0,
) -> Examples:
    """The same inputs with the model's own outputs as targets, in the same order.

    The parameters are laid out for decoding. `batch_size` examples are decoded at a time, each as
    if alone (`decoding.queue`), with random numbers from its index and seed 0. If `positions` are
    limited, a prompt and its output end with the last one. Raises ValueError if an input is
    too long, or if the model's logits are not finite.
    """
    sizes = np.diff(examples.inputs_offsets)
    if 0 < positions < sizes.max():
        raise ValueError(
            f"Example {sizes.argmax()} has a prompt of {sizes.max()} tokens; there are {positions} "
            "positions."
        )
    used, targets = Params(params, ()), [np.zeros(0, np.int32)] * len(examples)

    def settings(i: int) -> Decoding:
        room = positions + 1 - int(sizes[i])  # The last token is not read.
        if not positions or room >= decoding.max_length:
            return decoding
        return dataclasses.replace(decoding, max_length=room)

    def request(i: int) -> tuple[int, queue.Request]:
        source = filled([examples[i][0]], padded(int(sizes[i])), model.pad_id)
        return i, queue.Request(jax.device_put(source), settings(i), example=i)

    def shared(i: int) -> tuple[int, Hashable]:
        return padded(int(sizes[i])), settings(i).program

    kinds = decoding.sampling.kinds
    # Long inputs tend to have long outputs, which should not begin last.
    order = np.argsort(-sizes, kind="stable").tolist()
    for chosen, rows in groups(order, shared, batch_size):
        for i, output in queue.generate(model, None, used, map(request, chosen), kinds, rows):
            if not output.finite.all():
                raise ValueError(f"Logits are not finite for example {i}.")
            targets[i] = np.array(output.tokens[0, : output.lengths[0]])  # Frees the batch.
    return ragged([source for source, _ in examples], targets)


@dataclasses.dataclass(frozen=True)
class Scorer:
    """Decodes held-out inputs greedily, and scores the texts against the targets.

    Attributes:
        model: the model in training.
        pieces: its vocabulary.
        examples: some of each held-out file, by name.
        metrics: one of `quality.METRICS` for each file.
        max_length: most tokens of an output.
        on: the mesh on which it is trained; for decoding its devices share heads and texts.
    """

    model: FlaxModel
    pieces: Vocabulary
    examples: Mapping[str, Examples]
    metrics: Mapping[str, str]
    max_length: int
    on: Mesh | None = None

    def __call__(self, params: PyTree) -> dict[str, float]:
        """The scores in percent, by file and metric, of parameters as in training."""
        laid_out, scores = self._for_decoding(params), dict[str, float]()
        ends = self.max_length, self.pieces.eos_ids
        decoding = Decoding(self.pieces.size, Sampling(0.0), 0, *ends)
        for name, examples in self.examples.items():
            written = answered(self.model, laid_out, examples, decoding, ROWS)
            both = [[self.pieces.decode(y) for _, y in texts] for texts in (examples, written)]
            metric = self.metrics[name]
            scores[f"{name}/{metric}"] = quality.measure(metric, *both)
        return scores

    def _for_decoding(self, params: PyTree) -> PyTree:
        cast = self._cast(params)
        if self.on is None:
            return for_decoding(cast)
        laid_out = for_decoding(cast, shards=self._shared.shape[sharding.MODEL])
        return jax.device_put(laid_out, sharding.shardings(laid_out, self._shared))

    @functools.cached_property
    def _shared(self) -> Mesh:
        """The mesh's devices, as many of which share the model as its heads allow."""
        assert self.on is not None
        config = self.model.config
        heads = config.kv_heads // heads_together(config.head_dim)
        shape = -1, math.gcd(self.on.size, heads)
        return Mesh(self.on.devices.reshape(shape), (sharding.DATA, sharding.MODEL))

    @functools.cached_property
    def _cast(self) -> Callable[[PyTree], PyTree]:
        """Casts parameters to the model's dtype and, on a mesh, places them for decoding."""

        def cast(params: PyTree) -> PyTree:
            params = jax.tree.map(lambda x: x.astype(self.model.config.dtype), params)
            if self.on is None:
                return params
            return jax.lax.with_sharding_constraint(
                params, sharding.shardings(params, self._shared)
            )

        return jax.jit(cast)
