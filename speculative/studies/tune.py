"""The best number of guesses per step, by measured alpha, c and v; or why speculation is slower.

If trees of guesses can be verified, it also finds the best tree, from how often the target's token
is the draft's first, second, ... choice, and from the costs of passes over trees.
"""

import dataclasses

import numpy as np
from jax import Array

from speculative import theory
from speculative.measurement.alpha import alpha_on_target_text
from speculative.measurement.blocks import tokens_on_target_text
from speculative.measurement.ranks import shares_on_target_text
from speculative.measurement.timing import TURNS, Costs
from speculative.progress import OnProgress
from speculative.rows.workload import Workload
from speculative.tree import Growth

GAMMAS: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 8, 10)  # Numbers of guesses that are compared.


TREES: tuple[int, ...] = (15, 31, 63)  # Numbers of guesses in the trees that are compared.
DEPTH = 7  # The depth of the trees that are timed; a level costs the same in others.


@dataclasses.dataclass(frozen=True)
class TreeTuning:
    """A tree of `nodes` guesses at its best depth, with its yield and its costs."""

    nodes: int
    gamma: int
    tokens: float  # Expected per target call.
    c: float  # The time of growing a level, over that of a target step.
    verify_cost: float
    predicted: float  # Speed-up for texts of the measured lengths.


@dataclasses.dataclass(frozen=True)
class Tuning:
    """The measurements that decide which gamma is best, and the speed-ups that follow."""

    alpha: float  # Acceptance rate on the target's own text.
    lengths: list[int]  # Tokens of the outputs.
    costs: Costs  # The costs of every kind of step, for the gammas that were timed.
    # The expected tokens per target call, by gamma; None is Eq. 1's.
    tokens: dict[int, float] | None = None
    trees: tuple[TreeTuning, ...] = ()

    def tokens_per_call(self, gamma: int) -> float:
        """The expected tokens per target call."""
        return self.tokens[gamma] if self.tokens else theory.expected_tokens(self.alpha, gamma)

    def _rate(self, gamma: int) -> float:
        return theory.acceptance_rate(self.tokens[gamma], gamma) if self.tokens else self.alpha

    @property
    def gammas(self) -> list[int]:
        """The numbers of guesses that were timed."""
        return sorted(self.costs.ms_verify)

    def expected(self, gamma: int) -> float:
        """The speed-up by Theorem 3.8, which takes a wide pass to cost the same as a narrow one."""
        return theory.speedup(self._rate(gamma), gamma, self.costs.c(gamma))

    def predicted(self, gamma: int) -> float:
        """The speed-up predicted from all measured costs for texts of these lengths."""
        return self.costs.speedup(self._rate(gamma), gamma, self.lengths)

    @property
    def gamma(self) -> int:
        """The gamma of the largest predicted speed-up."""
        return max(self.gammas, key=self.predicted)

    @property
    def tree(self) -> TreeTuning | None:
        """The best tree, if it promises more than the best chain."""
        best = max(self.trees, key=lambda one: one.predicted, default=None)
        return best if best and best.predicted > self.predicted(self.gamma) else None

    def why_not(self) -> str | None:
        """A sentence on why speculation will not be faster, to two digits; None if it will be."""
        gamma, costs = self.gamma, self.costs
        if round(self.predicted(gamma), 2) > 1 or self.tree and round(self.tree.predicted, 2) > 1:
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
                f"the cost of encoding for both models, {prefill:.1f} ms or "
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
    trees = _trees(work, sources, texts, batch_size, on_progress)
    on_progress("compiling", 0)
    meter = work.meter(GAMMAS, lengths)
    for turn in range(TURNS):
        on_progress("timing", turn / TURNS)
        meter.turn()
    alpha = float(np.concatenate(betas).mean(dtype=np.float64))
    tokens = dict(zip(GAMMAS, np.concatenate(blocks).mean(axis=0), strict=True)) if blocks else None
    return Tuning(alpha, lengths, meter.costs(), tokens, trees)


def _trees(
    work: Workload,
    sources: list[Array],
    texts: list[list[int]],
    batch_size: int,
    on_progress: OnProgress,
) -> tuple[TreeTuning, ...]:
    """The best depth of trees of each size; none if the draft or the rule has only chains."""
    config, draft = work.config, work.pair.draft
    if not (draft.grows and config.rule.verifies_trees(config.sampling)):
        return ()
    decoding = work.decoding(DEPTH)
    draws = [work.request(number, 0).draws for number in range(len(sources))]
    inputs = work.pair, sources, texts, draws, decoding, batch_size
    shares, best = shares_on_target_text(*inputs), []
    lengths = [len(text) for text in texts]
    for number, nodes in enumerate(TREES):
        on_progress("timing trees", number / len(TREES))
        of_tree = dataclasses.replace(config, tree=nodes, gamma=DEPTH)
        meter = dataclasses.replace(work, config=of_tree).meter((DEPTH,), lengths)
        for _ in range(TURNS):
            meter.turn()
        costs = meter.costs()
        c, v = costs.c(DEPTH), costs.verify_cost(DEPTH)
        step = costs.ms_target_step
        prefill = costs.ms_prefill_target / step, costs.ms_prefill_draft / step
        depths = []
        for gamma in range(1, min(nodes, 2 * DEPTH) + 1):
            if nodes <= Growth.most(gamma):
                tokens = theory.tree_tokens(
                    theory.best_tree(shares.tolist(), nodes, gamma, Growth.WIDTH)
                )
                rate = theory.acceptance_rate(tokens, gamma)
                speedup = theory.predicted_speedup(rate, gamma, c, v, lengths, *prefill)
                depths.append(TreeTuning(nodes, gamma, tokens, c, v, speedup))
        best.append(max(depths, key=lambda one: one.predicted))
    return tuple(best)
