"""BLEU and ROUGE of decoded text with the settings of T5; both can be a seqio task's metrics.

Both raise ValueError unless there is an example, and one prediction for each target.
"""

import os
import tempfile
from collections.abc import Sequence

# Where there is no home folder, NLTK, which ROUGE's package imports for a stemmer, cannot be
# imported unless some folder is named for its data, of which none is used.
if os.path.expanduser("~") == "~":
    os.environ.setdefault("NLTK_DATA", tempfile.gettempdir())

import numpy as np  # noqa: E402
import sacrebleu  # noqa: E402
from rouge_score import rouge_scorer  # noqa: E402

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
    scorer = rouge_scorer.RougeScorer(ROUGE_TYPES)
    lines = ([text.replace(" . ", " .\n") for text in texts] for texts in (targets, predictions))
    scores = [scorer.score(*pair) for pair in zip(*lines, strict=True)]
    return {
        kind: 100 * float(np.mean([score[kind].fmeasure for score in scores]))
        for kind in ROUGE_TYPES
    }


METRICS = {"bleu": bleu, "rouge": rouge, "rougeL": rouge, "rougeLsum": rouge}
"""The functions that compute the scores of a table, by name; "rouge" stands for rougeLsum."""


def measure(metric: str, targets: Sequence[str], predictions: Sequence[str]) -> float:
    """One score of `METRICS`, in percent; raises ValueError if there is none of that name."""
    if metric not in METRICS:
        raise ValueError(f"There is no metric {metric!r}; the metrics are {', '.join(METRICS)}.")
    kind = "rougeLsum" if metric == "rouge" else metric
    return METRICS[metric](targets, predictions)[kind]


def _check(targets: Sequence[str], predictions: Sequence[str]) -> None:
    if not targets or len(targets) != len(predictions):
        raise ValueError(
            f"{len(predictions)} predictions for {len(targets)} targets: "
            "quality needs at least one target, and one prediction for each"
        )
