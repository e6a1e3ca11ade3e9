"""Files after a kill, on a full disk, beside a reader, and with two writers."""

import errno
import os
import pathlib
import resource
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from speculative import disk


def read(path: pathlib.Path) -> list[Any]:
    return disk.entries(path, lambda value: value, "value")


def test_lines_of_json_come_back_in_order(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "deep" / "file.jsonl"
    assert read(path) == []
    values = ["a", "ü\u2028\x85\x0cz", {"b": 1}]
    for value in values:
        disk.append(path, value)
    assert read(path) == values
    assert path.read_bytes().decode() == '"a"\n"ü\u2028\x85\\fz"\n{"b": 1}\n'


def test_a_torn_last_line_is_left_out_and_the_next_line_takes_its_place(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "file.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": 2}\n{"a"')
    assert read(path) == [{"a": 1}, {"a": 2}]
    assert "ends within a line" in caplog.text
    disk.append(path, 3)
    assert path.read_bytes() == b'{"a": 1}\n{"a": 2}\n3\n'
    path.write_bytes(b'{"a')  # Of the first line.
    disk.append(path, 4)
    assert path.read_bytes() == b"4\n"


def test_a_last_line_that_lacks_its_end_alone_is_kept(tmp_path: pathlib.Path) -> None:
    """An editor may save a file so."""
    path = tmp_path / "file.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": 2}')
    assert read(path) == [{"a": 1}, {"a": 2}]
    disk.append(path, {"a": 3})
    assert path.read_bytes() == b'{"a": 1}\n{"a": 2}\n{"a": 3}\n'


def test_a_reader_takes_nothing_from_a_writer(tmp_path: pathlib.Path) -> None:
    """What looks torn to it may be a line under way."""
    path = tmp_path / "file.jsonl"
    with path.open("ab", buffering=0) as file:
        file.write(b'"whole"\n"first half, ')
        assert read(path) == ["whole"]
        file.write(b'second half"\n')
    assert read(path) == ["whole", "first half, second half"]


@pytest.mark.parametrize("line", [b"\xff", b"{", b"[" * 100_000])
def test_a_damaged_line_is_named(tmp_path: pathlib.Path, line: bytes) -> None:
    (tmp_path / "file").write_bytes(b"1\n" + line + b"\n")
    with pytest.raises(ValueError, match="Line 2 of .*file is no value"):
        read(tmp_path / "file")


@pytest.fixture
def limited() -> Iterator[int]:
    """The largest size of a file, in bytes, that this process may write."""
    before, size = resource.getrlimit(resource.RLIMIT_FSIZE), 1000
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    yield size
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_what_finds_no_room_leaves_the_file_as_it_was(tmp_path: pathlib.Path, limited: int) -> None:
    """Of a write the system may take a part, and refuse the rest only at the next one."""
    lines, whole = tmp_path / "lines", tmp_path / "whole"
    disk.append(lines, "a")
    disk.write(whole, "b")
    for write, path in ((disk.append, lines), (disk.write, whole)):
        with pytest.raises(OSError) as raised:
            write(path, "c" * 2 * limited)
        assert raised.value.errno == errno.EFBIG
        assert disk.sentence(raised.value).startswith(f"{path}: File too large; free some space")
    assert (lines.read_text(), whole.read_text()) == ('"a"\n', "b")
    assert sorted(tmp_path.iterdir()) == [lines, whole]


def test_what_cannot_be_written_is_said_before(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file" / "below"):
        with pytest.raises(OSError) as raised:
            disk.writable(path)
        assert disk.sentence(raised.value).startswith(str(tmp_path))
        assert "Errno" not in disk.sentence(raised.value)
    made = disk.writable(tmp_path / "new" / "file")
    assert made.parent.is_dir() and not made.exists()


def test_lines_end_at_line_feeds_alone() -> None:
    odd = "a\u2028b\u2029c\x85d\x0ce\x0bf\rg"
    assert disk.lines(f"{odd}\r\n\nh") == [odd, "", "h"]
    assert disk.text("origin", b"\xef\xbb\xbfa") == "a"
    with pytest.raises(ValueError, match=r"Line 3 of origin is not UTF-8"):
        disk.text("origin", b"\xef\xbb\xbfa\n\nb\xff")
    assert disk.text("origin", b"\xef\xbb\xbfa", first=2) == "\ufeffa"  # No mark of the file's.
    with pytest.raises(ValueError, match=r"Line 7 of origin is not UTF-8"):
        disk.text("origin", b"\xff\n", first=7)


def test_a_folder_has_one_owner_until_its_process_dies(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "results"
    with disk.owned(folder), pytest.raises(ValueError, match="Another process .*results; wait"):
        disk.owned(folder).__enter__()
    assert not folder.exists()  # Nothing was written there.
    folder.mkdir()
    code = (
        "import fcntl, sys, time; f = open(sys.argv[1], 'ab'); fcntl.flock(f, fcntl.LOCK_EX); "
        "print(flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", code, str(folder / ".lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        assert other.stdout and other.stdout.readline()
        with pytest.raises(ValueError, match="Another process"):
            disk.owned(folder).__enter__()
        other.kill()
    with disk.owned(folder):
        pass
    assert os.listdir(folder) == []


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (KeyError("model"), r"^a/b is odd: KeyError\('model'\); fetch it again or restore it\.$"),
        (RecursionError("too deep."), "^a/b is odd: too deep; fetch it again or restore it.$"),
        (AssertionError(), r"^a/b is odd: AssertionError\(\); fetch"),
        (ValueError("it is empty"), "^a/b is odd: it is empty; fetch"),
        (ValueError("a/b/c is empty."), "^a/b/c is empty.$"),
        (PermissionError(errno.EACCES, "Denied", "a/b/c"), "^a/b/c cannot be read: denied.$"),
        (PermissionError(errno.EACCES, "Denied", "/x"), "^a/b cannot be read: denied.$"),
    ],
)
def test_every_error_names_the_file(error: Exception, message: str) -> None:
    with pytest.raises(ValueError, match=message), disk.reading(pathlib.Path("a/b"), "is odd"):
        raise error


def test_json_that_cannot_be_read(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"ä": [1, null]}', "utf-8")
    assert disk.read_json(path) == {"ä": [1, None]}
    for content, message in (
        (b"\xff", "is not JSON: 'utf-8' codec"),
        (b"[" * 10**5, "is not JSON: maximum recursion"),
        (b"[]", "holds no JSON object"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"{path} {message}"):
            disk.read_json(path)


def test_a_file_is_replaced_only_by_a_whole_one(tmp_path: pathlib.Path) -> None:
    path, mine = tmp_path / "deep" / "a.svg", tmp_path / "deep" / "a.svg.unfinished"
    for text in ("first", "second"):
        with disk.written(path) as unfinished:
            assert unfinished.suffix == ".svg"
            unfinished.write_text(text)
            assert not path.exists() or path.read_text() == "first"
        assert path.read_text() == text
        mine.write_text("the user's own")
    for error in (KeyboardInterrupt("stopped"), ValueError("third is wrong")):
        with pytest.raises(type(error), match=str(error)), disk.written(path) as unfinished:
            unfinished.write_text("third")
            raise error
    assert path.read_text() == "second"
    link = tmp_path / "deep" / "link.svg"
    link.symlink_to(path)
    disk.write(link, "new")
    assert link.is_symlink() and path.read_text() == "new"
    assert sorted(path.parent.iterdir()) == [path, mine, link]
    disk.write("/dev/null", "gone")
    assert not pathlib.Path("/dev/null").is_file()
