"""The numbers printed in the paper (arXiv 2211.17192v2), to compare measured ones with.

Tasks are `ende` (WMT English to German), `cnndm` (CNN/DailyMail), `lm1b` and `dialog`. Targets are
T5 v1.1 XXL (11B parameters) unless another is named; its drafts `small`, `base` and `large` are
T5 v1.1 of 77M, 250M and 800M. Speedups are at batch size 1 on one TPU-v4, over T5X's own decoding.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

TARGET = "t5_xxl"

Row = TypeVar("Row", "TheoryRow", "SpeedupRow", "AlphaRow")


class TheoryRow(NamedTuple):
    """A row of Table 1: the gain from an acceptance rate if the draft is free."""

    alpha: float
    gamma: int
    operations: float
    speedup: float


class SpeedupRow(NamedTuple):
    """A row of Tables 2 and 4; `speedup_expected` is Theorem 3.8's, `speedup` the measured one."""

    task: str
    draft: str
    temperature: float
    gamma: int
    alpha: float
    c: float
    speedup_expected: float
    speedup: float


class AlphaRow(NamedTuple):
    """A row of Table 3, or of Table 5 with lenience; None where the paper prints no number.

    Alpha is the mean of the sum of min(p, q) on text that the target generated.
    """

    target: str
    task: str
    draft: str
    temperature: float
    alpha: float
    speedup: float | None = None
    gamma: int | None = None
    lenience: float = 1.0


TABLE_1 = (
    TheoryRow(0.6, 2, 1.53, 1.96),
    TheoryRow(0.7, 3, 1.58, 2.53),
    TheoryRow(0.8, 2, 1.23, 2.44),
    TheoryRow(0.8, 5, 1.63, 3.69),
    TheoryRow(0.9, 2, 1.11, 2.71),
    TheoryRow(0.9, 10, 1.60, 6.86),
)

TABLES_2_AND_4 = (
    SpeedupRow("ende", "small", 0.0, 7, 0.75, 0.02, 3.2, 3.4),
    SpeedupRow("ende", "base", 0.0, 7, 0.80, 0.04, 3.3, 2.8),
    SpeedupRow("ende", "large", 0.0, 7, 0.82, 0.11, 2.5, 1.7),
    SpeedupRow("ende", "small", 1.0, 7, 0.62, 0.02, 2.3, 2.6),
    SpeedupRow("ende", "base", 1.0, 5, 0.68, 0.04, 2.4, 2.4),
    SpeedupRow("ende", "large", 1.0, 3, 0.71, 0.11, 2.0, 1.4),
    SpeedupRow("cnndm", "small", 0.0, 5, 0.65, 0.02, 2.4, 3.1),
    SpeedupRow("cnndm", "base", 0.0, 5, 0.73, 0.04, 2.6, 3.0),
    SpeedupRow("cnndm", "large", 0.0, 3, 0.74, 0.11, 2.0, 2.2),
    SpeedupRow("cnndm", "small", 1.0, 5, 0.53, 0.02, 1.9, 2.3),
    SpeedupRow("cnndm", "base", 1.0, 3, 0.55, 0.04, 1.8, 2.2),
    SpeedupRow("cnndm", "large", 1.0, 3, 0.56, 0.11, 1.6, 1.7),
)

TABLE_3 = tuple(
    AlphaRow(target, task, draft, temperature, alpha)
    for target, task, draft, *alphas in (
        ("gpt_97m", "lm1b", "unigram", 0.03, 0.03),
        ("gpt_97m", "lm1b", "bigram", 0.05, 0.05),
        ("gpt_97m", "lm1b", "gpt_6m", 0.88, 0.89),
        (TARGET, "ende", "unigram", 0.08, 0.07),
        (TARGET, "ende", "bigram", 0.20, 0.19),
        (TARGET, "ende", "small", 0.75, 0.62),
        (TARGET, "ende", "base", 0.80, 0.68),
        (TARGET, "ende", "large", 0.82, 0.71),
        (TARGET, "cnndm", "unigram", 0.13, 0.08),
        (TARGET, "cnndm", "bigram", 0.23, 0.16),
        (TARGET, "cnndm", "small", 0.65, 0.53),
        (TARGET, "cnndm", "base", 0.73, 0.55),
        (TARGET, "cnndm", "large", 0.74, 0.56),
        ("lamda_137b", "dialog", "lamda_100m", 0.61, 0.57),
        ("lamda_137b", "dialog", "lamda_2b", 0.71, 0.71),
        ("lamda_137b", "dialog", "lamda_8b", 0.75, 0.74),
    )
    for temperature, alpha in zip((0.0, 1.0), alphas, strict=True)
)

TABLE_5 = tuple(
    AlphaRow(TARGET, "ende", draft, temperature, *numbers, gamma, lenience)
    for draft, temperature, gamma, *columns in (
        ("unigram", 1.0, None, (0.07, None), (0.10, None), (0.11, None), (0.16, None)),
        ("bigram", 1.0, None, (0.19, None), (0.23, None), (0.25, None), (0.32, None)),
        ("small", 1.0, None, (0.62, 2.5), (0.71, 3.1), (0.76, 3.6), (0.84, 5.0)),
        ("base", 1.0, None, (0.68, None), (0.80, None), (0.83, None), (0.90, None)),
        ("small", 0.0, 8, (0.75, 3.3), (0.75, 3.3), (0.80, 3.9), (0.87, 4.9)),
    )
    for lenience, numbers in zip((1.0, 0.5, 0.3, 0.1), columns, strict=True)
)


def find(rows: Sequence[Row], **setting: object) -> Row | None:
    """The first row whose fields have these values, or None where the paper has no such row."""
    return next((row for row in rows if setting.items() <= row._asdict().items()), None)
