"""Files are read with their name in every error, and written whole or not at all."""

import contextlib
import errno
import json
import os
import pathlib
import tempfile
from collections.abc import Iterator
from typing import Any

# What libraries that raise errors of their own say when there is no room for a file.
NO_ROOM = tuple(os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))


@contextlib.contextmanager
def reading(place: object, fault: str = "cannot be read") -> Iterator[None]:
    """Makes a ValueError of whatever is raised within, for damage has many kinds of errors.

    The message names the `place`, a file or folder, and its `fault`. A ValueError that names it
    already is left alone.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, ValueError) and str(place) in str(error):
            raise
        if isinstance(error, OSError) and error.strerror:
            named = error.filename if str(place) in str(error.filename) else place
            raise ValueError(f"{named} cannot be read: {error.strerror.lower()}.") from error
        bare = isinstance(error, LookupError) or not str(error)  # A key alone says nothing.
        said = repr(error) if bare else str(error).rstrip(".")
        raise ValueError(f"{place} {fault}: {said}; fetch it again or restore it.") from error


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """The JSON object that a file holds; raises ValueError, naming the file, if it holds none."""
    with reading(path, "is not JSON"):
        found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no JSON object; fetch it again or restore it.")
    return found


@contextlib.contextmanager
def whole(path: str | pathlib.Path) -> Iterator[pathlib.Path]:
    """Where to write a file or a folder that becomes `path` when the block ends, and not before.

    It lies in a private folder beside `path`, so that others who write the same are not met; if
    the block fails, nothing is left. Raises ValueError if `path` cannot be written.
    """
    path = pathlib.Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = tempfile.TemporaryDirectory(
            prefix=".unfinished-", dir=path.parent, ignore_cleanup_errors=True
        )
        with beside as private:
            unfinished = pathlib.Path(private, path.name)
            yield unfinished
            unfinished.rename(path)
    except Exception as error:
        if isinstance(error, OSError) or any(reason in str(error) for reason in NO_ROOM):
            raise ValueError(
                f"{path} could not be written, and nothing of it was kept: {error}; free some "
                "space or choose another place."
            ) from error
        raise
