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


def test_rouge_lsum_joins_the_sentences() -> None:
    # Swapping two sentences costs rougeL, not rougeLsum, which scores line by line.
    scores = quality.rouge(["one two three . four five six"], ["four five six . one two three"])
    assert scores["rougeLsum"] == pytest.approx(100)
    assert scores["rougeL"] == pytest.approx(f1(3, 6, 6))


@pytest.mark.parametrize("metric", [quality.bleu, quality.rouge])
@pytest.mark.parametrize(("targets", "predictions"), [([], []), (["a"], []), (["a"], ["a", "b"])])
def test_counts_must_agree(metric, targets: list[str], predictions: list[str]) -> None:
    message = f"{len(predictions)} predictions for {len(targets)} targets"
    with pytest.raises(ValueError, match=message):
        metric(targets, predictions)


def test_a_score_by_name() -> None:
    # Of six words, three are in order over the whole text, and three and two line by line.
    texts = ["one two three four . five six"], ["five six . one two four three"]
    assert quality.measure("rougeL", *texts) == pytest.approx(f1(3, 6, 6))
    assert quality.measure("rougeLsum", *texts) == pytest.approx(f1(5, 6, 6))
    texts = ["das ist ein langer Satz"], ["das ist ein langer"]
    assert quality.measure("bleu", *texts) == pytest.approx(100 * math.exp(1 - 5 / 4))


def test_an_unknown_score_lists_the_names() -> None:
    with pytest.raises(ValueError, match="'meteor'; the metrics are bleu, rouge, rougeL"):
        quality.measure("meteor", ["a"], ["a"])


@pytest.mark.parametrize("metric", ["bleu", "rouge", "rougeL"])
def test_a_difference_and_its_interval_are_those_of_resampled_texts(metric: str) -> None:
    rng = np.random.default_rng(5)
    words = np.array(["der", "Hund", "schläft", "auf", "dem", "Sofa", ".", "ein", "Paket"])
    targets = [" ".join(rng.choice(words, rng.integers(4, 12))) for _ in range(30)]
    cut = [" ".join(target.split()[:-1]) for target in targets]
    shuffled = [
        " ".join(rng.permutation(text.split()[:4]).tolist() + text.split()[4:]) for text in cut
    ]
    found = quality.difference(metric, targets, cut, shuffled, seed=3)

    def above(chosen: np.ndarray) -> float:
        texts = [[texts[i] for i in chosen] for texts in (targets, cut, shuffled)]
        return quality.measure(metric, texts[0], texts[2]) - quality.measure(
            metric, texts[0], texts[1]
        )

    assert found[0] == pytest.approx(above(np.arange(30)), abs=1e-9)
    draws = np.random.default_rng(3)
    few = 50 if metric == "bleu" else 20  # Of the bootstrap's own resamples, in order.
    resampled = [above(draws.integers(0, 30, 30)) for _ in range(few)]
    low, high = found[1:]
    assert low < found[0] < high
    inside = sum(low <= value <= high for value in resampled)
    assert inside >= 0.8 * few
    statistics = [quality._statistics(metric, targets, texts) for texts in (cut, shuffled)]
    draws = np.random.default_rng(3)
    for expected in resampled:
        chosen = draws.integers(0, 30, 30)
        one, other = (quality._score(metric, each[chosen].sum(axis=0)) for each in statistics)
        assert other - one == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("metric", ["bleu", "rougeL"])
def test_an_example_is_resampled_with_all_of_its_predictions(metric: str) -> None:
    rng = np.random.default_rng(6)
    words = np.array(["der", "Hund", "schläft", "auf", "dem", "Sofa", ".", "ein", "Paket"])
    numbers = [0, 0, 2, 2, 2, 7]  # Of three examples, whose numbers need not follow one another.
    targets = [" ".join(words[:n]) for n in (5, 5, 8, 8, 8, 9)]
    one, other = (
        [" ".join(rng.permutation(target.split()[:k]).tolist()) for target in targets]
        for k in (5, 7)
    )
    found = quality.difference(metric, targets, one, other, 4, numbers)

    def above(chosen: list[int]) -> float:
        places = [i for number in chosen for i in range(6) if numbers[i] == number]
        texts = [[texts[i] for i in places] for texts in (targets, one, other)]
        scores = [quality.measure(metric, texts[0], predicted) for predicted in texts[1:]]
        return scores[1] - scores[0]

    assert found[0] == pytest.approx(above([0, 2, 7]), abs=1e-9)
    # There are but 27 resamples of three examples; the bootstrap draws 2,000.
    value = {c: above(list(c)) for c in itertools.product((0, 2, 7), repeat=3)}
    draws = np.random.default_rng(4)
    chosen = [np.array([0, 2, 7])[draws.integers(0, 3, 3)] for _ in range(2000)]
    expected = np.percentile([value[tuple(c.tolist())] for c in chosen], [2.5, 97.5])
    assert found[1:] == pytest.approx(expected, abs=1e-9)


def test_equal_outputs_differ_by_nothing() -> None:
    texts = ["der Hund schläft", "ein Paket für alle"]
    assert quality.difference("bleu", texts, texts, texts) == (0, 0, 0)


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
