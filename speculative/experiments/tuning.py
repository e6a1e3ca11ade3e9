"""How many guesses a step pay, by measured alpha, c and v; and why none do, where none do."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from speculative import theory
from speculative.drafts import TransformerDraft
from speculative.experiments.workload import Workload
from speculative.measurement.alpha import alpha_on_target_text
from speculative.measurement.timing import Costs
from speculative.models import FlaxModel, abstract_params, read_by_step
from speculative.pair import Pair

OnProgress = Callable[[str, float], None]
"""Told what is being done, and the share of it that is done, from 0 to 1."""

TURNS = 3
"""Of timing costs; each kind of step is timed once in a turn."""


@dataclasses.dataclass(frozen=True)
class Tuning:
    """What decides about gamma, measured.

    Attributes:
        alpha: acceptance rate on the target's own text.
        lengths: tokens of the outputs.
        costs: of every kind of step, for the gammas that were timed.
        c_hat: operations a token of the draft over those of the target.
    """

    alpha: float
    lengths: list[int]
    costs: Costs
    c_hat: float

    @property
    def gammas(self) -> list[int]:
        """Numbers of guesses that were timed."""
        return sorted(self.costs.ms_verify)

    def expected(self, gamma: int) -> float:
        """The speed-up by Theorem 3.8, for which a wide pass costs what a narrow one does."""
        return theory.speedup(self.alpha, gamma, self.costs.c(gamma))

    def predicted(self, gamma: int) -> float:
        """The speed-up that all measured costs promise for texts of these lengths."""
        return predict(self.alpha, gamma, self.costs, self.lengths)

    @property
    def gamma(self) -> int:
        """The gamma of the largest predicted speed-up."""
        return max(self.gammas, key=self.predicted)

    @property
    def operations(self) -> float:
        """The factor by which operations grow at the best gamma (Theorem 3.11)."""
        return theory.operations(self.alpha, self.gamma, self.c_hat)

    def why_not(self) -> str | None:
        """Why speculation will not pay, in a sentence; None where it will."""
        gamma, costs = self.gamma, self.costs
        if self.predicted(gamma) > 1:
            return None
        c, v = costs.c(gamma), costs.verify_cost(gamma)
        if self.alpha <= c:
            return (
                f"The draft is too slow or too weak: a guess costs c = {c:.2f} of a target step "
                f"and stands with a chance of only alpha = {self.alpha:.2f} (Corollary 3.9)."
            )
        if theory.speedup(self.alpha, gamma, c, v) > 1:
            prefill = costs.ms_prefill_target + costs.ms_prefill_draft
            return (
                f"The outputs are too short: {np.mean(self.lengths):.0f} tokens do not win back "
                f"what encoding for both models costs, {prefill:.1f} ms or "
                f"{prefill / costs.ms_target_step:.1f} target steps."
            )
        if theory.speedup(self.alpha, gamma, c) > 1:
            return (
                f"The wide pass is too dear: verifying {gamma} guesses costs v = {v:.2f} target "
                f"steps, and yields {theory.expected_tokens(self.alpha, gamma):.2f} tokens."
            )
        return (
            f"Too few guesses stand for what they cost: alpha = {self.alpha:.2f}, c = {c:.2f}, "
            f"v = {v:.2f}."
        )


def tune(work: Workload, gammas: Sequence[int], on_progress: OnProgress) -> Tuning:
    """Measures alpha on all of a workload's sources, and the costs of each gamma.

    Raises:
        ValueError: logits are not finite.
    """
    texts = []
    for number in range(len(work.sources)):
        texts.append(work.pair.result(work.decode(number, 0)[0]).tokens)
        on_progress("autoregressive", (number + 1) / len(work.sources))
    on_progress("acceptance", 0)
    sampling, length, lenience = work.config.sampling, work.config.max_length, work.config.lenience
    betas = alpha_on_target_text(work.pair, work.sources, texts, sampling, length, lenience)
    lengths = [len(text) for text in texts]
    on_progress("costs", 0)
    meter = work.meter(gammas, lengths)
    for turn in range(TURNS):
        meter.turn()
        on_progress("costs", (turn + 1) / TURNS)
    alpha = float(np.concatenate(betas).mean(dtype=np.float64))
    return Tuning(alpha, lengths, meter.costs(), operations_ratio(work.pair))


def operations_ratio(pair: Pair) -> float:
    """c-hat, operations a token of the draft over those of the target; 0 for a table.

    Each token meets what a step reads, in two operations a number.
    """
    if not isinstance(pair.draft, TransformerDraft):
        return 0.0

    def numbers(model: FlaxModel) -> int:
        return sum(leaf.size for leaf in read_by_step(abstract_params(model.config)))

    return numbers(pair.draft.model) / numbers(pair.target)


def predict(alpha: float, gamma: int, costs: Costs, lengths: Sequence[int]) -> float:
    """The speed-up that measured costs promise for texts of given lengths."""
    return theory.predicted_speedup(
        alpha,
        gamma,
        costs.c(gamma),
        costs.verify_cost(gamma),
        lengths,
        costs.ms_prefill_target / costs.ms_target_step,
        costs.ms_prefill_draft / costs.ms_target_step,
    )
