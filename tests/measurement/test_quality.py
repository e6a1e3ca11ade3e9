"""BLEU and ROUGE against the textbook formulas, written out on a few words."""

import itertools
import math
import os
import subprocess
import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest
import sacrebleu

from speculative.measurement import quality


def ngrams(tokens: list[str], n: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1))


def test_bleu_is_brevity_penalty_times_geometric_mean_of_precisions() -> None:
    targets = ["der kleine Hund schläft auf dem Sofa", "ein Paket für alle Fälle und mehr"]
    predictions = ["der kleine Hund schläft auf Sofa", "ein Paket für alle Fälle"]
    precisions = []
    for n in (1, 2, 3, 4):
        pairs = [
            (ngrams(p.split(), n), ngrams(t.split(), n))
            for t, p in zip(targets, predictions, strict=True)
        ]
        hits = sum((p & t).total() for p, t in pairs)
        precisions.append(hits / sum(p.total() for p, _ in pairs))
    lengths = [sum(len(text.split()) for text in texts) for texts in (targets, predictions)]
    penalty = math.exp(1 - lengths[0] / lengths[1])
    expected = 100 * penalty * math.exp(sum(map(math.log, precisions)) / 4)
    assert quality.bleu(targets, predictions)["bleu"] == pytest.approx(expected, rel=1e-9)


def test_bleu_minds_case_and_splits_all_punctuation() -> None:
    """As T5's own: sacreBLEU's `intl` on the text as it is, where other settings give others."""
    targets = ["Die Datei „Liste“ wird gelesen – und der Rest bleibt"]
    predictions = ["die datei „Liste“ wird gelesen – und der Rest bleibt"]

    def score(**settings: Any) -> float:
        return sacrebleu.corpus_bleu(predictions, [targets], **settings).score

    found = quality.bleu(targets, predictions)["bleu"]
    assert found == pytest.approx(score(tokenize="intl"))
    assert abs(found - score(tokenize="13a")) > 1
    assert abs(found - score(tokenize="intl", lowercase=True)) > 1


def f1(overlap: int, target: int, prediction: int) -> float:
    return 100 * 2 * overlap / (target + prediction)


def test_rouge_is_the_mean_f1_of_overlaps() -> None:
    # First pair: 4 of 5 and 5 words shared, 2 of 4 and 4 bigrams, longest common subsequence 4.
    scores = quality.rouge(
        ["fast audio editor for linux", "a b c"], ["fast sound editor for linux", "a b c"]
    )
    expected = {"rouge1": f1(4, 5, 5), "rouge2": f1(2, 4, 4), "rougeL": f1(4, 5, 5)}
    for kind, first in expected.items():
        assert scores[kind] == pytest.approx((first + 100) / 2), kind


def test_rouge_takes_words_as_they_are() -> None:
    """A stemmer would find all three."""
    scores = quality.rouge(["editors for files"], ["editor for file"])
    assert scores["rouge1"] == pytest.approx(f1(1, 3, 3))
    assert scores["rouge2"] == 0


def test_what_rouge_does_not_see() -> None:
    """It scores another script 0, however good the output is."""
    assert quality.rouge(["地図を見る"], ["地図を見る"])["rougeL"] == 0
    for metric in ("rouge", "rougeL", "rougeLsum"):
        for text, share in (("地図を見る", 0), ("Карта 12", 29)):
            with pytest.raises(ValueError, match=f"{metric}. sees only .*, which are {share}% of"):
                quality.require_seen(metric, [text, "…"])
        quality.require_seen(metric, ["Über größere Gärten", "地図"])
    for texts in (["地図"], ["…"], []):
        quality.require_seen("bleu", texts)


def test_rouge_lsum_joins_the_sentences() -> None:
    # Swapping two sentences costs rougeL, not rougeLsum, which scores line by line.
    scores = quality.rouge(["one two three . four five six"], ["four five six . one two three"])
    assert scores["rougeLsum"] == pytest.approx(100)
    assert scores["rougeL"] == pytest.approx(f1(3, 6, 6))


