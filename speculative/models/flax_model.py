"""The model interface over a Flax module, for all families."""

import dataclasses
import functools
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from speculative.backends import PREPACKED, Prepacked, Xla
from speculative.models.config import Config
from speculative.models.interface import Chunk, Extended, Model, Started
from speculative.models.reads import unpacked
from speculative.models.stack import LAST
from speculative.ragged import move_rows
from speculative.types import PAD_ID, Inputs, Logits, PyTree, Rows, Segments, State, Tokens


@dataclasses.dataclass(frozen=True)
class FlaxModel(Model):
    """A model of a given configuration, for decoding and training.

    `params` come from `init` or a checkpoint, possibly through `backends.for_decoding`.
    """

    config: Config
    start_id: int = PAD_ID  # The token before an encoder-decoder's output.
    backend: Xla = Xla()  # Computes with parameters that are not prepacked.
    root: ClassVar[type[nn.Module]]  # The root module of the parameter tree.

    @functools.cached_property
    def _module(self) -> nn.Module:
        return self.root(self.config, self.backend)  # pyright: ignore[reportCallIssue]

    @functools.partial(jax.jit, static_argnums=0)
    def init(self, key: Array) -> PyTree:
        """Random float32 parameters for training, under T5X's names."""
        tokens, reads = jnp.ones((1, 1), jnp.int32), self.config.reads
        encoded = jnp.ones((1, 1, reads.source_dim)) if reads.source_dim else None
        if reads.target_layers:
            hidden = jnp.ones((1, 1, reads.hidden_dim))
            inputs = tokens, None, encoded, hidden, 2  # The second guess reads its own states.
            return self._module.init(key, *inputs, method="unroll")["params"]
        return self._module.init(key, tokens, tokens, None, False, encoded, ())["params"]

    def encode(self, params: PyTree, inputs: Inputs, segments: Array | None = None) -> Array | None:
        """The encoder's output [B, S, D] for inputs [B, S]; None for a decoder-only model.

        `segments` [B, S] number the examples packed into each row from 1 (0 is padding).
        """
        if self.decoder_only:
            return None
        return self._apply(params, inputs, segments, method="encode")

    @property
    def extend_layers(self) -> tuple[str, ...]:
        """Names of the hidden states that `extend` can give."""
        return (*(f"decoder/layers_{i}" for i in range(self.config.decoder_layers)), LAST)

    @property
    def draft_vocabulary(self) -> np.ndarray | None:
        """The tokens that have logits, ascending; None for all."""
        kept = self.config.reads.draft_vocabulary
        return unpacked(kept) if kept else None

    @property
    def max_positions(self) -> int:
        """See `Model.max_positions`; relative positions have no limit."""
        return self.config.max_positions

    def forward_with_hidden(
        self,
        params: PyTree,
        inputs: Inputs,
        decoder_inputs: Tokens,
        segments: Segments = None,
        dropout_key: Array | None = None,
        encoded: Array | None = None,
        layers: tuple[str, ...] = (),
    ) -> tuple[Logits, dict[str, Array]]:
        """Teacher-forced logits [B, L, V], float32, and the decoder's hidden states [B, L, D].

        Hidden states are those of `layers`, by name. A key turns on dropout. `segments`, ([B, S],
        [B, L]), number the examples packed into each row from 1 (0 is padding); attention stays
        within an example. `encoded` [B, S, D] is an encoder's output in place of the model's own. A
        decoder-only model reads only decoder_inputs.
        """
        train = dropout_key is not None
        rngs = {"dropout": dropout_key} if train else None
        arguments = inputs, decoder_inputs, segments, train, encoded, self._given(layers)
        return self._apply(params, *arguments, rngs=rngs)

    def start(self, params, inputs, cache_length, encoded=None, layers=()) -> Started:
        """See `Model.start`."""
        names = self._given(layers, start=True)
        return self._apply(params, inputs, cache_length, encoded, names, method="start")

    def extend(self, params, state, chunk, at=None, layers=()) -> Extended:
        """See `Model.extend`."""
        return self._apply(params, state, chunk, at, self._given(layers), method="extend")

    def unroll(
        self,
        params: PyTree,
        tokens: Tokens,
        segments: Segments,
        encoded: Array | None,
        hidden: Array,
        guesses: int,
    ) -> list[Logits]:
        """See `Transformer.unroll`; for training a draft with `Reads.target_layers`."""
        return self._apply(params, tokens, segments, encoded, hidden, guesses, method="unroll")

    def read_on(
        self,
        params: PyTree,
        state: State,
        chunk: Chunk,
        hidden: Array | None = None,
        own: Array | None = None,
    ) -> tuple[Logits, State, Array]:
        """Appends a chunk [B, L], like `extend`, to a draft with `Reads.target_layers`.

        Each token is read with the target's hidden states [B, L, F] of the position before it,
        those of all layers side by side, or with this model's own [B, L, D]. Returns logits
        [B, L, V], the state, and this model's own hidden states [B, L, D].
        """
        return self._apply(params, state, chunk, hidden, own, method="read_on")

    def rewind(self, state: State, lengths: Rows) -> State:
        """See `Model.rewind`."""
        return dataclasses.replace(state, lengths=lengths)

    def keep(self, state: State, length: Array | int, path: Array, count: Rows) -> State:
        """See `Model.keep`."""
        starts = state.lengths - length
        at = [state.entries(starts, self.config.window(i)) for i in range(len(state.keys))]
        keys, values = (
            tuple(move_rows(x, i[:, None] + path, i, axis=2) for x, i in zip(each, at, strict=True))
            for each in (state.keys, state.values)
        )
        return dataclasses.replace(state, lengths=starts + count, keys=keys, values=values)

    def _given(self, layers: tuple[str, ...], start: bool = False) -> tuple[str, ...]:
        """The requested layers that a call computes; raises ValueError for an unknown one."""
        encoders = () if self.decoder_only else ("encoder",)
        known = (*encoders, *self.extend_layers)
        if unknown := [name for name in layers if name not in known]:
            names = ", ".join(known)
            raise ValueError(f"There is no hidden state {unknown[0]!r}; known are {names}.")
        here = encoders if start and encoders else self.extend_layers
        return tuple(name for name in layers if name in here)

    def _apply(self, params: PyTree, *args: Any, **kwargs: Any) -> Any:
        module, variables = self._module, {"params": params}
        if isinstance(params, Prepacked):
            module = module.clone(backend=params.backend)
            variables = {"params": params.params, PREPACKED: params.prepacked}
        return module.apply(variables, *args, **kwargs)
