"""The Debian tasks: translation, a synopsis of a description, and a language model.

`debian_ende` translates, `debian_synopsis` sums up in one line, `debian_lm` writes descriptions.

Their text is built by `scripts/build_debian_corpus.py` and found in the folder that the
environment variable `SPECULATIVE_DATA` names, else in `data`. Importing this module registers
the tasks; their files are read when a dataset is asked for.
"""

import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import seqio
import tensorflow as tf

from speculative.tasks.registration import register

VOCABULARY = pathlib.Path(__file__).parent.parent / "assets" / "debian.model"
# Training on translations also reads the translated manuals and programs, where they were built.
FILES = {
    "train": ("train", "extra"),
    "validation": ("validation",),
    "test": ("test",),
    # Inputs alone, for distillation; their targets are empty.
    "unlabelled": ("unlabelled",),
}
OPTIONAL = ("extra",)
MAX_LENGTHS = {"inputs": 512, "targets": 128}  # tokens, EOS included
T5_LENGTHS = {"inputs": 512, "targets": 512}


def data_dir() -> pathlib.Path:
    """The folder that holds both corpora."""
    return pathlib.Path(os.environ.get("SPECULATIVE_DATA", "data"))


def read_examples(task: str, split: str) -> list[tuple[str, str]]:
    """Reads a split as (inputs, targets) strings, without prefixes.

    Args:
        task: `debian_ende` or `debian_synopsis`.
        split: `train`, `validation` or `test`.

    Raises:
        ValueError: if there is no such split, or the corpus was not built.
    """
    if split not in FILES:
        raise ValueError(f"task {task!r} has no split {split!r}; it has {', '.join(FILES)}")
    examples = []
    for name in FILES[split]:
        path = data_dir() / task / f"{name}.jsonl"
        if not path.exists():
            if name in OPTIONAL:
                continue
            raise ValueError(
                f"{path} does not exist; build it with python scripts/build_debian_corpus.py "
                f"--mirror=MIRROR --output_dir={data_dir()}, or set SPECULATIVE_DATA to a folder "
                "that holds it"
            )
        with path.open(encoding="utf-8") as file:
            records = map(json.loads, file)
            examples.extend((record["inputs"], record["targets"]) for record in records)
    return examples


def _source(name: str) -> seqio.FunctionDataSource:
    def load(split: str, shuffle_files: bool, seed: int | None = None) -> tf.data.Dataset:
        # One file a split: seqio shuffles examples, and there are no shards to shuffle.
        del shuffle_files, seed
        columns = zip(*read_examples(name, split), strict=True)
        inputs, targets = (tf.constant(column) for column in columns)
        dataset = tf.data.Dataset.from_tensor_slices((inputs, targets))
        return dataset.map(lambda inputs, targets: {"inputs": inputs, "targets": targets})

    return seqio.FunctionDataSource(load, splits=tuple(FILES), caching_permitted=False)


_PIECES = seqio.SentencePieceVocabulary(str(VOCABULARY), extra_ids=0)
for _name in ("debian_ende", "debian_synopsis"):
    register(_name, _source(_name), _PIECES, inputs="inputs", targets="targets")
register("debian_lm", _source("debian_synopsis"), _PIECES, inputs=None, targets="inputs")


def batches(
    task: str,
    split: str,
    batch_size: int,
    *,
    lengths: dict[str, int] | None = None,
    pack: bool = False,
    shuffle: bool = False,
    seed: int = 0,
    num_epochs: int | None = 1,
) -> Iterator[dict[str, np.ndarray]]:
    """Feature-converted batches in plain NumPy, by seqio's encoder-decoder converter.

    Args:
        task: Name of a registered task or mixture.
        split: `train`, `validation` or `test`.
        batch_size: B; a last, smaller batch is dropped.
        lengths: S of `inputs` and L of `targets` in tokens; longer texts are cut.
        pack: Several examples a row, told apart by `*_segment_ids` and `*_positions`.
        shuffle: Another order in each epoch, decided by `seed`.
        seed: Of the order.
        num_epochs: Passes over the split; None goes on for ever.

    Yields:
        `encoder_input_tokens` [B, S], `decoder_input_tokens`, `decoder_target_tokens` and
        `decoder_loss_weights` [B, L], int32; with `pack` also segment ids and positions.
    """
    dataset = seqio.get_dataset(
        task,
        task_feature_lengths=dict(lengths or MAX_LENGTHS),
        dataset_split=split,
        shuffle=shuffle,
        num_epochs=num_epochs,
        feature_converter=seqio.EncDecFeatureConverter(pack=pack),
        seed=seed,
    )
    yield from dataset.batch(batch_size, drop_remainder=True).as_numpy_iterator()


def export_tokenized(task: str, split: str, path: pathlib.Path) -> dict[str, int]:
    """Writes a split's token ids for machines without TensorFlow, on which training runs.

    The file holds `inputs` and `targets`, the ids of all examples one after the other (prefix and
    EOS included; int16 where the vocabulary allows), with `inputs_offsets` and `targets_offsets`:
    example i is `inputs[inputs_offsets[i] : inputs_offsets[i + 1]]`. Training examples beyond
    `MAX_LENGTHS` are left out, since half a translation teaches to stop early; held-out ones are
    cut, so that every system is measured on the same examples. T5's own tasks are cut at
    `T5_LENGTHS`, as T5 cuts them: most articles of CNN/DM are longer. A text without inputs, which
    a language model learns, may be as long.

    Args:
        task: Name of a registered task.
        split: `train`, `validation` or `test`.
        path: The .npz file to write.

    Returns:
        `{"examples": kept, "dropped": left out}`.
    """
    registered = seqio.TaskRegistry.get(task)
    t5s = isinstance(registered.source, seqio.TfdsDataSource)
    longest = T5_LENGTHS if t5s or task == "debian_lm" else MAX_LENGTHS
    limits = longest if t5s or split != "train" else None
    vocabulary = registered.output_features["targets"].vocabulary
    dtype = np.int16 if vocabulary.vocab_size <= 2**15 else np.int32
    dataset = registered.get_dataset(limits, split=split, shuffle=False)
    kept: dict[str, list[np.ndarray]] = {"inputs": [], "targets": []}
    dropped = 0
    for example in dataset.as_numpy_iterator():
        if any(len(example[name]) > longest[name] for name in kept):
            dropped += 1
            continue
        for name, ids in kept.items():
            ids.append(example[name].astype(dtype))
    arrays: dict[str, Any] = {}
    for name, ids in kept.items():
        arrays[name] = np.concatenate(ids)
        arrays[f"{name}_offsets"] = np.cumsum([0, *map(len, ids)], dtype=np.int64)
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, **arrays)
    return {"examples": len(kept["inputs"]), "dropped": dropped}
