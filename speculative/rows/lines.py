"""Files of JSON lines: what was written is not lost when a run is killed."""

import errno
import json
import os
import pathlib
from collections.abc import Callable
from typing import Any, TypeVar

from absl import logging

Entry = TypeVar("Entry")


def append(path: str | pathlib.Path, value: Any) -> None:
    """Adds a value as a line, on disk when this returns; OSError if there is no room for it."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    data = f"{json.dumps(value, ensure_ascii=False)}\n".encode()
    # Unbuffered: a line is one write, never a part now and the rest later.
    with path.open("ab", buffering=0) as file:
        if file.write(data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        os.fsync(file.fileno())


def read(path: str | pathlib.Path, entry: Callable[[Any], Entry], kind: str) -> list[Entry]:
    """What `entry` makes of each line of a file, if there is one.

    An incomplete last line is removed with a warning. ValueError names any other line that is no
    entry, and the kind of entry.
    """
    path = pathlib.Path(path)
    if not path.is_file():
        return []
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if whole != content:
        logging.warning("%s ended within a line, as a run that is killed leaves it; removed.", path)
        os.truncate(path, len(whole))
    entries = []
    for number, line in enumerate(whole.decode().split("\n")[:-1], 1):
        try:
            entries.append(entry(json.loads(line)))
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise ValueError(f"Line {number} of {path} is no {kind}: {error}") from error
    return entries
