"""BLEU and ROUGE of decoded text with the settings of T5; both can be a seqio task's metrics.

Both raise ValueError unless there is an example, and one prediction for each target.
"""

import functools
import os
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import sacrebleu
from numpy.typing import NDArray

from speculative.measurement.bootstrap import interval

ROUGE_TYPES = ("rouge1", "rouge2", "rougeL", "rougeLsum")


def bleu(targets: Sequence[str], predictions: Sequence[str]) -> dict[str, float]:
    """Corpus BLEU of sacreBLEU in percent, with `intl` tokenisation as in T5's WMT results."""
    _check(targets, predictions)
    score = sacrebleu.corpus_bleu(list(predictions), [list(targets)], tokenize="intl")
    return {"bleu": score.score}


def rouge(targets: Sequence[str], predictions: Sequence[str]) -> dict[str, float]:
    """Mean ROUGE F1 of `ROUGE_TYPES` over the examples in percent, without stemming.

    T5 reports the median of bootstrap resamples, which is random; the mean is its limit. For
    `rougeLsum` T5 breaks the line after a full stop between spaces, and so do we.
    """
    _check(targets, predictions)
    scorer = _rouge_scorer()
    lines = ([text.replace(" . ", " .\n") for text in texts] for texts in (targets, predictions))
    scores = [scorer.score(*pair) for pair in zip(*lines, strict=True)]
    return {
        kind: 100 * float(np.mean([score[kind].fmeasure for score in scores]))
        for kind in ROUGE_TYPES
    }


@functools.cache
def _rouge_scorer() -> Any:
    # It imports NLTK for a stemmer, and NLTK cannot be imported where there is no home folder,
    # unless some folder is named for its data, of which none is used.
    if os.path.expanduser("~") == "~":
        os.environ.setdefault("NLTK_DATA", tempfile.gettempdir())
    from rouge_score import rouge_scorer

    return rouge_scorer.RougeScorer(ROUGE_TYPES)


METRICS = {"bleu": bleu, "rouge": rouge, "rougeL": rouge, "rougeLsum": rouge}
"""The functions that compute the scores of a table, by name; "rouge" stands for rougeLsum."""


def measure(metric: str, targets: Sequence[str], predictions: Sequence[str]) -> float:
    """One score of `METRICS`, in percent; raises ValueError if there is none of that name."""
    if metric not in METRICS:
        raise ValueError(f"There is no metric {metric!r}; the metrics are {', '.join(METRICS)}.")
    return METRICS[metric](targets, predictions)[_kind(metric)]


def score(
    metric: str, targets: Sequence[str], predictions: Sequence[str], seed: int = 0
) -> tuple[float, float, float]:
    """`measure`, and its 95% interval over examples."""
    statistics = _statistics(metric, targets, predictions)
    low, high = interval(
        lambda chosen: _score(metric, statistics[chosen].sum(0)), len(targets), seed
    )
    return measure(metric, targets, predictions), low, high


def difference(
    metric: str,
    targets: Sequence[str],
    one: Sequence[str],
    other: Sequence[str],
    seed: int = 0,
    numbers: Sequence[int] | None = None,
) -> tuple[float, float, float]:
    """How much `other` scores above `one`, in percent, and the 95% interval of that.

    The bootstrap draws examples, each with both of its predictions (Koehn, 2004, section 4), or
    with all of them where several predictions have the example's number in `numbers` [N].
    """
    statistics = np.stack([_statistics(metric, targets, texts) for texts in (one, other)])
    if numbers is not None:
        examples, of = np.unique(numbers, return_inverse=True)
        sums = np.zeros((len(examples), 2, statistics.shape[-1]))
        np.add.at(sums, of, statistics.swapaxes(0, 1))
        statistics = sums.swapaxes(0, 1)

    def above(chosen: NDArray[np.intp]) -> float:
        scores = [_score(metric, sums) for sums in statistics[:, chosen].sum(axis=1)]
        return scores[1] - scores[0]

    count = statistics.shape[1]
    return above(np.arange(count)), *interval(above, count, seed)


def _statistics(
    metric: str, targets: Sequence[str], predictions: Sequence[str]
) -> NDArray[np.float64]:
    """Numbers of each example [N, K] whose sums tell the score: a resample costs no more."""
    _check(targets, predictions)
    if metric != "bleu":
        kind = _kind(metric)
        scores = [rouge([t], [p])[kind] for t, p in zip(targets, predictions, strict=True)]
        return np.array([(score, 1) for score in scores])
    bleu_of = sacrebleu.BLEU(tokenize="intl")
    counts = []
    for target, prediction in zip(targets, predictions, strict=True):
        found = bleu_of.corpus_score([prediction], [[target]])
        counts.append([*found.counts, *found.totals, found.sys_len, found.ref_len])
    return np.array(counts, np.float64)


def _score(metric: str, sums: NDArray[np.float64]) -> float:
    """The score, in percent, that sums of `_statistics` tell."""
    if metric != "bleu":
        return float(sums[0] / sums[1])
    *counts, predicted, there = (int(value) for value in sums)
    matched, possible = counts[:4], counts[4:]
    lengths = predicted, there
    return sacrebleu.BLEU.compute_bleu(matched, possible, *lengths, smooth_method="exp").score


def _kind(metric: str) -> str:
    return "rougeLsum" if metric == "rouge" else metric


def _check(targets: Sequence[str], predictions: Sequence[str]) -> None:
    if not targets or len(targets) != len(predictions):
        raise ValueError(
            f"{len(predictions)} predictions for {len(targets)} targets: "
            "quality needs at least one target, and one prediction for each"
        )
