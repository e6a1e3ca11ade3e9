"""Predictions from measured costs: a pair's speed-up, and its ratio of operations."""

from collections.abc import Sequence
from typing import Any

from speculative.decoding import Rule
from speculative.drafts import TransformerDraft
from speculative.measurement.timing import Costs
from speculative.models import abstract_params, read_by_step
from speculative.pair import Pair


def operations_ratio(pair: Pair) -> float:
    """c-hat, the draft's operations a token over the target's; 0 for a draft without a model.

    A token takes two operations for each number that a step reads.
    """
    if not isinstance(pair.draft, TransformerDraft):
        return 0.0

    def numbers(model: Any) -> int:
        return sum(leaf.size for leaf in read_by_step(abstract_params(model.config)))

    return numbers(pair.draft.model) / numbers(pair.target)


def predict(rule: Rule, alpha: float, gamma: int, costs: Costs, lengths: Sequence[int]) -> float:
    """The speed-up that a rule predicts, by measured costs, for texts of given lengths."""
    return rule.predicted_speedup(
        alpha,
        gamma,
        costs.c(gamma),
        costs.verify_cost(gamma),
        lengths,
        costs.ms_prefill_target / costs.ms_target_step,
        costs.ms_prefill_draft / costs.ms_target_step,
    )
