"""Files: text by lines, JSON by lines, files whole or not at all, and folders with one owner."""

import contextlib
import errno
import fcntl
import json
import os
import pathlib
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from absl import logging

Entry = TypeVar("Entry")
Path = str | pathlib.Path
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # The disk, or a limit on what it may take.


def sentence(error: Exception) -> str:
    """An error as a line; what the system refused becomes a sentence with file and remedy."""
    said = str(error)
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        remedy = "see that the path is right, and that you may use it"
        if error.errno in FULL:
            remedy = "free some space, raise the limit or choose another folder"
        said = f"{where}{error.strerror}; {remedy}."
    return " ".join(said.split())


def text(path: Path, raw: bytes | None = None, first: int = 1) -> str:
    """The text of a UTF-8 file, or of the bytes `raw` read there, without a byte-order mark.

    `first` is the number of their first line. Raises ValueError with the line that is not UTF-8.
    """
    raw = pathlib.Path(path).read_bytes() if raw is None else raw
    try:
        return raw.decode("utf-8-sig" if first == 1 else "utf-8")
    except UnicodeDecodeError as error:
        number = first + error.object[: error.start].count(b"\n")
        raise ValueError(f"Line {number} of {path} is not UTF-8; convert it.") from None


def lines(content: str) -> list[str]:
    r"""The lines of a text, which end at \n or \r\n and nowhere else.

    str.splitlines would also cut within sentences, so that parallel files would no longer match.
    """
    return [line.removesuffix("\r") for line in content.removesuffix("\n").split("\n")]


@contextlib.contextmanager
def reading(place: object, fault: str = "cannot be read") -> Iterator[None]:
    """Makes a ValueError of whatever is raised within, for damage has many kinds of errors.

    The message names the `place`, a file or folder, and its `fault`. A ValueError that names it
    already is left alone.
    """
    try:
        yield
    except TimeoutError:  # No damage, and elsewhere on the same network it would be the same.
        raise
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
    """Where to write a file or a folder that takes the place of `path` when the block ends.

    It lies in a private folder beside `path`, so that others who write the same are not met; if
    the block fails, nothing is left. An OSError names `path`, whose folder is made.
    """
    path = writable(path)
    if path.exists() and not path.is_file():  # A device, such as /dev/stdout, stays.
        yield path
        return
    path = path.resolve()
    try:
        beside = tempfile.TemporaryDirectory(
            prefix=".unfinished-", dir=path.parent, ignore_cleanup_errors=True
        )
        with beside as private:
            part = pathlib.Path(private, path.name)
            yield part
            part.replace(path)
    except Exception as error:
        code = error.errno if isinstance(error, OSError) else None
        # Libraries wrap what the system said in errors of their own.
        code = code or next((code for code in FULL if os.strerror(code) in str(error)), None)
        if not code and not isinstance(error, OSError):
            raise
        said = os.strerror(code) if code else str(error)  # NumPy tells no number of a short write.
        raise OSError(code or errno.EIO, said, str(path)) from error


def write(path: Path, content: str) -> None:
    """Writes a text, whole or not at all; errors are those of `written`."""
    with written(path) as part:
        part.write_text(content, encoding="utf-8")


@contextlib.contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Makes a folder, into which no other process writes results before the block ends.

    The lock dies with its process. If another has it, ValueError is raised. A folder that was made
    and stayed empty goes again.
    """
    folder = pathlib.Path(folder)
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with locked(folder / ".lock") as ours:
            if not ours:
                raise ValueError(
                    f"Another process is writing results to {folder}; wait for its end, or choose "
                    "another folder."
                )
            yield
    finally:
        with contextlib.suppress(OSError):  # It is not empty, or gone.
            if made:
                folder.rmdir()


@contextlib.contextmanager
def locked(file: pathlib.Path) -> Iterator[bool]:
    """Whether this process has the lock that a file is, which goes at the end.

    The lock dies with its process. Where a file system has none, everyone is told that they have.
    """
    with file.open("ab") as lock:
        ours = True
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Its owner may just have removed it, and there may be another.
            ours = file.exists() and os.path.samestat(file.stat(), os.fstat(lock.fileno()))
        except BlockingIOError:
            ours = False
        except OSError as error:
            logging.warning("%s cannot be locked (%s); run one process there.", file.parent, error)
        try:
            yield ours
        finally:
            if ours:
                file.unlink(missing_ok=True)


def json_line(value: Any) -> str:
    """A value as a line of JSON, without characters at which some readers would end it."""
    said = json.dumps(value, ensure_ascii=False)
    for end in "\x85\u2028\u2029":
        said = said.replace(end, f"\\u{ord(end):04x}")
    return said


def append(path: Path, value: Any) -> None:
    """Adds a value as a line of JSON, on disk when this returns, to a file of the caller's own.

    A line that a killed run left incomplete is removed first; one that lacks its end alone, as an
    editor may leave it, gets it. If there is no room, OSError is raised and the file stays as it
    was.
    """
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # A name may hold halves of characters, which UTF-8 cannot say; as \uXXXX, JSON can.
    data = f"{json.dumps(value, ensure_ascii=False)}\n".encode(errors="backslashreplace")
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
