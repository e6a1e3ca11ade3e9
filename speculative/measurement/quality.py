"""Quality of decoded text: BLEU for translation, ROUGE for summaries, set up as T5's metrics are.

`bleu` and `rouge` take plain strings and return percentages, and serve as a seqio task's metrics.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import sacrebleu
from rouge_score import rouge_scorer

ROUGE_TYPES = ("rouge1", "rouge2", "rougeL", "rougeLsum")


def bleu(targets: Sequence[str], predictions: Sequence[str]) -> dict[str, float]:
    """Corpus BLEU of sacreBLEU with `intl` tokenisation, which T5's WMT results use.

    Args:
        targets: One reference an example.
        predictions: The decoded text of each example, in the same order.

    Returns:
        `{"bleu": score}`, in percent.

    Raises:
        ValueError: if there is no example, or not one prediction for each target.
    """
    _check(targets, predictions)
    score = sacrebleu.corpus_bleu(list(predictions), [list(targets)], tokenize="intl")
    return {"bleu": score.score}


def rouge(targets: Sequence[str], predictions: Sequence[str]) -> dict[str, float]:
    """Mean ROUGE F1 over the examples, no stemming.

    T5 reports the median of bootstrap resamples, which is random; the mean is its limit. For
    `rougeLsum` each sentence is a line, which T5 obtains by a break after a free-standing stop.

    Args:
        targets: One reference an example.
        predictions: The decoded text of each example, in the same order.

    Returns:
        `rouge1`, `rouge2`, `rougeL` and `rougeLsum`, in percent.

    Raises:
        ValueError: if there is no example, or not one prediction for each target.
    """
    _check(targets, predictions)
    scorer = rouge_scorer.RougeScorer(ROUGE_TYPES)
    scores = [
        scorer.score(target.replace(" . ", " .\n"), prediction.replace(" . ", " .\n"))
        for target, prediction in zip(targets, predictions, strict=True)
    ]
    return {
        kind: 100 * float(np.mean([score[kind].fmeasure for score in scores]))
        for kind in ROUGE_TYPES
    }


Metric = Callable[[Sequence[str], Sequence[str]], dict[str, float]]

METRICS: Mapping[str, Metric] = {"bleu": bleu, "rougeL": rouge, "rougeLsum": rouge}
"""The scores that a table may show, by name, and what computes them."""


def measure(metric: str, targets: Sequence[str], predictions: Sequence[str]) -> float:
    """One score of `METRICS`, in percent.

    Raises:
        ValueError: if there is no such score, no example, or not one prediction for each target.
    """
    if metric not in METRICS:
        raise ValueError(f"There is no metric {metric!r}; the metrics are {', '.join(METRICS)}.")
    return METRICS[metric](targets, predictions)[metric]


def _check(targets: Sequence[str], predictions: Sequence[str]) -> None:
    if not targets or len(targets) != len(predictions):
        raise ValueError(
            f"{len(predictions)} predictions for {len(targets)} targets: "
            "quality needs at least one target, and one prediction for each"
        )
