"""A draft for any target, distilled on texts of one's own with settings that suit most pairs."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from speculative.grouping import SOURCE_LENGTHS
from speculative.models import Config, model_of
from speculative.models.reads import Reads
from speculative.training.examples import MOST_PROMPT, Examples, ragged
from speculative.training.loop import TrainConfig
from speculative.training.train import Files

HELD_OUT, FEWEST = 256, 40
"""Texts that are held out at most, and the fewest that are enough."""


@dataclasses.dataclass(frozen=True)
class DraftSettings:
    """What options may choose; a gin file in place of the texts (`--config`) chooses more."""

    dim: int | None = None  # Features, a multiple of 64; None: half of the target's, to 1,024.
    layers: int = 1  # Of its decoder.
    keep: int = 8192  # Tokens of its draft vocabulary at most, the most frequent ones.
    steps: int = 3000  # Of training.
    max_length: int = 128  # Tokens of a text that the target writes.
    batch_size: int = 64  # Texts that it writes at a time.
    seed: int = 0  # Of the first parameters and of the texts' order.

    def model(self, target: Config) -> Config:
        """The draft's sizes: thin layers that read the target's encoder, if any, and its decoder.

        Of the decoder they read the hidden states after each third of its layers. Raises ValueError
        if `dim` is no multiple of 64.
        """
        dim = self.dim or min(1024, max(64, 64 * round(target.emb_dim / 128)))
        if dim % 64:
            raise ValueError(f"--dim must be a multiple of 64, the size of a head, not {dim}.")
        depth = target.decoder_layers
        read = sorted({math.ceil(depth * k / 3) - 1 for k in (1, 2, 3)})
        return target.replace(
            emb_dim=dim,
            num_heads=dim // 64,
            num_kv_heads=0,
            head_dim=64,
            mlp_dim=4 * dim,
            **dict.fromkeys(target.depths, 0) | {target.depths[-1]: self.layers},
            reads=Reads(target.emb_dim, tuple(f"decoder/layers_{i}" for i in read)),
            logits_via_embedding=False,
            dropout_rate=0.0,
            dtype="float32",
        )


def divided(texts: Iterable[np.ndarray], target: Config) -> dict[str, Examples]:
    """The texts to learn from and those held out, as examples by the names of their files.

    A text of more tokens than the target can read is cut. Raises ValueError if there are too few.
    """
    most = min(SOURCE_LENGTHS[-1], target.max_positions or SOURCE_LENGTHS[-1])
    cut = [x if len(x) <= most else np.append(x[: most - 1], x[-1:]) for x in texts]
    if len(cut) < FEWEST:
        raise ValueError(
            f"There are {len(cut)} texts to learn from; give at least {FEWEST}, better thousands."
        )
    every = -(-len(cut) // min(HELD_OUT, len(cut) // 10))
    chosen = {"train": [x for i, x in enumerate(cut) if i % every], "held_out": cut[::every]}
    order = 1 if model_of(target).decoder_only else -1  # Texts are targets, or sources.
    nothing = np.zeros(0, np.int32)
    return {name: ragged(*([nothing] * len(part), part)[::order]) for name, part in chosen.items()}


def recipe(target: Config, texts: Iterable[np.ndarray], settings: DraftSettings) -> dict[str, Any]:
    """Parameters of `distil.distil` for a target of these sizes and texts.

    The `texts` are the sources of an encoder-decoder, or texts of which a decoder-only target
    continues the beginnings: tokens with the end of sequence. Raises ValueError if a setting is
    wrong, or there are too few texts.
    """
    model, goes_on = settings.model(target), model_of(target).decoder_only
    examples = divided(texts, target)
    source, text = (
        max(int(np.diff(getattr(part, offsets)).max()) for part in examples.values())
        for offsets in ("inputs_offsets", "targets_offsets")
    )
    text = max(text, settings.max_length + (MOST_PROMPT if goes_on else 0))
    config = TrainConfig(
        steps=settings.steps,
        batch_size=4,
        source_length=max(256, source) if source else 1,  # Of a row, which holds several.
        target_length=max(160, text),
        learning_rate=0.02,
        warmup_steps=min(200, settings.steps // 10),
        seed=settings.seed,
        log_every=25,
        evaluate_every=500,
        checkpoint_every=250,
    )
    return {
        "model": model,
        "config": config,
        "files": Files({"train": 1.0}, ["held_out"]),
        "data_dir": examples,
        # The texts themselves cost no writing; those of an encoder-decoder are sources.
        "references": {"train": 1.0} if goes_on else {},
        "max_length": settings.max_length,
        "generation_batch": settings.batch_size,
        "keep": settings.keep if settings.keep < model.vocab_size else 0,
        "settings": dataclasses.asdict(settings),
    }
