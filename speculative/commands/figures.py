"""The speed that `generate` reports: of its texts, and compared with decoding without a draft."""

import dataclasses
import operator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from speculative.pair import Pair, Request, Result


class Timed(NamedTuple):
    """A decoded text and the seconds that it took, including prefill but not compilation."""

    result: "Result"
    seconds: float


@dataclasses.dataclass(frozen=True)
class Figures:
    """Sums over texts; `alone` marks the target without a draft, zero if not compared."""

    texts: int = 0
    tokens: int = 0
    target_calls: int = 0
    seconds: float = 0.0
    tokens_alone: int = 0
    seconds_alone: float = 0.0
    greedy: int = 0  # Texts whose tokens were compared both ways,
    equal: int = 0  # those with the same tokens,
    near_ties: int = 0  # and those whose first difference rounding explains.

    def __add__(self, other: "Figures") -> "Figures":
        return Figures(*map(operator.add, dataclasses.astuple(self), dataclasses.astuple(other)))

    def __str__(self) -> str:
        several = f"{self.texts:,} texts: " if self.texts > 1 else ""
        calls = f"{self.target_calls:,} target call{'s' * (self.target_calls > 1)}"
        sentences = [
            f"{several}{_rate(self.tokens, self.seconds)}, {calls} "
            f"({self.tokens / self.target_calls:.2f} tokens per call)."
        ]
        if self.tokens_alone:
            ratio = self.seconds_alone / self.tokens_alone / (self.seconds / self.tokens)
            sentences.append(
                f"Without a draft: {_rate(self.tokens_alone, self.seconds_alone)}, so with it "
                f"{ratio:.2f} times as fast."
            )
        if self.greedy:
            same = "The tokens are the same both ways" if self.equal else "The tokens differ"
            if self.greedy > 1:
                same = f"The tokens are the same both ways for {self.equal} of {self.greedy} texts"
            if self.near_ties:
                same += f"; {self.near_ties} differ by a tie that rounding decides"
            sentences.append(f"{same}.")
        return "\n".join(sentences)


def _rate(tokens: int, seconds: float) -> str:
    return f"{tokens:,} tokens in {seconds:.2f} s ({tokens / seconds:,.1f} a second)"


def figures(pair: "Pair", request: "Request", fast: Timed, alone: Timed | None) -> Figures:
    """The figures of a text; tokens are compared with those without a draft at temperature 0."""
    from speculative.measurement.exactness import compare_greedy

    sums = Figures(1, len(fast.result.tokens), fast.result.target_calls, fast.seconds)
    if alone is None:
        return sums
    tokens = alone.result.tokens, fast.result.tokens
    sums += Figures(tokens_alone=len(tokens[0]), seconds_alone=alone.seconds)
    if not request.config.sampling.greedy:
        return sums
    differs = compare_greedy(pair, request.source, *tokens)
    tie = differs is not None and differs.near_tie
    return sums + Figures(greedy=1, equal=int(differs is None), near_ties=int(tie))
