"""The .npz files that drafts read, counted from text with one vocabulary."""

import contextlib
import dataclasses
import io
import pathlib
import zipfile
from collections.abc import Iterator

import numpy as np

from speculative import disk
from speculative.vocabulary import Vocabulary

Arrays = dict[str, np.ndarray]
SUFFIX = ".npz"
COMMAND = "speculative count"


@contextlib.contextmanager
def opened(
    path: str | pathlib.Path, content: str = "counts", command: str = COMMAND
) -> Iterator[zipfile.ZipFile]:
    """Opens a file for `read`; any error raised while it is open is blamed on the file.

    Raises:
        ValueError: the file is missing or damaged; names `content` and the `command` to make it.
    """
    if not pathlib.Path(path).is_file():
        raise ValueError(f"{path} does not exist; make it with {command}.")
    try:
        with zipfile.ZipFile(path) as file:
            yield file
    except Exception as error:  # NumPy and zipfile raise many kinds for a damaged archive.
        raise ValueError(
            f"{path} is no {SUFFIX} of {content} ({error}); make it again with {command}."
        ) from error


def read(file: zipfile.ZipFile, name: str) -> np.ndarray:
    """An array of an `opened` file, read as a whole, with its checksum verified."""
    return np.load(io.BytesIO(file.read(f"{name}.npy")))


def names(file: zipfile.ZipFile) -> set[str]:
    """The names of the arrays in an `opened` file."""
    return {name.removesuffix(".npy") for name in file.namelist()}


@dataclasses.dataclass(frozen=True)
class FileKind:
    """A kind of file that drafts read."""

    file: str  # Its name, next to the target's weights.
    content: str  # Its content, for messages.
    command: str  # The command that makes it.
    arrays: tuple[str, ...]  # The names of its arrays.

    def save(self, path: str | pathlib.Path, vocabulary: Vocabulary, arrays: Arrays) -> None:
        """Writes arrays of non-negative numbers and the vocabulary's fingerprint, atomically."""
        small = {
            name: values.astype(np.min_scalar_type(values.max(initial=0)))
            for name, values in arrays.items()
        }
        small["vocabulary"] = np.array(vocabulary.fingerprint)
        # Like `np.savez_compressed`, but a quarter smaller; `np.load` reads both.
        with disk.written(path) as part, zipfile.ZipFile(part, "w", zipfile.ZIP_LZMA) as file:
            for name, values in small.items():
                with file.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.save(member, values)

    def require(self, path: str | pathlib.Path, vocabulary: Vocabulary) -> None:
        """Raises ValueError if a file is of another kind or vocabulary; its arrays are not read."""
        with opened(path, self.content, self.command) as file:
            if lacking := [name for name in self.arrays if name not in names(file)]:
                raise ValueError(f"it lacks {lacking[0]}")
            theirs = str(read(file, "vocabulary"))
        if theirs != vocabulary.fingerprint:
            raise ValueError(
                f"{path} holds {self.content} of another vocabulary (SHA-256 {theirs[:12]}) than "
                f"{vocabulary.path} (SHA-256 {vocabulary.fingerprint[:12]}); make it again for "
                f"this vocabulary with {self.command}."
            )

    @contextlib.contextmanager
    def loaded(self, path: str | pathlib.Path, vocabulary: Vocabulary) -> Iterator[Arrays]:
        """The arrays of a file that `save` wrote; a ValueError during their use names the file.

        Raises:
            ValueError: the file is missing, damaged or of another vocabulary.
        """
        with opened(path, self.content, self.command) as file:
            arrays = {name: read(file, name) for name in self.arrays}
        self.require(path, vocabulary)
        try:
            yield arrays
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
