"""Writes the token ids of tasks, by default both Debian tasks, for training without TensorFlow.

SPECULATIVE_DATA=data python scripts/export_tokenized.py --output_dir=data/tokenized
python scripts/export_tokenized.py --tasks=wmt_t2t_ende_v003 --output_dir=data/tokenized
"""

import argparse
import pathlib

import numpy as np

from speculative.tasks import get_task
from speculative.training.data import ragged

MAX_LENGTHS = {"inputs": 512, "targets": 128}  # tokens, EOS included
T5_LENGTHS = {"inputs": 512, "targets": 512}


def export(task: str, split: str, path: pathlib.Path) -> tuple[int, int]:
    """Writes a split's token ids, prefix and EOS included, for `speculative.training.data`.

    Training examples beyond `MAX_LENGTHS` are left out, because half a translation would teach the
    model to stop early; held-out ones are cut, so that every system is measured on the same
    examples. T5's own tasks are cut at `T5_LENGTHS`, as T5 cuts them: most articles of CNN/DM are
    longer. A language model's texts have the same limit.

    Returns:
        The numbers of examples kept and left out.

    Raises:
        ValueError: there is no such task, or the split cannot be read.
    """
    registered = get_task(task)
    import seqio  # It imports TensorFlow, which --help does not need.

    t5s = isinstance(registered.source, seqio.TfdsDataSource)
    longest = T5_LENGTHS if t5s or task == "debian_lm" else MAX_LENGTHS
    limits = longest if t5s or split != "train" else None
    small = registered.output_features["targets"].vocabulary.vocab_size <= 2**15
    kept: dict[str, list[np.ndarray]] = {"inputs": [], "targets": []}
    left_out = 0
    dataset = registered.get_dataset(limits, split=split, shuffle=False)
    for example in dataset.as_numpy_iterator():
        if any(len(example[name]) > longest[name] for name in kept):
            left_out += 1
            continue
        for name, ids in kept.items():  # Half the memory matters for large tasks.
            ids.append(example[name].astype(np.int16 if small else np.int32))
    ragged(**kept).save(path)
    return len(kept["inputs"]), left_out


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Writes token ids for training without TensorFlow."
    )
    parser.add_argument("--output_dir", type=pathlib.Path, required=True)
    parser.add_argument("--tasks", default="debian_ende,debian_synopsis")
    arguments = parser.parse_args()
    try:
        for name in arguments.tasks.split(","):
            for split in get_task(name).splits:
                path = arguments.output_dir / f"{name}_{split}.npz"
                kept, left_out = export(name, split, path)
                print(f"{path}: {kept} examples, {left_out} too long")
    except (OSError, ValueError) as error:
        parser.exit(2, f"error: {error}\n")


if __name__ == "__main__":
    main()
