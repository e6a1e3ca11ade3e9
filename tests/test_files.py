"""Errors name the file; what is written is there whole or not at all."""

import errno
import pathlib
import resource
import signal

import numpy as np
import pytest

from speculative.drafts.ngram import TABLE
from speculative.files import read_json, reading, whole
from speculative.training.examples import load, ragged
from speculative.vocabulary import Numbers


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
    with pytest.raises(ValueError, match=message), reading(pathlib.Path("a/b"), "is odd"):
        raise error


def test_json_that_cannot_be_read(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"ä": [1, null]}', "utf-8")
    assert read_json(path) == {"ä": [1, None]}
    for content, message in (
        (b"\xff", "is not JSON: 'utf-8' codec"),
        (b"[" * 10**5, "is not JSON: maximum recursion"),
        (b"[]", "holds no JSON object"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"{path} {message}"):
            read_json(path)


def test_the_users_own_unfinished_file_stays(tmp_path: pathlib.Path) -> None:
    mine = tmp_path / "some.npz.unfinished"
    mine.write_text("mine")
    examples = ragged([np.array([3, 1])], [np.array([4, 5, 1])])
    examples.save(tmp_path / "some.npz")
    np.testing.assert_array_equal(load(tmp_path / "some.npz").target(0), [4, 5, 1])
    TABLE.save(tmp_path / "some.npz", Numbers(9), {})
    assert mine.read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} == {"some.npz", mine.name}


def test_a_file_is_replaced_only_by_a_whole_one(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "deep" / "file"
    for text in ("first", "second"):
        with whole(path) as unfinished:
            unfinished.write_text(text)
            assert not path.exists() or path.read_text() == "first"
        assert path.read_text() == text
    with pytest.raises(KeyboardInterrupt), whole(path) as unfinished:
        unfinished.write_text("third")
        raise KeyboardInterrupt
    with pytest.raises(ValueError, match="third is wrong"), whole(path) as unfinished:
        unfinished.write_text("third")
        raise ValueError("third is wrong")
    assert path.read_text() == "second"
    assert [found.name for found in path.parent.iterdir()] == ["file"]


def test_what_cannot_be_written_is_one_sentence(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="file/deep could not be written, and nothing"):
        with whole(tmp_path / "file" / "deep"):
            pytest.fail("nobody should come here")
    kept = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, kept[1]))
    try:
        with pytest.raises(ValueError, match="long could not be written, .* File too large"):
            with whole(tmp_path / "long") as unfinished:
                unfinished.write_bytes(bytes(200))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, kept)
        signal.signal(signal.SIGXFSZ, handler)
    assert [found.name for found in tmp_path.iterdir()] == ["file"]
