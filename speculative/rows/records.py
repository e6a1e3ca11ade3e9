"""The record of a measured row, and the file of records: one JSON object per line."""

import dataclasses
import pathlib

from speculative import checks, disk, theory
from speculative.rows.categories import Category


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """A measured row of a table; None marks values that were not measured.

    Symbols are those of `theory`; times are milliseconds at batch size 1. `alpha` is the mean of
    the sum of min(p / l, q) over the target's own text, `alpha_accepted` the accepted share of the
    tested guesses. `speedup` is autoregressive over speculative time per token; `speedup_expected`
    is Theorem 3.8 with the tokens per call that the rule predicts; `speedup_predicted` is the
    measured cost model with prefill and the examples' lengths, and `speedup_long` its limit for
    long outputs, Eq. 1 / (gamma c + v). If `simulated_alpha` is a number, guesses were accepted
    with that probability, and only the times are real. If `lenience` l is below 1, outputs are not
    the target's own, and are not compared. If `tree` is above 0, each step guesses a tree of that
    many tokens: gamma is its depth, `nodes` the mean number of guesses per call, `alpha` the share
    of tested positions whose likeliest guess was accepted, and `alpha_accepted` the share where any
    was; Equation 1 holds only for chains. A value of the wrong type, or a number that is not
    finite, raises ValueError.
    """

    experiment: str
    task: str
    target: str
    draft: str
    temperature: float
    top_k: int
    top_p: float
    lenience: float
    gamma: int
    batch_size: int
    num_examples: int
    num_tokens: int
    num_target_calls: int
    tokens_per_call: float
    tokens_per_call_expected: float | None
    alpha: float
    alpha_accepted: float | None
    alpha_low: float
    alpha_high: float
    c: float
    verify_cost: float
    ms_target_step: float
    ms_verify: float
    ms_draft_step: float
    ms_per_token_autoregressive: float
    ms_per_token_speculative: float
    speedup: float
    speedup_low: float
    speedup_high: float
    speedup_expected: float | None
    speedup_predicted: float
    outputs_identical: int | None
    near_ties: int | None
    metric: str | None
    quality_autoregressive: float | None
    quality_speculative: float | None
    paper_alpha: float | None
    paper_speedup: float | None
    seed: int
    commit: str
    device: str
    jax_version: str
    dtype: str
    gin: str
    started_at: str
    ms_prefill: float
    ms_prefill_draft: float
    speedup_long: float | None
    tested: int
    accepted: int
    min_p: float = 0.0
    simulated_alpha: float | None = None
    alpha_accepted_low: float | None = None
    alpha_accepted_high: float | None = None
    verification: str = "token"
    tree: int = 0
    quantize: str = "none"
    mesh: str | None = None
    # The number of workers that shared the texts, and c and v as timed while all of them ran; `c`
    # and `verify_cost` have the same values unless a single process timed its own afterwards.
    workers: int | None = None
    c_beside: float | None = None
    verify_cost_beside: float | None = None
    nodes: float | None = None
    tokens_per_call_low: float | None = None
    tokens_per_call_high: float | None = None
    # The rule's prediction; for token verification it is Eq. 1.
    tokens_per_call_predicted: float | None = None
    tokens_per_call_predicted_low: float | None = None
    tokens_per_call_predicted_high: float | None = None
    # Predicted tokens per call over those of token verification of the same guesses.
    gain_over_token: float | None = None
    gain_over_token_low: float | None = None
    gain_over_token_high: float | None = None
    draft_tokens: int | None = None  # Guesses proposed.
    draft_parameters: int | None = None
    draft_bytes: int | None = None  # In memory.
    draft_training_minutes: float | None = None  # According to its checkpoint.
    # Guesses tested and accepted at each position of a step, and steps that accepted 0 to gamma.
    tested_by_position: list[int] | None = None
    accepted_by_position: list[int] | None = None
    accepted_lengths: list[int] | None = None
    # For trees, accepted guesses by position and by rank among the successors of the same token.
    accepted_by_rank: list[list[int]] | None = None
    # Speculative minus autoregressive quality, and its interval over the examples.
    quality_difference: float | None = None
    quality_difference_low: float | None = None
    quality_difference_high: float | None = None
    truncated: int | None = None  # Sources that were cut to the row's `source_length`.
    categories: list[Category] | None = None  # By category of questions, then overall.
    # Those of target, draft, vocabulary and texts; see `Resolved.fingerprints`.
    fingerprints: dict[str, str] | None = None

    def __post_init__(self) -> None:
        if self.categories is not None:
            made = [
                one if isinstance(one, Category) else Category(**one) for one in self.categories
            ]
            object.__setattr__(self, "categories", made)
        checks.fields(self)

    @property
    def simulated(self) -> bool:
        """Whether guesses were accepted with a given probability: only the times are real."""
        return self.simulated_alpha is not None

    @property
    def above_ceiling(self) -> bool:
        """Whether the speed-up exceeds the tokens per call, the limit even for a free draft.

        Then the baseline is slower than speculation's target step, as in three rows of the paper.
        """
        ceiling = self.tokens_per_call_predicted_high
        if ceiling is None:  # The record predates predictions by rules.
            ceiling = theory.expected_tokens(self.alpha_high, self.gamma)
        return self.speedup_low > ceiling


def read(path: str | pathlib.Path) -> list[Record]:
    """The records of a file in order, none if it is missing; ValueError names an invalid line."""
    return disk.entries(path, lambda fields: Record(**fields), "record")


def of_workers(folder: pathlib.Path) -> list[Record]:
    """The last record of each row from every worker in a folder, each on its own texts."""
    files = sorted(folder.glob("records.*.jsonl"))
    return [one for file in files for one in {x.experiment: x for x in read(file)}.values()]
