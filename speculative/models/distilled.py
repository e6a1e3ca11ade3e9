"""The sizes of the draft that `distil` trains: thin layers that read the target's hidden states."""

import dataclasses
import math

from speculative.models.config import Config
from speculative.models.reads import Reads, packed

DISTILLED = "distilled"  # The name of a draft of `usual` sizes and random weights.
KEEP = 8192  # Tokens that the draft may guess by default.


def distilled(target: Config, dim: int | None = None, layers: int = 1) -> Config:
    """A draft of `dim` features that reads the target's encoder, if any, and its decoder.

    It reads the decoder's hidden states after each third of the layers. By default it has half the
    target's features, at most 1,024; raises ValueError unless 64 divides `dim`.
    """
    dim = dim or min(1024, max(64, 64 * round(target.emb_dim / 128)))
    if dim % 64:
        raise ValueError(f"--dim must be a multiple of 64, the size of a head, not {dim}.")
    read = sorted({math.ceil(target.decoder_layers * k / 3) - 1 for k in (1, 2, 3)})
    return target.replace(
        emb_dim=dim,
        num_heads=dim // 64,
        num_kv_heads=0,
        head_dim=64,
        mlp_dim=4 * dim,
        **dict.fromkeys(target.depths, 0) | {target.depths[-1]: layers},
        reads=Reads(target.emb_dim, tuple(f"decoder/layers_{i}" for i in read)),
        logits_via_embedding=False,
        shared_embedding=True,
        dropout_rate=0.0,
        dtype="float32",
    )


def usual(target: Config) -> Config:
    """The draft that `distil` trains by default, with the first tokens as its vocabulary."""
    made = distilled(target)
    kept = packed(range(min(KEEP, target.vocab_size)))
    return made.replace(reads=dataclasses.replace(made.reads, draft_vocabulary=kept))
