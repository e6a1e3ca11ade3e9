"""The best number of guesses a step, by measured alpha, c and v; or why speculation is slower."""

import dataclasses

import numpy as np

from speculative import theory
from speculative.measurement.alpha import alpha_on_target_text
from speculative.measurement.blocks import tokens_on_target_text
from speculative.measurement.timing import TURNS, Costs
from speculative.progress import OnProgress
from speculative.rows.workload import Workload

GAMMAS: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 8, 10)  # Numbers of guesses that are compared.


@dataclasses.dataclass(frozen=True)
class Tuning:
    """The measurements that decide which gamma is best, and the speed-ups that follow."""

    alpha: float  # Acceptance rate on the target's own text.
    lengths: list[int]  # Tokens of the outputs.
    costs: Costs  # Of every kind of step, for the gammas that were timed.
    # Those that a target call is expected to yield, by gamma; by default Eq. 1's.
    tokens: dict[int, float] | None = None

    def tokens_per_call(self, gamma: int) -> float:
        """The expected tokens of a target call."""
        return self.tokens[gamma] if self.tokens else theory.expected_tokens(self.alpha, gamma)

    def _rate(self, gamma: int) -> float:
        return theory.acceptance_rate(self.tokens[gamma], gamma) if self.tokens else self.alpha

    @property
    def gammas(self) -> list[int]:
        """Numbers of guesses that were timed."""
        return sorted(self.costs.ms_verify)

    def expected(self, gamma: int) -> float:
        """The speed-up by Theorem 3.8, for which a wide pass costs what a narrow one does."""
        return theory.speedup(self._rate(gamma), gamma, self.costs.c(gamma))

    def predicted(self, gamma: int) -> float:
        """The speed-up that all measured costs promise for texts of these lengths."""
        return self.costs.speedup(self._rate(gamma), gamma, self.lengths)

    @property
    def gamma(self) -> int:
        """The gamma of the largest predicted speed-up."""
        return max(self.gammas, key=self.predicted)

    def why_not(self) -> str | None:
        """Why speculation will not be faster, by two digits, in a sentence; None where it will."""
        gamma, costs = self.gamma, self.costs
        if round(self.predicted(gamma), 2) > 1:
            return None
        c, v = costs.c(gamma), costs.verify_cost(gamma)
        if self.alpha <= c:
            return (
                f"The draft is too slow or too weak: a guess costs c = {c:.2f} of a target step "
                f"and is accepted with probability alpha = {self.alpha:.2f} only (Corollary 3.9)."
            )
        if round(theory.speedup(self._rate(gamma), gamma, c, v), 2) > 1:
            prefill = costs.ms_prefill_target + costs.ms_prefill_draft
            return (
                f"The outputs are too short: {np.mean(self.lengths):.0f} tokens do not win back "
                f"what encoding for both models costs, {prefill:.1f} ms or "
                f"{prefill / costs.ms_target_step:.1f} target steps."
            )
        if round(self.expected(gamma), 2) > 1:
            return (
                f"The wide pass costs too much: verifying {gamma} guesses costs v = {v:.2f} target "
                f"steps, and yields {self.tokens_per_call(gamma):.2f} tokens."
            )
        return (
            f"Too few guesses are accepted for what they cost: alpha = {self.alpha:.2f}, "
            f"c = {c:.2f}, v = {v:.2f}."
        )


def tune(work: Workload, on_progress: OnProgress, batch_size: int) -> Tuning:
    """Measures alpha on all of a workload's sources, in batches, and the costs of each gamma."""
    config, texts, count = work.config, [], len(work.sources)
    for number in range(count):
        on_progress("decoding", number / count)
        texts.append(work.pair.results(work.decode(number, 0)[0])[0].tokens)
    on_progress("scoring", 0)
    decoding, blocks = work.decoding(max(GAMMAS)), []
    sources = [work.source(number) for number in range(count)]
    betas = alpha_on_target_text(work.pair, sources, texts, decoding, batch_size)
    if not config.rule.by_guess:
        for number, text in enumerate(texts):
            on_progress("scoring", number / count)
            of_text = work.pair, sources[number], text, decoding, GAMMAS, (config.rule,)
            blocks.append(tokens_on_target_text(*of_text, config.seed + number)[..., 0])
    lengths = [len(text) for text in texts]
    on_progress("compiling", 0)
    meter = work.meter(GAMMAS, lengths)
    for turn in range(TURNS):
        on_progress("timing", turn / TURNS)
        meter.turn()
    alpha = float(np.concatenate(betas).mean(dtype=np.float64))
    tokens = dict(zip(GAMMAS, np.concatenate(blocks).mean(axis=0), strict=True)) if blocks else None
    return Tuning(alpha, lengths, meter.costs(), tokens)
