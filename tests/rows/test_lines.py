"""Files of lines after a kill and on a full disk."""

import errno
import pathlib
from typing import Any

import pytest

from speculative.rows import lines


def read(path: pathlib.Path) -> list[Any]:
    return lines.read(path, lambda value: value, "value")


def test_lines_come_back_in_order(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "deep" / "file.jsonl"
    assert read(path) == []
    for value in ("a", "ü", {"b": 1}):
        lines.append(path, value)
    assert read(path) == ["a", "ü", {"b": 1}]
    assert path.read_bytes().decode() == '"a"\n"ü"\n{"b": 1}\n'


def test_a_torn_last_line_is_removed_and_said(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "file.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": 2}\n{"a"')
    assert read(path) == [{"a": 1}, {"a": 2}]
    assert "ended within a line" in caplog.text
    lines.append(path, 3)
    assert path.read_bytes() == b'{"a": 1}\n{"a": 2}\n3\n'


def test_a_full_disk_is_an_error(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a write the system may take a part, and refuse the rest only at the next one."""

    class Full:
        def __enter__(self) -> "Full":
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def write(self, data: bytes) -> int:
            return len(data) - 1

    monkeypatch.setattr(pathlib.Path, "open", lambda *_, **__: Full())
    with pytest.raises(OSError, match="No space left") as raised:
        lines.append(tmp_path / "file", "abc")
    assert raised.value.errno == errno.ENOSPC
