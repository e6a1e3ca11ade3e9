"""Recipes for training and distillation: from gin files, or a draft for a user's own texts."""

import dataclasses
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import gin
import numpy as np

from speculative import checks, gin_files
from speculative.models import Config, DecoderOnlyConfig, T5Config, model_of, named
from speculative.models.distilled import KEEP, distilled
from speculative.models.reads import Reads
from speculative.training import distil, loop, train
from speculative.training.data import MOST_PROMPT, Examples, ragged

MODELS = (T5Config, DecoderOnlyConfig, Reads, named)
KNOWN = (*MODELS, loop.TrainConfig, train.Files, train.train, distil.distil)
"""The configurables of training's gin files, which may import only the modules of these."""
for configurable in KNOWN:
    gin.register(configurable)

HELD_OUT, FEWEST = 256, 40  # The most texts held out, and the fewest in all that are enough.


def configured(
    recipe: Callable[..., bool], file: str, bindings: Sequence[str], arguments: dict[str, Any]
) -> dict[str, Any]:
    """The parameters of `train.train` or `distil.distil` from a gin file, bindings and arguments.

    Arguments override bindings, which override the file. Raises ValueError if the file
    names something that does not exist, or leaves out a parameter.
    """
    try:
        gin_files.read(gin_files.find(file), bindings, {known.__module__ for known in KNOWN})
        parameters = gin.get_bindings(recipe) | arguments
        inspect.signature(recipe).bind(**parameters)
        return parameters
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file} cannot be used: {error}") from error
    finally:
        gin.clear_config()


@dataclasses.dataclass(frozen=True)
class DraftSettings:
    """What command-line options can set; a gin file (`--config`) instead of texts can set more."""

    dim: int | None = None  # Features, a multiple of 64; None: half of the target's, at most 1,024.
    layers: int = 1  # Decoder layers.
    keep: int = KEEP  # Most tokens of its draft vocabulary, which has the most frequent ones.
    steps: int = 3000  # Training steps.
    source_length: int | None = None  # Tokens to which longer texts are cut; None: no cut.
    max_length: int = 128  # Most tokens of a text that the target writes.
    batch_size: int = 64  # Texts that the target writes at a time.
    seed: int = 0  # For the initial parameters and the texts' order.

    def model(self, target: Config) -> Config:
        """The draft's sizes, see `models.distilled`; ValueError unless 64 divides `dim`."""
        return distilled(target, self.dim, self.layers)


def divided(
    texts: Sequence[np.ndarray], target: Config, source_length: int | None, are_inputs: bool
) -> dict[str, Examples]:
    """Texts to learn from and held-out texts, as inputs or targets of examples by file.

    They are cut to `source_length` tokens, and to the target's positions.
    """
    most = min(size or checks.MAX_TOKENS for size in (source_length, target.max_positions))
    if longer := sum(len(x) > most for x in texts):
        warning = f"{longer:,} of {len(texts):,} texts are longer than {most} tokens"
        print(f"{warning}, and are cut there.", file=sys.stderr)
    cut = [x if len(x) <= most else np.append(x[: most - 1], x[-1:]) for x in texts]
    if len(cut) < FEWEST:
        raise ValueError(
            f"There are {len(cut)} texts to learn from; give at least {FEWEST}, better thousands."
        )
    every = -(-len(cut) // min(HELD_OUT, len(cut) // 10))
    chosen = {"train": [x for i, x in enumerate(cut) if i % every], "held_out": cut[::every]}
    order = -1 if are_inputs else 1
    nothing = np.zeros(0, np.int32)
    return {name: ragged(*([nothing] * len(part), part)[::order]) for name, part in chosen.items()}


def of_texts(
    target: Config, texts: Sequence[np.ndarray], settings: DraftSettings, whole: bool = False
) -> dict[str, Any]:
    """Parameters of `distil.distil`; ValueError if a setting is wrong, or there are too few texts.

    The `texts`, tokens with the end of sequence, are sources of an encoder-decoder, or texts whose
    beginnings a decoder-only target continues, or `whole` prompts for it.
    """
    model, decoder_only = settings.model(target), model_of(target).decoder_only
    goes_on = decoder_only and not whole
    examples = divided(texts, target, settings.source_length, not goes_on)
    longest = max(len(text) for part in examples.values() for pair in part for text in pair)
    source, text = (0, longest) if goes_on else (longest, 0)
    prompt = MOST_PROMPT if goes_on else source if decoder_only else 0
    text, source = max(text, settings.max_length + prompt), 0 if decoder_only else source
    return {
        "model": model,
        "config": loop.TrainConfig(
            steps=settings.steps,
            batch_size=4,
            source_length=max(256, source) if source else 1,  # A row holds several.
            target_length=max(160, text),
            learning_rate=0.02,
            warmup_steps=min(200, settings.steps // 10),
            seed=settings.seed,
            log_every=25,
            evaluate_every=500,
            checkpoint_every=250,
        ),
        "files": train.Files({"train": 1.0}, ["held_out"]),
        "data_dir": examples,
        # Texts that the target continues are also learned from; an encoder-decoder's are sources.
        "references": {"train": 1.0} if goes_on else {},
        "max_length": settings.max_length,
        "generation_batch": settings.batch_size,
        "keep": settings.keep if settings.keep < model.vocab_size else 0,
        "settings": dataclasses.asdict(settings),
    }
