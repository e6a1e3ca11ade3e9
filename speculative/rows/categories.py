"""Statistics by category, defined as in Spec-Bench (arXiv 2401.07851) and SPEED-Bench."""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from speculative import checks
from speculative.measurement.bootstrap import interval
from speculative.rows.kept import Example

OVERALL = "overall"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Category:
    """Statistics of one category's questions (all turns and samples), or of all (`OVERALL`)."""

    category: str
    questions: int
    tokens: int  # Produced by speculative decoding.
    # Tokens per target call, including the target's own: Spec-Bench's "mean accepted tokens" and
    # SPEED-Bench's acceptance length.
    mean_accepted_tokens: float
    # Guesses tested and accepted at each position of a step; their ratios are SPEED-Bench's
    # conditional acceptance rates.
    tested_by_position: list[int]
    accepted_by_position: list[int]
    # Means over questions, prefill included; the speed-up is their ratio (Spec-Bench).
    tokens_per_second_autoregressive: float
    tokens_per_second: float
    speedup: float
    speedup_low: float
    speedup_high: float

    def __post_init__(self) -> None:
        checks.fields(self)

    @property
    def acceptance_by_position(self) -> list[float | None]:
        """The share of the guesses tested at each position of a step that were accepted."""
        both = zip(self.accepted_by_position, self.tested_by_position, strict=True)
        return [accepted / tested if tested else None for accepted, tested in both]


def by_category(examples: Sequence[Example], seed: int) -> list[Category] | None:
    """Statistics by category name, followed by those of all examples; None without categories."""
    names = sorted({one.category for one in examples} - {""})
    if not names:
        return None
    each = [_category(name, [x for x in examples if x.category == name], seed) for name in names]
    return [*each, _category(OVERALL, examples, seed)]


def _category(name: str, examples: Sequence[Example], seed: int) -> Category:
    def question_of(one: Example) -> tuple[str, int]:
        return one.question, -1 if one.question else one.number

    def counts(one: Example) -> tuple[float, ...]:
        return *one.seconds, *one.lengths, one.target_calls

    groups = itertools.groupby(sorted(examples, key=question_of), key=question_of)
    questions = np.array([np.sum([*map(counts, turns)], axis=0) for _, turns in groups])
    seconds, tokens, calls = np.split(questions, (2, 4), axis=1)
    speeds = tokens / seconds

    def speedup(chosen: NDArray[np.intp]) -> float:
        alone, with_draft = speeds[chosen].mean(axis=0)
        return float(with_draft / alone)

    low, high = interval(speedup, len(questions), seed)
    alone, with_draft = speeds.mean(axis=0)
    tested, accepted = (
        np.sum([getattr(one, f"{kind}_by_position") for one in examples], axis=0, dtype=int)
        for kind in ("tested", "accepted")
    )
    return Category(
        category=name,
        questions=len(questions),
        tokens=int(tokens[:, 1].sum()),
        mean_accepted_tokens=float(tokens[:, 1].sum() / calls.sum()),
        tested_by_position=tested.tolist(),
        accepted_by_position=accepted.tolist(),
        tokens_per_second_autoregressive=float(alone),
        tokens_per_second=float(with_draft),
        speedup=float(with_draft / alone),
        speedup_low=low,
        speedup_high=high,
    )
