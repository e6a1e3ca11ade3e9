"""Drafts that are counted from text: from a file to outputs that are the target's own."""

import json
import pathlib
from collections import Counter
from typing import Any

import jax
import numpy as np
import pytest
import tokenizers

from speculative import cli
from speculative.checkpoints import Checkpoint
from speculative.drafts import NgramDraft, SuffixDraft, count_ngrams, named, ngram, suffix
from speculative.training import counting
from speculative.vocabulary import END_OF_TEXT, SentencePiece, Tokenizer
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


def tokens() -> list[np.ndarray]:
    vocabulary = SentencePiece(VOCABULARY)
    return [vocabulary.encode(line) for line in LINES]


@pytest.mark.parametrize("file", ["texts.txt", "pairs.tsv"])
def test_ngrams_are_those_of_the_text(file: str) -> None:
    assert cli.main(["count", file, "--target=t5", "--output=ngrams.npz"]) == 0
    vocabulary = SentencePiece(VOCABULARY)
    with np.load("ngrams.npz") as found:
        for name, values in count_ngrams(tokens(), 3, vocabulary.size).items():
            np.testing.assert_array_equal(found[name], values)


def test_outputs_are_kept_whole() -> None:
    command = ["count", "texts.txt", "--target=t5", "--kind=outputs", "--output=outputs.npz"]
    assert cli.main(command) == 0
    with np.load("outputs.npz") as found:
        kept = np.split(found["tokens"], found["offsets"][1:-1])
    assert [row.tolist() for row in kept] == [row.tolist() for row in tokens()]


@pytest.mark.long
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


def test_what_a_name_means(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("ngrams", "outputs"):
        command = ["count", "texts.txt", "--target=t5", f"--kind={kind}", f"--output={kind}.npz"]
        assert cli.main(command) == 0
    command = ["count", "texts.txt", "--target=t5", "--order=2", "--output=two.npz"]
    assert cli.main(command) == 0
    known = {"ngrams.npz", "outputs.npz", "bigram:ngrams.npz", "copy", "my/none.npz"}
    assert {name for name in (*known, "t5", "bigrams", "npz") if named.known(name)} == known
    vocabulary = SentencePiece(VOCABULARY)
    with monkeypatch.context() as earlier:  # When n-grams could be longer.
        earlier.setattr(ngram, "LONGEST", 4)
        texts = [vocabulary.encode("ein kleiner Editor")] * 2
        ngram.TABLE.save("four.npz", vocabulary, count_ngrams(texts, 4, vocabulary.size))
    drafts = {"ngrams.npz": NgramDraft(3), "two.npz": NgramDraft(2), "outputs.npz": SuffixDraft()}
    drafts |= {"unigram:two.npz": NgramDraft(1), "four.npz": NgramDraft(3)}
    for name, draft in drafts.items():
        path = named.table(name, folder, vocabulary)
        assert path == pathlib.Path(name.rpartition(":")[2])
        assert named.model_free(name, False, path, vocabulary)[0] == draft
    assert named.table("copy", None, vocabulary) is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["count", "none.txt", "--target=t5", "--output=a.npz"], "no file 'none.txt'"),
        (["count", "texts.txt", "--target=t5", "--output=a.txt"], "must end in .npz"),
        (["count", "texts.txt", "--target=t5"], "--output"),
        (
            ["count", "texts.txt", "--target=t5", "--output=a.npz", "--order=4"],
            "--order: must be a whole number from 1 to 3",
        ),
        (["count", "texts.txt", "--target=none", "--output=a.npz"], "no checkpoint 'none'"),
        (["count", "texts.txt", "--target=t5", "--output=t5"], "must end in .npz"),
        (["count", "texts.doc", "--target=t5", "--output=a.npz"], "no known kind of data file"),
        (["generate", "a", "--target=t5"], "that speculative count makes"),
        (["generate", "a", "--target=t5", "--draft=none.npz"], "none.npz does not exist; make it"),
        (["generate", "a", "--target=t5", "--draft=my/none.npz"], "none.npz does not exist"),
        (["count", "empty.txt", "--target=t5", "--output=a.npz"], "empty.txt is empty"),
        (["count", "latin.txt", "--target=t5", "--output=a.npz"], "Line 2 of latin.txt is not"),
        (["count", "texts.txt", "--target=t5", "--output=full.npz"], "full.npz: Is a directory"),
        (
            ["count", "texts.txt", "--target=t5", "--output=texts.txt/a.npz"],
            "texts.txt: File exists; check that the path is right",
        ),
        (
            ["count", "texts.txt", "--target=t5", "--output=a.npz", "--kind=outputs", "--order=3"],
            "--order is for n-grams",
        ),
        (["generate", "a", "--target=t5", "--draft=copy:ngrams.npz"], "copy reads no file"),
        (["generate", "a", "--target=t5", "--draft=bigram:none.npz"], "none.npz does not exist"),
        (["generate", "a", "--target=t5", "--draft=torn.npz"], "torn.npz is no .npz of"),
        (["generate", "a", "--target=t5", "--draft=suffix:ngrams.npz"], "no .npz of past outputs"),
        (["generate", "a", "--target=t5", "--draft=other.npz"], "another vocabulary"),
    ],
)
def test_what_is_wrong_is_one_sentence(
    arguments: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command = ["count", "texts.txt", "--target=t5", "--output=ngrams.npz"]
    assert cli.main(command) == 0
    pathlib.Path("torn.npz").write_bytes(pathlib.Path("ngrams.npz").read_bytes()[:-100])
    with np.load("ngrams.npz") as found:
        arrays: dict[str, Any] = {**found, "vocabulary": "0" * 64}
    np.savez("other.npz", **arrays)
    pathlib.Path("empty.txt").write_text("\n \n")
    pathlib.Path("latin.txt").write_bytes(b"an editor\ncaf\xe9\n")
    pathlib.Path("full.npz").mkdir(exist_ok=True)
    monkeypatch.setattr(Checkpoint, "read", lambda *_: pytest.fail("read a tensor first"))
    capsys.readouterr()
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert said in err


def test_counts_begin_as_texts_do(tmp_path: pathlib.Path) -> None:
    """With the start token of T5, or with GPT-2's end of the text before."""
    file = tmp_path / "tokenizer.json"
    pieces = {END_OF_TEXT: 0, "a": 1, "b": 2, "c": 3}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(pieces, []))
    tokenizer.add_special_tokens([END_OF_TEXT])
    tokenizer.save(str(file))
    for vocabulary in (Tokenizer(file), SentencePiece(VOCABULARY)):
        text = vocabulary.encode("ba")
        start = vocabulary.start_id
        assert [start] == vocabulary.prompt("").tolist()
        counted = count_ngrams([text], 2, vocabulary.size, start=start)
        distribution = jax.jit(ngram.distribution)
        q = distribution(ngram.ngram_params(counted, 2), np.array([[start]], np.int32))
        assert np.asarray(q)[0].argmax() == text[0]
        kept = jax.device_get(suffix.automaton([text], vocabulary.size, start))
        assert kept["guesses"][kept["first"][start]] == text[0]


