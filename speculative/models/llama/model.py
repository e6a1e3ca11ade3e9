"""Llama: a decoder-only model whose layers are the shared ones."""

import dataclasses

from speculative.models.decoder_only import DecoderOnly
from speculative.models.llama.config import LlamaConfig


@dataclasses.dataclass(frozen=True)
class Llama(DecoderOnly):
    """A Llama of a given configuration, as pure functions on explicit parameters."""

    config: LlamaConfig
