"""What results are known by: content changes it, copies and names do not."""

import hashlib
import os
import pathlib
import shutil

import numpy as np
import pytest

from speculative import checkpoints, fingerprints, loading
from speculative.checkpoints import native
from tests import saved


def test_files_are_known_by_content(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a").write_bytes(b"weights")
    shutil.copy(tmp_path / "a", tmp_path / "b")
    os.utime(tmp_path / "b", (1, 1))
    one, copy = ({"w": tmp_path / name} for name in "ab")
    assert fingerprints.of_files(one) == fingerprints.of_files(copy)
    (tmp_path / "b").write_bytes(b"Weights")
    assert fingerprints.of_files(one) != fingerprints.of_files(copy)
    assert fingerprints.of_files(one) != fingerprints.of_files({"v": tmp_path / "a"})
    digest = hashlib.sha256(b"weights").hexdigest()
    expected = fingerprints.of_value({"w": digest})
    assert fingerprints.of_files(one) == expected
    assert fingerprints.of_files(one, {tmp_path / "a": digest}) == expected
    # As the hub's cache lays files: links to what is named by its SHA-256, and is not read.
    (tmp_path / digest).write_bytes(b"not read")
    (tmp_path / "link").symlink_to(digest)
    assert fingerprints.of_files({"w": tmp_path / "link"}) == expected
    with pytest.raises(ValueError, match=f"{tmp_path / 'gone'} cannot be read"):
        fingerprints.of_files({"w": tmp_path / "gone"})


def test_large_files_are_sampled(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other weights are other numbers throughout; a longer file is another one, too."""
    monkeypatch.setattr(fingerprints, "WHOLE", 2**21)
    draws = np.random.default_rng(0).bytes(3 * 2**20 + 5)
    file, found = tmp_path / "weights", []
    for content in (draws, draws[::-1], draws + b"1", draws[: 2**20] + b"11" + draws[2**20 + 2 :]):
        file.write_bytes(content)
        found.append(fingerprints.of_files({"w": file}))
    assert len({*found}) == 4
    read: list[int] = []
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda *given: read.append(given[1]) or pread(*given))
    assert fingerprints.of_files({"w": file}) == found[-1]
    assert read == [fingerprints.SAMPLE] * 4


@pytest.mark.parametrize("to", ["native", "huggingface", "t5x"])
def test_a_checkpoint_is_known_by_its_weights_and_settings(
    tmp_path: pathlib.Path, to: str, saved_pair: tuple[pathlib.Path, pathlib.Path]
) -> None:
    folder = tmp_path / "converted"
    made = checkpoints.convert(saved_pair[0], folder, to)
    shutil.copytree(folder, tmp_path / "copy")
    (tmp_path / "copy" / "README.md").write_text("mine")
    (tmp_path / "copy" / "out.jsonl").write_text("{}")
    assert checkpoints.open(tmp_path / "copy").contents == made.contents
    # One weight alone is another; the norms, by which a draft knows its target, are not.
    params = saved.random(saved.TARGET, 0)
    params["decoder"]["logits_dense"]["kernel"][3, 5] += 1
    native.save(tmp_path / "changed", saved.TARGET, params, saved.VOCABULARY)
    norm = made.fingerprint()
    shutil.rmtree(folder)
    other = checkpoints.convert(tmp_path / "changed", folder, to)
    assert other.contents != made.contents and other.has(norm)
    assert f"{other.contents}, recorded" in checkpoints.describe(other)["fingerprint"]


def test_a_pair_is_known_by_all_its_files(
    tmp_path: pathlib.Path, saved_pair: tuple[pathlib.Path, pathlib.Path]
) -> None:
    target, draft = saved_pair
    found = loading.resolve(target, draft).fingerprints
    assert [*found] == ["target", "draft", "vocabulary"]
    copied = loading.resolve(target, "copy").fingerprints
    assert fingerprints.changed(found, copied) == "" and "draft" not in copied
    mixed = loading.resolve(target, f"{draft}+copy").fingerprints
    assert fingerprints.changed(found, mixed) == ""
    ngrams = loading.resolve("debian_target", "unigram").fingerprints
    assert len(ngrams["draft"]) == fingerprints.DIGITS
    shipped = loading.resolve("debian_target").fingerprints
    assert fingerprints.changed(shipped, ngrams) == "draft"
    assert fingerprints.changed(found, shipped) == "target and draft"
    random = loading.resolve("t5_1_1_small", "copy", random=True).fingerprints
    assert [*random] == ["vocabulary"]
