"""The Debian tasks: translation, the one-line synopsis of a description, and a language model.

`scripts/build_debian_corpus.py` builds their text. It is read from the folder in the environment
variable `SPECULATIVE_DATA`, by default `data`, when a dataset is requested.
"""

import os
import pathlib
from typing import Any

import seqio
import tensorflow as tf

from speculative.tasks import prompts
from speculative.tasks.registration import register

VOCABULARY = pathlib.Path(__file__).parent.parent / "assets" / "debian.model"
# The last one is for distillation: inputs with empty targets.
SPLITS = ("train", "validation", "test", "unlabelled")


def read_examples(task: str, split: str) -> list[tuple[str, str]]:
    """Reads a split of `debian_ende` or `debian_synopsis`: inputs and targets without prefixes.

    Raises ValueError if there is no such split, or if the corpus was not built or is malformed.
    """
    if split not in SPLITS:
        raise ValueError(f"task {task!r} has no split {split!r}; it has {', '.join(SPLITS)}")
    folder = pathlib.Path(os.environ.get("SPECULATIVE_DATA", "data"))
    path, extra = folder / task / f"{split}.jsonl", folder / task / "extra.jsonl"
    if not path.exists():
        raise ValueError(
            f"{path} does not exist; build it with python scripts/build_debian_corpus.py "
            f"--mirror=MIRROR --output_dir={folder}, or set SPECULATIVE_DATA to a folder that "
            "holds it"
        )
    examples = prompts.read_pairs(str(path))
    # Training on translations also reads translated manuals and programs, if they were built.
    if split == "train" and extra.exists() and extra.stat().st_size:
        examples += prompts.read_pairs(str(extra))
    return examples


def _source(name: str) -> seqio.FunctionDataSource:
    def load(split: str, shuffle_files: bool, seed: int | None = None) -> tf.data.Dataset:
        del shuffle_files, seed  # seqio shuffles the examples of a split's single file.
        inputs, targets = map(list, zip(*read_examples(name, split), strict=True))
        columns: Any = {"inputs": inputs, "targets": targets}
        return tf.data.Dataset.from_tensor_slices(columns)

    return seqio.FunctionDataSource(load, splits=SPLITS, caching_permitted=False)


_PIECES = seqio.SentencePieceVocabulary(str(VOCABULARY), extra_ids=0)
for _name in ("debian_ende", "debian_synopsis"):
    register(_name, _source(_name), _PIECES, inputs="inputs", targets="targets")
register("debian_lm", _source("debian_synopsis"), _PIECES, inputs=None, targets="inputs")
