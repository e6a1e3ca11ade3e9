"""The script that counts the bigram draft's table, and the table that ships."""

import itertools
import pathlib
import runpy
import sys
from collections import Counter

import numpy as np
import pytest

from speculative import checkpoints
from speculative.vocabulary import Vocabulary

SCRIPT = pathlib.Path(__file__).parents[2] / "scripts" / "count_bigrams.py"


def tokenised(path: pathlib.Path, targets: list[list[int]]) -> pathlib.Path:
    offsets = np.cumsum([0, *map(len, targets)])
    flat = np.array(list(itertools.chain.from_iterable(targets)), np.int16)
    np.savez(path, targets=flat, targets_offsets=offsets)
    return path


def count(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["count_bigrams.py", *map(str, arguments)])
    runpy.run_path(str(SCRIPT), run_name="__main__")


def test_pairs_seen_at_least_twice(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(6)
    texts = [[*rng.integers(2, 300, rng.integers(0, 9)).tolist(), 1] for _ in range(4000)]
    files = [
        tokenised(tmp_path / "a.npz", texts[:1500]),
        tokenised(tmp_path / "b.npz", texts[1500:]),
    ]
    output = tmp_path / "bigrams.npz"
    count(monkeypatch, *files, "--output", output)
    expected = Counter(pair for text in texts for pair in itertools.pairwise([0, *text]))
    expected = {pair: n for pair, n in expected.items() if n >= 2}
    with np.load(output) as found:
        pairs = zip(found["previous"].tolist(), found["following"].tolist(), strict=True)
        assert dict(zip(pairs, found["count"].tolist(), strict=True)) == expected
        assert found["previous"].dtype == np.uint16
    assert len(expected) > 100


def test_a_file_without_targets_and_one_without_pairs(
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    np.savez(tmp_path / "empty.npz", inputs=np.zeros(3))
    rare = tokenised(tmp_path / "rare.npz", [[2, 3, 1]])
    for path, message in ((tmp_path / "empty.npz", "no targets"), (rare, "No pair was seen 2")):
        with pytest.raises(SystemExit) as stopped:
            count(monkeypatch, path, "--output", tmp_path / "out.npz")
        assert stopped.value.code == 2
        assert message in capsys.readouterr().err


def test_the_table_that_ships_is_of_the_vocabulary_that_ships() -> None:
    pieces = Vocabulary(checkpoints.ASSETS / "debian.model").pieces
    with np.load(checkpoints.ASSETS / "bigrams.npz") as table:
        previous, following, times = (table[n] for n in ("previous", "following", "count"))
    assert max(previous.max(), following.max()) < len(pieces)
    assert times.min() == 2
    # No text goes on after its end.
    assert 1 not in previous
