"""The .npz files that drafts read, counted from text with one vocabulary."""

import contextlib
import dataclasses
import pathlib
import zipfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
from numpy.lib.npyio import NpzFile

from speculative import disk
from speculative.vocabulary import Vocabulary

T = TypeVar("T")
SUFFIX = ".npz"
COMMAND = "speculative count"


@contextlib.contextmanager
def opened(
    path: str | pathlib.Path, content: str = "counts", command: str = COMMAND
) -> Iterator[NpzFile]:
    """The arrays of a file, read when asked for; what is raised while it is open blames the file.

    Raises:
        ValueError: the file is missing or damaged; it names `content` and the `command` to make it.
    """
    if not pathlib.Path(path).is_file():
        raise ValueError(f"{path} does not exist; make it with {command}.")
    try:
        # NumPy leaves a damaged archive open.
        with zipfile.ZipFile(path), np.load(path) as file:
            yield file
    except Exception as error:  # NumPy and zipfile raise many kinds for a damaged archive.
        raise ValueError(
            f"{path} is no {SUFFIX} of {content} ({error}); make it again with {command}."
        ) from error


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

    def require(self, path: str | pathlib.Path, vocabulary: Vocabulary) -> None:
        """Raises ValueError if a file is of another kind or vocabulary; its arrays are not read."""
        with opened(path, self.content, self.command) as file:
            if lacking := [name for name in self.arrays if name not in file]:
                raise ValueError(f"it lacks {lacking[0]}")
            theirs = str(file["vocabulary"])
        if theirs != vocabulary.fingerprint:
            raise ValueError(
                f"{path} holds {self.content} of another vocabulary (SHA-256 {theirs[:12]}) than "
                f"{vocabulary.path} (SHA-256 {vocabulary.fingerprint[:12]}); make it again for "
                f"this vocabulary with {self.command}."
            )

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
        with opened(path, self.content, self.command) as file:
            # NumPy reads no further than its arrays, and may miss the checksums behind them.
            if file.zip and (damaged := file.zip.testzip()) is not None:
                raise ValueError(f"the checksum of {damaged} differs")
            arrays = {name: file[name] for name in self.arrays}
        self.require(path, vocabulary)
        try:
            return make(arrays)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
