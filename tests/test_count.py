"""Drafts that are counted from text: from a file to outputs that are the target's own."""

import json
import pathlib
from collections import Counter
from typing import Any

import numpy as np
import pytest

from speculative import cli
from speculative.drafts import named
from speculative.vocabulary import Vocabulary
from tests import saved
from tests.saved import VOCABULARY

LINES = ["ein kleiner Editor für Text", "ein kleiner Editor für Karten", "eine Karte", "ein Paket"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("counted")
    saved.save(folder / "t5", saved.TARGET, 0)
    saved.save(folder / "gpt", saved.GPT, 1)
    (folder / "texts.txt").write_text("\n".join(LINES) + "\n")
    (folder / "pairs.tsv").write_text("".join(f"text {line}\t{line}\n" for line in LINES))
    return folder


@pytest.fixture(autouse=True)
def in_the_folder(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def tokens() -> list[list[int]]:
    vocabulary = Vocabulary(VOCABULARY)
    return [vocabulary.encode(line).tolist() for line in LINES]


@pytest.mark.parametrize("file", ["texts.txt", "pairs.tsv"])
def test_ngrams_are_those_of_the_text(file: str) -> None:
    assert cli.main(["count", file, "--target=t5", "--output=ngrams.npz"]) == 0
    with np.load("ngrams.npz") as found:
        arrays = dict(found)
    expected = Counter(token for row in tokens() for token in row)
    unigram = {token: int(n) for token, n in enumerate(arrays["unigram"]) if n}
    assert unigram == expected
    # What followed every context of one token or two, the start token included.
    followed: dict[tuple[int, ...], Counter[int]] = {}
    for row in tokens():
        row = [0, *row]
        for i in range(1, len(row)):
            for size in (1, 2):
                if i >= size:
                    followed.setdefault(tuple(row[i - size : i]), Counter())[row[i]] += 1
    assert arrays["total"].sum() == sum(counts.total() for counts in followed.values())
    assert len(arrays["total"]) == len(followed)
    assert sorted(arrays["count"].tolist()) == sorted(
        n for counts in followed.values() for n in counts.values()
    )


def test_outputs_are_kept_whole() -> None:
    command = ["count", "texts.txt", "--target=t5", "--kind=outputs", "--output=outputs.npz"]
    assert cli.main(command) == 0
    with np.load("outputs.npz") as found:
        kept = np.split(found["tokens"], found["offsets"][1:-1])
    assert [row.tolist() for row in kept] == tokens()


@pytest.mark.parametrize("target", ["t5", "gpt"])
def test_counted_drafts_by_path(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    for kind in ("ngrams", "outputs"):
        file = f"{target}_{kind}.npz"
        count = ["count", "texts.txt", f"--target={target}", f"--kind={kind}", f"--output={file}"]
        assert cli.main(count) == 0
    capsys.readouterr()
    found = []
    grams, outputs = f"{target}_ngrams.npz", f"{target}_outputs.npz"
    for draft in ("copy", grams, f"bigram:{grams}", outputs, f"suffix:{outputs}"):
        command = ["generate", f"--target={target}", f"--draft={draft}", "--max_length=12"]
        assert cli.main([*command, "--gamma=2", "--json", "ein kleiner Editor"]) == 0
        found.append(json.loads(capsys.readouterr().out)["tokens"])
    assert all(tokens == found[0] for tokens in found)


def test_what_a_name_means(folder: pathlib.Path) -> None:
    for kind in ("ngrams", "outputs"):
        command = ["count", "texts.txt", "--target=t5", f"--kind={kind}", f"--output={kind}.npz"]
        assert cli.main(command) == 0
    names = {"ngrams.npz": "trigram", "outputs.npz": "suffix", "unigram:ngrams.npz": "unigram"}
    names |= {"copy": "copy", "t5": None, "none.npz": None, "trigram": "trigram"}
    assert {name: named.kind(name) for name in names} == names
    assert named.table("bigram:ngrams.npz", None) == pathlib.Path("ngrams.npz")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["count", "none.txt", "--target=t5", "--output=a.npz"], "no file 'none.txt'"),
        (["count", "texts.txt", "--target=t5", "--output=a.txt"], "must end in .npz"),
        (["count", "texts.txt", "--target=t5"], "--output"),
        (["count", "texts.txt", "--target=none", "--output=a.npz"], "no checkpoint 'none'"),
        (["count", "texts.txt", "--target=t5", "--output=t5"], "must end in .npz"),
        (["count", "texts.doc", "--target=t5", "--output=a.npz"], "no known kind of data file"),
        (["generate", "a", "--target=t5"], "that speculative count makes"),
        (["generate", "a", "--target=t5", "--draft=none.npz"], "no draft 'none.npz'"),
        (["generate", "a", "--target=t5", "--draft=copy:ngrams.npz"], "'copy' reads no file"),
        (["generate", "a", "--target=t5", "--draft=bigram:none.npz"], "no table none.npz"),
        (["generate", "a", "--target=t5", "--draft=torn.npz"], "torn.npz is no .npz of n-gram"),
        (["generate", "a", "--target=t5", "--draft=suffix:ngrams.npz"], "no .npz of past outputs"),
        (["generate", "a", "--target=t5", "--draft=other.npz"], "another vocabulary"),
    ],
)
def test_what_is_wrong_is_one_sentence(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["count", "texts.txt", "--target=t5", "--output=ngrams.npz"]
    assert cli.main(command) == 0
    pathlib.Path("torn.npz").write_bytes(pathlib.Path("ngrams.npz").read_bytes()[:-100])
    with np.load("ngrams.npz") as found:
        arrays: dict[str, Any] = {**found, "vocabulary": "0" * 64}
    np.savez("other.npz", **arrays)
    capsys.readouterr()
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert said in err
