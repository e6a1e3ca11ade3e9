"""Registers tasks with seqio: columns of text become tokens, as in T5's own tasks."""

import functools
import os
import pathlib
from typing import Any

import seqio
import tensorflow as tf

from speculative.measurement import quality
from speculative.tasks import task
from speculative.vocabulary import EXTRA_IDS

T5_VOCABULARY = "gs://t5-data/vocabs/cc_all.32000.100extra/sentencepiece.model"

# TensorFlow only reads text here, and by default would take the GPU's memory away from JAX.
tf.config.set_visible_devices([], "GPU")


def t5_vocabulary() -> seqio.SentencePieceVocabulary:
    """T5's vocabulary of 32,000 pieces and 100 sentinels, read when it is first used.

    The environment variable `SPECULATIVE_T5_VOCABULARY` may name another file, which must exist.
    """
    path = os.environ.get("SPECULATIVE_T5_VOCABULARY", T5_VOCABULARY)
    if "://" not in path and not pathlib.Path(path).is_file():
        raise ValueError(
            f"SPECULATIVE_T5_VOCABULARY names {path!r}, where there is no file; name T5's "
            f"SentencePiece model, or unset it to read {T5_VOCABULARY}."
        )
    return seqio.SentencePieceVocabulary(path, extra_ids=EXTRA_IDS)


def to_text(
    dataset: tf.data.Dataset, prefix: str, inputs: str | None, targets: str
) -> tf.data.Dataset:
    """Examples from columns of those names; without `inputs`, each input is only the prefix."""

    def convert(example: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        parts = [prefix] if inputs is None else [prefix, example[inputs]]
        return {"inputs": tf.strings.join(parts), "targets": example[targets]}

    return dataset.map(convert, num_parallel_calls=tf.data.AUTOTUNE)


def register(
    name: str, source: Any, vocabulary: seqio.Vocabulary, inputs: str | None, targets: str
) -> None:
    """Registers one of `TASKS`: prefixed text, tokenised, cut to length and closed by EOS.

    `inputs`, unless it is None, and `targets` name columns of `source`, a seqio source.
    """
    if name in seqio.TaskRegistry.names():
        return  # T5's library registers tasks of the same names and contents.
    known = task(name)
    feature = functools.partial(seqio.Feature, vocabulary, dtype=tf.int32)
    seqio.TaskRegistry.add(
        name,
        source=source,
        preprocessors=[
            functools.partial(to_text, prefix=known.prefix, inputs=inputs, targets=targets),
            seqio.preprocessors.tokenize,
            seqio.preprocessors.append_eos_after_trim,
        ],
        # A missing input has no end-of-sequence token either.
        output_features={
            "inputs": feature(add_eos=inputs is not None),
            "targets": feature(add_eos=True),
        },
        metric_fns=[quality.METRICS[known.metric]] if known.metric else [],
    )
