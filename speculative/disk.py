"""Files: text and JSON by lines, files written whole or not at all, and one writer per folder."""

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
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # The disk is full, or a limit is reached.


def sentence(error: Exception) -> str:
    """An error as one line; a system error becomes a sentence with the file and a remedy."""
    message = str(error)
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        remedy = "check that the path is right and that you may use it"
        if error.errno in FULL:
            remedy = "free some space, raise the limit or choose another folder"
        message = f"{where}{error.strerror}; {remedy}."
    return " ".join(message.split())


def text(path: Path, raw: bytes | None = None, first: int = 1) -> str:
    """The text of a UTF-8 file, or of the bytes `raw` read there, without a byte-order mark.

    `first` is the number of the first line in `raw`. Raises ValueError, naming the line, if one is
    not UTF-8.
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
    """Turns any error raised within into a ValueError, because damage causes many kinds of errors.

    The message names the `place`, a file or folder, and its `fault`. A ValueError that already
    names it is passed on.
    """
    try:
        yield
    except TimeoutError:  # This is no damage, and the same network would fail elsewhere too.
        raise
    except Exception as error:
        if isinstance(error, ValueError) and str(place) in str(error):
            raise
        if isinstance(error, OSError) and error.strerror:
            named = error.filename if str(place) in str(error.filename) else place
            raise ValueError(f"{named} cannot be read: {error.strerror.lower()}.") from error
        bare = isinstance(error, LookupError) or not str(error)  # A bare key says nothing.
        reason = repr(error) if bare else str(error).rstrip(".")
        raise ValueError(f"{place} {fault}: {reason}; fetch it again or restore it.") from error


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """The JSON object in a file; raises ValueError, naming the file, if it holds none."""
    with reading(path, "is not JSON"):
        value = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds no JSON object; fetch it again or restore it.")
    return value


def writable(path: Path) -> pathlib.Path:
    """Creates a file's folder, and returns the file's path; OSError if it cannot be written."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        code = errno.EISDIR if path.is_dir() else errno.EACCES
        raise OSError(code, os.strerror(code), str(path))
    return path


@contextlib.contextmanager
def written(path: Path) -> Iterator[pathlib.Path]:
    """Yields a place to write a file or a folder, which replaces `path` when the block ends.

    It lies in a private folder next to `path`, so that concurrent writers do not collide; if the
    block fails, nothing is left. An OSError names `path`, whose folder is created.
    """
    path = writable(path)
    if path.exists() and not path.is_file():  # A device such as /dev/stdout is not replaced.
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
        # Libraries wrap system errors in their own.
        code = code or next((code for code in FULL if os.strerror(code) in str(error)), None)
        if not code and not isinstance(error, OSError):
            raise
        # NumPy reports a short write without an error number.
        reason = os.strerror(code) if code else str(error)
        raise OSError(code or errno.EIO, reason, str(path)) from error


def write(path: Path, content: str) -> None:
    """Writes a text, whole or not at all; errors are those of `written`."""
    with written(path) as part:
        part.write_text(content, encoding="utf-8")


@contextlib.contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Creates a folder and keeps other processes from writing results there until the block ends.

    The lock ends with its process. If another process has it, ValueError is raised. A folder that
    was created and stayed empty is removed.
    """
    folder = pathlib.Path(folder)
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with locked(folder / ".lock") as ours:
            if not ours:
                raise ValueError(
                    f"Another process is writing results to {folder}; wait until it ends, or "
                    "choose another folder."
                )
            yield
    finally:
        with contextlib.suppress(OSError):  # It is not empty, or already gone.
            if is_new:
                folder.rmdir()


@contextlib.contextmanager
def locked(file: pathlib.Path) -> Iterator[bool]:
    """Yields whether this process holds the lock file, which is removed at the end.

    The lock ends with its process. On a file system without locks every process holds it.
    """
    with file.open("ab") as lock:
        ours = True
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Its owner may just have removed it, and another may be in its place.
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
    """A value as a line of JSON; characters that some readers take for line ends are escaped."""
    line = json.dumps(value, ensure_ascii=False)
    for end in "\x85\u2028\u2029":
        line = line.replace(end, f"\\u{ord(end):04x}")
    return line


def append(path: Path, value: Any) -> None:
    """Appends a value as a line of JSON, on disk on return, to a file that only the caller writes.

    A line that a killed run left incomplete is removed first; one that only lacks its line end, as
    an editor may leave it, gets one. If there is no space, OSError is raised and the file is
    unchanged.
    """
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # A name may hold lone surrogates, which UTF-8 cannot encode but JSON can, as \uXXXX.
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
            while data:  # A full disk may take part of a write; the next one then raises.
                data = data[file.write(data) :]
            os.fsync(file.fileno())
        except OSError as error:
            file.truncate(end)
            raise OSError(error.errno, error.strerror, str(path)) from error


def entries(path: Path, entry: Callable[[Any], Entry], kind: str) -> list[Entry]:
    """Applies `entry` to each line of a JSON file, if there is one; the file is not changed.

    An incomplete last line is skipped with a warning. ValueError names any other invalid line and
    the kind of entry.
    """
    path = pathlib.Path(path)
    if not path.is_file():
        return []
    *whole, rest = path.read_bytes().split(b"\n")
    if _complete(rest):
        whole.append(rest)
    elif rest:
        warning = (
            "%s ends within a line, as a killed or unfinished run leaves it; skipping that line."
        )
        logging.warning(warning, path)
    parsed = []
    for number, line in enumerate(whole, 1):
        try:
            parsed.append(entry(json.loads(line.decode())))
        except (TypeError, KeyError, AttributeError, ValueError, RecursionError) as error:
            raise ValueError(f"Line {number} of {path} is no {kind}: {error}") from error
    return parsed


def _complete(line: bytes) -> bool:
    """Whether a last line without a line end is a complete JSON object."""
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False