def test_a_score_by_name() -> None:
    # Of six words, three are in order over the whole text, and three and two line by line.
    texts = ["one two three four . five six"], ["five six . one two four three"]
    assert quality.measure("rougeL", *texts) == pytest.approx(f1(3, 6, 6))
    assert quality.measure("rougeLsum", *texts) == pytest.approx(f1(5, 6, 6))
    texts = ["das ist ein langer Satz"], ["das ist ein langer"]
    assert quality.measure("bleu", *texts) == pytest.approx(100 * math.exp(1 - 5 / 4))


@pytest.mark.parametrize("metric", ["bleu", "rouge", "rougeL"])
@pytest.mark.parametrize("numbers", [[0, 1, 2], [0, 0, 2, 2, 2, 7]], ids=["one each", "several"])
def test_an_interval_is_that_of_resampled_texts(metric: str, numbers: list[int]) -> None:
    """Of a score, and of a difference, where an example stands for all of its predictions."""
    rng = np.random.default_rng(6)
    words = np.array(["der", "Hund", "schläft", "auf", "dem", "Sofa", ".", "ein", "Paket"])
    lengths = (5, 8, 9) if len(numbers) == 3 else (5, 5, 8, 8, 8, 9)
    owners = np.array(numbers)
    examples = np.unique(owners)  # Whose numbers need not follow one another.
    targets = [" ".join(words[:n]) for n in lengths]
    one, other = (
        [" ".join(rng.permutation(target.split()[:k]).tolist()) for target in targets]
        for k in (5, 7)
    )

    def scores(chosen: tuple[int, ...]) -> list[float]:
        places = [i for number in chosen for i in np.flatnonzero(owners == number)]
        texts = [[texts[i] for i in places] for texts in (targets, one, other)]
        return [quality.measure(metric, texts[0], predicted) for predicted in texts[1:]]

    # There are but 27 resamples of three examples; the bootstrap draws 2,000.
    value = {chosen: scores(chosen) for chosen in itertools.product(examples, repeat=3)}
    draws = np.random.default_rng(0)
    drawn = [value[tuple(examples[draws.integers(0, 3, 3)])] for _ in range(2000)]
    whole = value[tuple(examples)]
    found = quality.difference(metric, targets, one, other, 0, numbers)
    above = np.percentile([second - first for first, second in drawn], [2.5, 97.5])
    assert found == pytest.approx((whole[1] - whole[0], *above), abs=1e-9)
    if len(numbers) == 3:
        low, high = np.percentile([first for first, _ in drawn], [2.5, 97.5])
        assert quality.score(metric, targets, one) == pytest.approx((whole[0], low, high))


def test_equal_outputs_differ_by_nothing() -> None:
    texts = ["der Hund schläft", "ein Paket für alle"]
    assert quality.difference("bleu", texts, texts, texts, 0, [0, 1]) == (0, 0, 0)


def test_it_is_computed_where_there_is_no_home_folder() -> None:
    """As for a user without an entry in the system's list, whose `~` stays as it is."""
    code = (
        "import os, posixpath; posixpath.expanduser = os.path.expanduser = lambda path: path\n"
        "from speculative.measurement import quality\n"
        "print(quality.measure('rougeL', ['a b'], ['a b']))"
    )
    env = {name: value for name, value in os.environ.items() if name not in ("HOME", "NLTK_DATA")}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("100.0\n", 0), done.stderr


@pytest.mark.parametrize("metric", [quality.bleu, quality.rouge])
@pytest.mark.parametrize(("targets", "predictions"), [([], []), (["a"], []), (["a"], ["a", "b"])])
def test_counts_must_agree(metric, targets: list[str], predictions: list[str]) -> None:
    message = f"{len(predictions)} predictions for {len(targets)} targets"
    with pytest.raises(ValueError, match=message):
        metric(targets, predictions)


def test_an_unknown_score_lists_the_names() -> None:
    with pytest.raises(ValueError, match="'meteor'; the metrics are bleu, rouge, rougeL"):
        quality.measure("meteor", ["a"], ["a"])
