"""What models of either kind have in common: pure functions on explicit parameters and states."""

import abc
import dataclasses
import functools
from typing import Any, ClassVar

import flax.linen as nn
from jax import Array

from speculative.models import cache as cache_lib
from speculative.models.config import Config
from speculative.models.layers import PACKED
from speculative.types import Inputs, Logits, PyTree, Rows, Tokens


@dataclasses.dataclass(frozen=True)
class FlaxModel(abc.ABC):
    """A model of a given configuration, by three verbs: `start`, `extend`, `rewind`.

    Hashable, so it can be a static argument of `jax.jit`. `params` is what `init` or a
    checkpoint gives, or what `packing.pack` makes of it.

    Attributes:
        config: the sizes.
        pad_id: what fills rows of inputs up.
        continues: whether inputs are the beginning of the very text that is decoded (a prompt),
            not another one (a source).
    """

    config: Config
    pad_id: ClassVar[int]
    continues: ClassVar[bool]

    _root: ClassVar[type[nn.Module]]

    @functools.cached_property
    def _module(self) -> nn.Module:
        return self._root(self.config)  # pyright: ignore[reportCallIssue]

    @abc.abstractmethod
    def init(self, key: Array) -> PyTree:
        """Random parameters to train, float32."""

    @abc.abstractmethod
    def encode(self, params: PyTree, inputs: Inputs, segments: Array | None = None) -> Array | None:
        """What an encoder makes of inputs [B, S]: [B, S, D], or None where there is none."""

    @abc.abstractmethod
    def first(self, inputs: Inputs) -> Rows:
        """The token that `extend` is fed first, after `start` on inputs [B, S]: [B]."""

    @abc.abstractmethod
    def start(
        self, params: PyTree, inputs: Inputs, cache_length: int, encoded: Array | None = None
    ) -> Any:
        """The state before the first token, with room for `cache_length` tokens a row."""

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding, padding included."""
        return self.config.vocab_size

    def forward(
        self,
        params: PyTree,
        inputs: Inputs,
        decoder_inputs: Tokens,
        segments: tuple[Array, Array] | None = None,
        dropout_key: Array | None = None,
        encoded: Array | None = None,
    ) -> Logits:
        """Teacher-forced logits [B, L, V], float32; dropout where a key is given.

        `segments`, ([B, S], [B, L]), number the examples packed into each row from 1 (0 is
        padding); attention stays within an example. `encoded` [B, S, D] is the source as an
        encoder gave it, by default the model's own. A decoder-only model reads decoder_inputs
        alone.
        """
        return self._apply(
            params,
            inputs,
            decoder_inputs,
            segments,
            dropout_key is not None,
            encoded,
            rngs=None if dropout_key is None else {"dropout": dropout_key},
        )

    def extend(
        self, params: PyTree, state: Any, tokens: Tokens, at: Rows | None = None
    ) -> tuple[Logits, Any]:
        """Appends a chunk tokens [B, L] to each row.

        Returns float32 logits [B, L, V], entry l conditioned on everything up to and
        including tokens[:, l], and the longer state. With `at` [B], only the logits of
        position at[b] of the chunk: [B, 1, V]. The cache must have room for L more tokens.
        """
        return self._apply(params, state, tokens, at, method="extend")

    def rewind(self, state: Any, lengths: Rows) -> Any:
        """Forgets each row's tokens beyond lengths [B]."""
        return cache_lib.rewind(state, lengths)

    def _apply(self, params: PyTree, *args: Any, **kwargs: Any) -> Any:
        variables = params if PACKED in params else {"params": params}
        return self._module.apply(variables, *args, **kwargs)
