"""How a task is registered with seqio: columns of text to tokens, as T5's own tasks do it."""

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

# TensorFlow only reads text here; left alone, it would take the GPU's memory away from JAX.
tf.config.set_visible_devices([], "GPU")


def t5_vocabulary() -> seqio.SentencePieceVocabulary:
    """T5's vocabulary of 32,000 pieces and 100 sentinels, read when it is first used.

    It is the file that the environment variable `SPECULATIVE_T5_VOCABULARY` names, else T5's own.

    Raises:
        ValueError: the variable names a file that does not exist.
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
    """Examples of `inputs` and `targets`, from columns of other names.

    Args:
        dataset: examples with scalar strings.
        prefix: put before each input.
        inputs: the inputs' column; None leaves them with the prefix alone.
        targets: the targets' column.
    """

    def convert(example: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        parts = [prefix] if inputs is None else [prefix, example[inputs]]
        return {"inputs": tf.strings.join(parts), "targets": example[targets]}

    return dataset.map(convert, num_parallel_calls=tf.data.AUTOTUNE)


def register(
    name: str, source: Any, vocabulary: seqio.Vocabulary, inputs: str | None, targets: str
) -> None:
    """Registers one of `TASKS`: prefixed text, tokenised, cut to length and closed by EOS.

    Args:
        name: of the task.
        source: of its examples; Any, for seqio declares its sources more narrowly than it takes
            them.
        vocabulary: of inputs and targets.
        inputs: the inputs' column; None where there are none.
        targets: the targets' column.
    """
    if name in seqio.TaskRegistry.names():
        return  # T5's library has tasks of the same names, which mean the same.
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
        # Nothing has no end either.
        output_features={
            "inputs": feature(add_eos=inputs is not None),
            "targets": feature(add_eos=True),
        },
        metric_fns=[quality.METRICS[known.metric]] if known.metric else [],
    )


def register_tfds(
    name: str, dataset: str, splits: tuple[str, ...], inputs: str | None, targets: str
) -> None:
    """Registers a task that T5's vocabulary writes and TFDS holds.

    Args:
        name: of the task.
        dataset: TFDS's name for it, with configuration and version.
        splits: those it has; named, for TFDS would look for them on the network.
        inputs: as in `register`.
        targets: as in `register`.
    """
    register(name, seqio.TfdsDataSource(dataset, splits=splits), t5_vocabulary(), inputs, targets)
