"""Tokenised examples in .npz files, which machines without TensorFlow can read."""

import dataclasses
import pathlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from speculative import disk
from speculative.types import PAD_ID

MOST_PROMPT = 23  # Tokens of a text that `prompts` takes at most, without the start token.


@dataclasses.dataclass(frozen=True)
class Examples:
    """Ragged token ids: example i is the slice between offsets [n + 1] i and i + 1.

    The tokens include the end of sequence. Iteration gives each example's source and target.
    """

    inputs: np.ndarray
    inputs_offsets: np.ndarray
    targets: np.ndarray
    targets_offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.inputs_offsets) - 1

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        return ((self.input(i), self.target(i)) for i in range(len(self)))

    def input(self, i: int) -> np.ndarray:
        """Source tokens of example i."""
        return self.inputs[self.inputs_offsets[i] : self.inputs_offsets[i + 1]]

    def target(self, i: int) -> np.ndarray:
        """Target tokens of example i."""
        return self.targets[self.targets_offsets[i] : self.targets_offsets[i + 1]]

    def save(self, path: str | pathlib.Path) -> None:
        """Writes a .npz file for `load`, whole or not at all."""
        with disk.written(path) as part, part.open("wb") as file:
            np.savez_compressed(file, **vars(self))


def ragged(inputs: Sequence[np.ndarray], targets: Sequence[np.ndarray]) -> Examples:
    """Examples from the token ids of each source and each target."""
    columns: list[np.ndarray] = []
    for rows in (inputs, targets):
        flat = np.concatenate(rows) if rows else np.zeros(0)
        columns.append(flat.astype(np.int16 if flat.max(initial=0) < 2**15 else np.int32))
        columns.append(np.cumsum([0, *map(len, rows)], dtype=np.int64))
    return Examples(*columns)


def load(path: str | pathlib.Path) -> Examples:
    """Reads tokenised examples; raises ValueError if the file is missing, damaged or empty."""
    path = pathlib.Path(path)
    if not path.is_file():
        raise ValueError(f"{path} does not exist; make it with scripts/export_tokenized.py.")
    try:
        with np.load(path) as arrays:
            examples = Examples(*(arrays[f.name] for f in dataclasses.fields(Examples)))
    except Exception as error:  # NumPy raises many kinds for a damaged archive.
        raise ValueError(f"{path} is no .npz of tokenised examples: {error}.") from error
    for name in ("inputs", "targets"):
        flat, offsets = getattr(examples, name), getattr(examples, f"{name}_offsets")
        ends_fit = len(offsets) > 1 and offsets[0] == 0 and offsets[-1] == len(flat)
        if not ends_fit or len(offsets) != len(examples) + 1:
            raise ValueError(f"{path} has no examples, or offsets that do not fit its {name}.")
    return examples


def load_all(folder: str | pathlib.Path, names: Iterable[str]) -> dict[str, Examples]:
    """The examples of files of a folder, which are named without `.npz`; see `load`."""
    return {name: load(pathlib.Path(folder, f"{name}.npz")) for name in names}


def prompts(texts: Examples, start_id: int = PAD_ID) -> Examples:
    """Prompts for a decoder-only model: the start token and the beginning of each target.

    Beginnings of 4 to `MOST_PROMPT` tokens take turns, but none is longer than half of its text.
    """
    beginnings = [
        np.append(start_id, target[: min(4 + i % (MOST_PROMPT - 3), len(target) // 2)])
        for i, (_, target) in enumerate(texts)
    ]
    return ragged(beginnings, [np.zeros(0, np.int32)] * len(beginnings))


def whole_texts(written: Examples) -> Examples:
    """Examples without inputs, whose targets are each prompt and its continuation joined."""
    texts = [np.concatenate([prompt[1:], target]) for prompt, target in written]
    return ragged([np.zeros(0, np.int32)] * len(texts), texts)