def test_a_sample_is_even_in_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each text holds its number; of 1,000 there is room for 100."""
    texts = [np.full(1, i) for i in range(1000)]
    assert [int(text[0]) for text in counting.sample(texts, 1000)] == list(range(1000))
    monkeypatch.setattr(counting, "ROOM", 100)
    for most in (10, 50, 60):
        kept = np.concatenate(counting.sample(iter(texts), most))
        assert most / 2 < len(kept) <= most
        assert np.ptp(np.diff(kept)) <= 16
    with pytest.raises(ValueError, match="No text has at most 2 tokens; raise --tokens"):
        counting.sample([np.arange(5)], 2)


@pytest.mark.parametrize(("order", "width", "min_count"), [(2, 99, 1), (3, 99, 1), (3, 2, 2)])
def test_counts_are_those_of_dictionaries(order: int, width: int, min_count: int) -> None:
    rng = np.random.default_rng(0)
    texts = [rng.integers(1, 6, rng.integers(1, 9)).astype(np.uint16) for _ in range(60)]
    table = count_ngrams(texts, order, 6, width, min_count, start=5)
    followed: dict[tuple[int, ...], Counter[int]] = {}
    for text in texts:
        row = [5, *text.tolist()]
        for i in range(1, len(row)):
            for size in range(1, min(order - 1, i) + 1):
                followed.setdefault(tuple(row[i - size : i]), Counter())[row[i]] += 1
    kept = {
        context: sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))[:width]
        for context, counts in followed.items()
    }
    kept = {
        context: sorted(pair for pair in pairs if pair[1] >= min_count)
        for context, pairs in kept.items()
    }
    # A context is kept with those that are shorter, and numbered by its tokens from the right.
    kept = {context: pairs for context, pairs in kept.items() if pairs}
    contexts = sorted(kept, key=lambda context: (len(context), context[::-1]))
    assert table["token"].tolist() == [context[0] for context in contexts]
    assert table["total"].tolist() == [followed[context].total() for context in contexts]
    assert table["distinct"].tolist() == [len(followed[context]) for context in contexts]
    found = zip(table["follower"].tolist(), table["count"].tolist(), strict=True)
    assert list(found) == [pair for context in contexts for pair in kept[context]]
