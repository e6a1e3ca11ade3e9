"""The settings of a generation, the same in Python and on the command line.

The command line reads their names and defaults before importing JAX, which their checks need.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from speculative import checks

if TYPE_CHECKING:
    from speculative.decoding import Decoding, Rule
    from speculative.processors import Processor

P = ParamSpec("P")
Of = TypeVar("Of")
Text = TypeVar("Text")
Found = TypeVar("Found")

MAX_STOP = 256  # The most characters of a stop string.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How texts are decoded; a value of the wrong type or out of range raises ValueError.

    Attributes:
        gamma: guesses per step; 0 decodes with the target alone. For a tree, its depth.
        temperature: 0 is argmax; `Sampling` describes this and the next three.
        top_k: how many of the likeliest tokens are kept; 0 keeps all.
        top_p: the mass of the tokens kept, in (0, 1].
        min_p: the least probability of the tokens kept, as a share of the greatest.
        verification: how guesses are verified: a rule or a name in `decoding.rules.RULES`.
        tree: guesses in a step's tree, which may hold several for one position; 0 is a chain.
        lenience: for a rule given by name; below 1, outputs are faster but not exact (A.5).
        max_length: the number of tokens at which an output is cut.
        seed: the seed of all random numbers.
        example: the number of the first text, from which those of the others follow; with the seed,
            it determines a text's random numbers.
        source_length: the number of tokens to which a longer source or prompt is cut; None reads
            all of it.
        stop: strings that end a text, which is cut before the first of them; its tokens run up to
            the one that completed the string.
        show_special: whether texts show special tokens such as sentinels; a stop string may have
            them either way.
        logprobs: whether the log-probabilities of the tokens are kept.
        processors: callables that change the logits of target and draft by the text so far.
        batch_size: the most texts that are decoded together, each as if alone.
    """

    gamma: int = 5
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    verification: "str | Rule" = "token"
    tree: int = 0
    lenience: float = 1.0
    max_length: int = 128
    seed: int = 0
    example: int = 0
    source_length: int | None = None
    stop: Sequence[str] = ()
    show_special: bool = False
    logprobs: bool = False
    processors: "Sequence[Processor]" = ()
    batch_size: int = 16

    def __post_init__(self) -> None:
        for name, low, high in (
            ("gamma", 0, checks.MAX_GAMMA),
            ("seed", 0, 2**32 - 1),
            ("example", 0, 2**31 - 1),
            ("batch_size", 1, None),
        ):
            object.__setattr__(self, name, checks.whole(name, getattr(self, name), low, high))
        if self.source_length is not None:
            checks.whole("source_length", self.source_length, 1, checks.MAX_TOKENS)
        checks.instance("show_special", self.show_special, bool)
        for name in ("stop", "processors"):
            checks.instance(name, getattr(self, name), list, tuple)
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for end in self.stop:
            if not 1 <= len(checks.text("A stop string", end)) <= MAX_STOP:
                raise ValueError(
                    f"A stop string must have 1 to {MAX_STOP} characters, not {len(end)}."
                )
        self.decoding(1, ())  # This checks the other fields.

    @functools.cached_property
    def rule(self) -> "Rule":
        """How guesses are verified."""
        from speculative.decoding import Rule, rules

        if not isinstance(self.verification, Rule):
            return rules.select(self.verification, self.lenience)
        if self.lenience != 1:
            raise ValueError(
                f"lenience = {self.lenience} is for rules selected by name; give it to the rule "
                f"itself, as in Token({self.lenience})."
            )
        return self.verification

    def decoding(self, vocab_size: int, eos_ids: tuple[int, ...]) -> "Decoding":
        """The settings of the loop, for a vocabulary's size and end-of-sequence tokens."""
        from speculative.decoding import Decoding
        from speculative.sampling import Sampling

        sampling = Sampling(self.temperature, self.top_k, self.top_p, self.min_p)
        rule = self.rule if self.gamma else self.rule.alone
        if self.tree:
            rule.require_trees(sampling)
        return Decoding(
            vocab_size,
            sampling,
            self.gamma,
            self.max_length,
            eos_ids,
            rule,
            self.logprobs,
            tuple(self.processors),
            tree=self.tree,
        )


class _ByName(Generic[P]):
    """Replaces a method's last argument, `Settings`, by its fields, which callers give by name.

    Editors and `help` show all of them, and they are declared in one place.
    """

    def __init__(self, settings: Callable[P, Settings]) -> None:
        self._settings = settings

    @overload
    def __call__(
        self, method: Callable[[Of, Text, Settings], Found]
    ) -> Callable[Concatenate[Of, Text, P], Found]: ...

    @overload
    def __call__(
        self, method: Callable[[Of, Text, int, Settings], Found]
    ) -> Callable[Concatenate[Of, Text, int, P], Found]: ...

    def __call__(self, method: Callable[..., Any]) -> Callable[..., Any]:
        shown = inspect.signature(method)
        first = [*shown.parameters.values()][:-1]
        fields = inspect.signature(Settings).parameters.values()

        @functools.wraps(method)
        def by_name(*positional: Any, **named: Any) -> Any:
            own = {one.name: named.pop(one.name) for one in first if one.name in named}
            return method(*positional, **own, settings=Settings(**named))

        vars(by_name)["__signature__"] = shown.replace(parameters=[*first, *fields])
        return by_name


by_name = _ByName(Settings)
