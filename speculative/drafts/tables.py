"""The .npz files that drafts read, beside a target's weights or elsewhere."""

import dataclasses
import pathlib
import zipfile
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

from speculative import disk
from speculative.vocabulary import Vocabulary

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Table:
    """A kind of file."""

    file: str  # Its name beside the target's weights.
    content: str  # What it holds, for messages.
    command: str  # The command that makes it.
    arrays: tuple[str, ...]  # The names of its arrays.

    def save(
        self, path: str | pathlib.Path, vocabulary: Vocabulary, arrays: Mapping[str, np.ndarray]
    ) -> None:
        """Writes arrays of numbers from 0 on and the vocabulary's fingerprint, all or nothing."""
        small: dict[str, Any] = {
            name: values.astype(np.min_scalar_type(values.max(initial=0)))
            for name, values in arrays.items()
        }
        with disk.written(path) as part, part.open("wb") as file:
            np.savez_compressed(file, vocabulary=vocabulary.fingerprint, **small)

    def load(
        self,
        path: str | pathlib.Path,
        vocabulary: Vocabulary,
        make: Callable[[dict[str, np.ndarray]], T],
    ) -> T:
        """What `make` builds from the arrays of a file that `save` wrote.

        Raises:
            ValueError: the file is missing, damaged or of another vocabulary, or `make` raises one.
        """
        if not pathlib.Path(path).is_file():
            raise ValueError(f"{path} does not exist; make it with {self.command}.")
        try:
            with zipfile.ZipFile(path) as archive, np.load(path) as file:
                # NumPy reads no further than its arrays, and may miss the checksums behind them.
                if (damaged := archive.testzip()) is not None:
                    raise ValueError(f"the checksum of {damaged} differs")
                arrays = {name: file[name] for name in self.arrays}
                theirs = str(file["vocabulary"])
        except Exception as error:  # NumPy and zipfile raise many kinds for a damaged archive.
            raise ValueError(
                f"{path} is no .npz of {self.content} ({error}); make it again with {self.command}."
            ) from error
        if theirs != vocabulary.fingerprint:
            raise ValueError(
                f"{path} holds {self.content} of another vocabulary (SHA-256 {theirs[:12]}) than "
                f"{vocabulary.path} (SHA-256 {vocabulary.fingerprint[:12]}); make it again for "
                f"this vocabulary with {self.command}."
            )
        try:
            return make(arrays)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
