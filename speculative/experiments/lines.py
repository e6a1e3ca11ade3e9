"""Files of one entry a line, which lose nothing that was written when a run is killed."""

import errno
import os
import pathlib

from absl import logging


def append(path: pathlib.Path, line: str) -> None:
    """Adds a line to a file, on disk when this returns; what was there before stays as it was.

    Raises:
        OSError: there is no room for it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    data = f"{line}\n".encode()
    # Unbuffered: a line is one write, never a part now and the rest later.
    with path.open("ab", buffering=0) as file:
        if file.write(data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        os.fsync(file.fileno())


def read(path: pathlib.Path) -> list[str]:
    """The lines of a file, none if it does not exist; a torn last one is removed, and said."""
    if not path.is_file():
        return []
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if whole != content:
        logging.warning("%s ended within a line, as a run that is killed leaves it; removed.", path)
        os.truncate(path, len(whole))
    return whole.decode().splitlines()
