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


def require_seen(metric: str, targets: Sequence[str]) -> None:
    """Raises ValueError if ROUGE sees less than half of the characters of targets.

    It reads only the letters a to z and digits, and would score other scripts 0 or by their
    numbers.
    """
    letters = [letter for target in targets for letter in target if letter.isalnum()]
    seen = sum(letter.isascii() for letter in letters)
    if metric in ROUGE and 2 * seen < len(letters):
        raise ValueError(
            f"ROUGE ({metric}) sees only the letters a to z and digits, which are "
            f"{seen / len(letters):.0%} of the references' letters; score by bleu (--metric)."
        )


def _check(targets: Sequence[str], predictions: Sequence[str]) -> None:
    if not targets or len(targets) != len(predictions):
        raise ValueError(
            f"{len(predictions)} predictions for {len(targets)} targets: "
            "quality needs at least one target, and one prediction for each"
        )


@functools.cache
def _rouge_scorer() -> Any:
    # It imports NLTK for a stemmer, and NLTK cannot be imported without a home folder unless some
    # folder is named for its data, none of which is used.
    if os.path.expanduser("~") == "~":
        os.environ.setdefault("NLTK_DATA", tempfile.gettempdir())
    from rouge_score import rouge_scorer

    return rouge_scorer.RougeScorer(ROUGE_TYPES)


ROUGE = ("rouge", "rougeL", "rougeLsum")
METRICS = {"bleu": bleu, **dict.fromkeys(ROUGE, rouge)}
"""The functions that compute the scores of a table, by name; "rouge" stands for rougeLsum."""


def measure(metric: str, targets: Sequence[str], predictions: Sequence[str]) -> float:
    """One score of `METRICS`, in percent; raises ValueError if there is none of that name."""
    if metric not in METRICS:
        raise ValueError(f"There is no metric {metric!r}; the metrics are {', '.join(METRICS)}.")
    kind = "rougeLsum" if metric == "rouge" else metric
    return METRICS[metric](targets, predictions)[kind]


def score(
    metric: str, targets: Sequence[str], predictions: Sequence[str]
) -> tuple[float, float, float]:
    """The score of `measure`, and its 95% interval over examples."""
    statistics = _statistics(metric, targets, predictions)
    low, high = interval(lambda i: _score(metric, statistics[i].sum(axis=0)), len(targets))
    return measure(metric, targets, predictions), low, high


def difference(
    metric: str,
    targets: Sequence[str],
    one: Sequence[str],
    other: Sequence[str],
    seed: int,
    numbers: Sequence[int],
) -> tuple[float, float, float]:
    """The score of `other` minus that of `one`, in percent, and its 95% interval.

    The bootstrap draws examples, by their `numbers` [N], each with all of its predictions, those of
    `one` and of `other` (Koehn, 2004, section 4).
    """
    statistics = np.array([_statistics(metric, targets, texts) for texts in (one, other)])
    examples, of = np.unique(numbers, return_inverse=True)
    sums = np.zeros((2, len(examples), statistics.shape[-1]))
    np.add.at(sums.swapaxes(0, 1), of, statistics.swapaxes(0, 1))

    def above(chosen: NDArray[np.intp]) -> float:
        of_one, of_other = (_score(metric, total) for total in sums[:, chosen].sum(axis=1))
        return of_other - of_one

    return above(np.arange(len(examples))), *interval(above, len(examples), seed)


def _statistics(
    metric: str, targets: Sequence[str], predictions: Sequence[str]
) -> NDArray[np.float64]:
    """Numbers per example [N, K] whose sums determine the score, so that resampling only adds."""
    pairs = zip(targets, predictions, strict=True)
    if metric != "bleu":
        return np.array([(measure(metric, [target], [text]), 1) for target, text in pairs])
    bleu_of = sacrebleu.BLEU(tokenize="intl")
    scores = [bleu_of.corpus_score([text], [[target]]) for target, text in pairs]
    counts = [[*of.counts, *of.totals, of.sys_len, of.ref_len] for of in scores]
    return np.array(counts, np.float64)


def _score(metric: str, sums: NDArray[np.float64]) -> float:
    """The score, in percent, from sums of `_statistics`."""
    if metric != "bleu":
        return float(sums[0] / sums[1])
    counts = sums.astype(int).tolist()
    result = sacrebleu.BLEU.compute_bleu(counts[:4], counts[4:8], *counts[8:], smooth_method="exp")
    return result.score
