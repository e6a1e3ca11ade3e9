"""Files: text by lines, JSON by lines, files whole or not at all, and folders with one owner."""

import contextlib
import errno
import fcntl
import json
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from absl import logging

Entry = TypeVar("Entry")
Path = str | pathlib.Path
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # The disk, or a limit on what it may take.


def told(error: Exception) -> str:
    """An error as a line; what the system refused becomes a sentence with file and remedy."""
    said = str(error)
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        remedy = "see that the path is right, and that you may use it"
        if error.errno in FULL:
            remedy = "free some space, raise the limit or choose another folder"
        said = f"{where}{error.strerror}; {remedy}."
    return " ".join(said.split())


def text(path: Path, raw: bytes | None = None) -> str:
    """The text of a UTF-8 file, or of the bytes `raw` read there, without a byte-order mark.

    Raises ValueError with the line that is not UTF-8.
    """
    try:
        return (pathlib.Path(path).read_bytes() if raw is None else raw).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = error.object[: error.start].count(b"\n") + 1
        raise ValueError(f"Line {number} of {path} is not UTF-8; convert it.") from None


def lines(content: str) -> list[str]:
    r"""The lines of a text, which end at \n or \r\n and nowhere else.

    str.splitlines would also cut within sentences, so that parallel files would no longer match.
    """
    return [line.removesuffix("\r") for line in content.removesuffix("\n").split("\n")]


def writable(path: Path) -> pathlib.Path:
    """A file's path, in a folder that is made; OSError, before long work, if it cannot be."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        code = errno.EISDIR if path.is_dir() else errno.EACCES
        raise OSError(code, os.strerror(code), str(path))
    return path


@contextlib.contextmanager
def written(path: Path) -> Iterator[pathlib.Path]:
    """A file to write, which takes the place of `path` when the block ends, or is removed.

    An OSError names `path`, whose folder is made.
    """
    path = part = writable(path)
    if path.is_file() or not path.exists():  # What else there is, such as /dev/stdout, stays.
        path = path.resolve()
        part = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        yield part
        part.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    finally:
        if part != path:
            part.unlink(missing_ok=True)


def write(path: Path, content: str) -> None:
    """Writes a text, whole or not at all; errors are those of `written`."""
    with written(path) as part:
        part.write_text(content, encoding="utf-8")


@contextlib.contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Makes a folder, into which no other process writes results before the block ends.

    The lock dies with its process. If another has it, ValueError is raised.
    """
    file = pathlib.Path(folder) / ".lock"
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"Another process is writing results to {folder}; wait for its end, or choose "
                "another folder."
            ) from None
        except OSError as error:
            logging.warning("%s cannot be locked (%s); run one process there.", folder, error)
        yield


def append(path: Path, value: Any) -> None:
    """Adds a value as a line of JSON, on disk when this returns, to a file of the caller's own.

    A line that a killed run left incomplete is removed first; one that lacks its end alone, as an
    editor may leave it, gets it. If there is no room, OSError is raised and the file stays as it
    was.
    """
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    data = f"{json.dumps(value, ensure_ascii=False)}\n".encode()
    with path.open("a+b", buffering=0) as file:  # Unbuffered: a line is one write.
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - 1))
        if file.read(1) not in (b"", b"\n"):
            *_, rest = path.read_bytes().split(b"\n")
            if _complete(rest):
                data = b"\n" + data
            else:
                end = file.truncate(end - len(rest))
        try:
            while data:  # Of a write there may be room for a part; the next one tells the reason.
                data = data[file.write(data) :]
            os.fsync(file.fileno())
        except OSError as error:
            file.truncate(end)
            raise OSError(error.errno, error.strerror, str(path)) from error


def entries(path: Path, entry: Callable[[Any], Entry], kind: str) -> list[Entry]:
    """What `entry` makes of each line of a file of JSON, if there is one; the file stays as it is.

    An incomplete last line is left out with a warning. ValueError names any other line that is no
    entry, and the kind of entry.
    """
    path = pathlib.Path(path)
    if not path.is_file():
        return []
    *whole, rest = path.read_bytes().split(b"\n")
    if _complete(rest):
        whole.append(rest)
    elif rest:
        said = "%s ends within a line, as a run that is killed or under way leaves it; left out."
        logging.warning(said, path)
    found = []
    for number, line in enumerate(whole, 1):
        try:
            found.append(entry(json.loads(line.decode())))
        except (TypeError, KeyError, AttributeError, ValueError, RecursionError) as error:
            raise ValueError(f"Line {number} of {path} is no {kind}: {error}") from error
    return found


def _complete(line: bytes) -> bool:
    """Whether a last line without an end is all of a JSON object."""
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False
