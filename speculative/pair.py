"""A target and its draft, ready to decode text."""

import bisect
import dataclasses
import itertools
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar, overload

import jax
import numpy as np
from jax import Array

from speculative import checks
from speculative.decoding import Decoding, Output, Params, Rule, loop, queue, reference, rules
from speculative.decoding.loop import Step
from speculative.decoding.reference import Trace
from speculative.drafts import Draft
from speculative.drafts.base import FAULTS
from speculative.models import FlaxModel
from speculative.processors import Processor
from speculative.ragged import power_of_two
from speculative.sampling import Kinds, Sampling
from speculative.vocabulary import Vocabulary

Texts = str | list[str]
OutputOrStep = TypeVar("OutputOrStep", Output, Step)

BATCH = 16  # Texts that are decoded together, where there are as many.
MAX_STOP = 256  # Characters of a stop string.

# Sources are padded to one of these lengths, because each length is a compiled program.
SOURCE_LENGTHS = (32, 64, 128, 256, 512)


@dataclasses.dataclass(frozen=True)
class Result:
    """A decoded text: its tokens with the end of sequence, and counts as of `Output`.

    Attributes:
        text: what the tokens say.
        tokens: with the end of sequence.
        target_calls: passes of the target.
        draft_tokens: guesses proposed.
        tested_by_position: guesses tested at positions 1 to gamma of a step: the accepted ones and
            the first that was rejected.
        accepted_by_position: guesses accepted there, before the text's end.
        finish_reason: "stop" if the end of sequence or a stop string ended it, "length" if
            `max_length` did.
        logprobs: of the tokens, as `sampling.log_probabilities`; None if they were not asked for.
    """

    text: str
    tokens: list[int]
    target_calls: int
    draft_tokens: int
    tested_by_position: list[int]
    accepted_by_position: list[int]
    finish_reason: str = "stop"
    logprobs: list[float] | None = None

    @property
    def tested(self) -> int:
        """Guesses tested."""
        return sum(self.tested_by_position)

    @property
    def accepted(self) -> int:
        """Guesses accepted."""
        return sum(self.accepted_by_position)

    @property
    def accepted_lengths(self) -> list[int]:
        """The steps in which 0 to gamma guesses were accepted."""
        return lengths_accepted(self.target_calls, self.accepted_by_position)

    @property
    def tokens_per_call(self) -> float:
        """The mean, which Equation 1 of the paper predicts."""
        return len(self.tokens) / self.target_calls


def lengths_accepted(target_calls: int, accepted_by_position: Sequence[int]) -> list[int]:
    """The steps in which 0 to gamma guesses were accepted, from how many reached each position."""
    reached = [target_calls, *accepted_by_position, 0]
    return [more - fewer for more, fewer in itertools.pairwise(reached)]


def checked_stop(stop: Sequence[str]) -> tuple[str, ...]:
    """Stop strings, each of 1 to `MAX_STOP` characters; others raise ValueError."""
    checks.instance("stop", stop, list, tuple)
    for end in stop:
        if not 1 <= len(checks.text("A stop string", end)) <= MAX_STOP:
            raise ValueError(f"A stop string must have 1 to {MAX_STOP} characters, not {len(end)}.")
    return tuple(stop)


def padded(tokens: int) -> int:
    """The one of `SOURCE_LENGTHS` to which a source of so many tokens is padded, or is cut."""
    return next((size for size in SOURCE_LENGTHS if tokens <= size), SOURCE_LENGTHS[-1])


def number_of(example: int, sample: int) -> int:
    """What the random numbers of an example's sample, up to `checks.MAX_SAMPLES`, belong to.

    Sample 0 is the text of `Pair.generate`.
    """
    return checks.whole("example", example + sample * 2**20, 0, 2**31)


class Request(NamedTuple):
    """A text to decode: its source or prompt [1, S], how, and what its random numbers belong to."""

    source: Array
    config: Decoding
    seed: int = 0
    example: int = 0
    stop: tuple[str, ...] = ()  # Texts with which it ends, none of them shown.

    @property
    def draws(self) -> Array:
        """The text's random numbers, of `Decoding.draws`."""
        return self.config.draws(self.seed, np.array([self.example]))

    @property
    def alone(self) -> "Request":
        """The same text by the target alone."""
        return self._replace(config=self.config.alone)

    def sample(self, number: int) -> "Request":
        """The request of sample `number`; this one is the first; see `number_of`."""
        return self._replace(example=number_of(self.example, number))


@dataclasses.dataclass(frozen=True)
class Pair:
    """Target, draft, their parameters and the vocabulary they share.

    Attributes:
        target: the model whose distribution the outputs have.
        draft: guesses for it.
        params: of both, laid out for decoding.
        vocabulary: of both.
        names: of target and draft, as the user gave them.
        training_minutes: what it took to train the draft, if that is known.
    """

    target: FlaxModel
    draft: Draft
    params: Params
    vocabulary: Vocabulary
    names: tuple[str, str]
    training_minutes: float | None = None

    def encode(self, texts: Texts, truncate: bool = False) -> Array:
        """The sources or prompts [B, S] of a text or several, padded to one of `SOURCE_LENGTHS`.

        Raises:
            ValueError: there is no text, one is not UTF-8 or longer than the limit and not to be
                truncated, or a source is empty (a prompt may be).
        """
        listed = texts if isinstance(texts, list | tuple) else [texts]
        if not listed:
            raise ValueError("There is no text to decode; give one, or a list of them.")
        rows = [self._tokens(text, truncate) for text in listed]
        return self._filled(rows)

    def row(self, tokens: Sequence[int]) -> Array:
        """A source or prompt [1, S] of these tokens, padded to one of `SOURCE_LENGTHS`."""
        return self._filled([tokens])

    def _filled(self, rows: Sequence[Sequence[int] | np.ndarray]) -> Array:
        """Rows [B, S] as wide as the longest needs."""
        size, pad = padded(max(map(len, rows))), self.target.pad_id
        filled = [np.pad(row, (0, size - len(row)), constant_values=pad) for row in rows]
        return jax.device_put(np.array(filled, np.int32))  # jnp.asarray compiles for each shape.

    def _tokens(self, text: str, truncate: bool) -> np.ndarray:
        """A source or prompt [length], of at most the largest of `SOURCE_LENGTHS`."""
        prompt, limit = self.target.decoder_only, SOURCE_LENGTHS[-1]
        if not checks.text("The prompt", text).strip() and not prompt:
            raise ValueError("The prompt is empty; give a text to decode.")
        tokens = self.vocabulary.prompt(text) if prompt else self.vocabulary.encode(text)
        if len(tokens) <= limit:
            return tokens
        if not truncate:
            raise ValueError(
                f"The prompt has {len(tokens)} tokens, the limit is {limit}; shorten it, or have "
                "it cut (--truncate, or truncate=True)."
            )
        # A prompt keeps its last tokens; a source its first ones and the end of sequence.
        return tokens[-limit:] if prompt else np.append(tokens[: limit - 1], tokens[-1])

    def decoding(
        self,
        gamma: int = 5,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        max_length: int = 128,
        lenience: float = 1.0,
        verification: str | Rule = "token",
        logprobs: bool = False,
        processors: Sequence[Processor] = (),
    ) -> Decoding:
        """The settings of a generation, checked; `Sampling` and `Decoding` describe them.

        Temperature 0 is argmax; gamma 0 decodes with the target alone. `verification` is a rule or
        a name of `decoding.rules.RULES`; with a `lenience` below 1, outputs are not exact but
        faster (A.5). `processors` change the logits of target and draft by the text so far
        (`speculative.processors`).

        Raises:
            ValueError: a value outside its range.
        """
        checks.instance("processors", processors, list, tuple)
        rule = verification
        if not isinstance(rule, Rule):
            rule = rules.select(rule, lenience)
        elif lenience != 1:
            raise ValueError(
                f"lenience = {lenience} is not for a rule that is given; give it to the rule "
                f"itself, as in Token({lenience})."
            )
        return Decoding(
            self.vocabulary.size,
            Sampling(temperature, top_k, top_p, min_p),
            checks.whole("gamma", gamma, 0, checks.MAX_GAMMA),
            max_length,
            self.vocabulary.eos_id,
            rule if gamma else rules.EXACT,
            logprobs,
            tuple(processors),
        )

    @overload
    def generate(
        self, texts: str, *given: Any, batch_size: int = BATCH, **settings: Any
    ) -> Result: ...

    @overload
    def generate(
        self, texts: list[str], *given: Any, batch_size: int = BATCH, **settings: Any
    ) -> list[Result]: ...

    def generate(
        self, texts: Texts, *given: Any, batch_size: int = BATCH, **settings: Any
    ) -> Result | list[Result]:
        """Decodes a text, or several, of which `batch_size` at a time share passes of the models.

        Each is decoded as it would be alone: see `decoding.queue`. The other arguments are those of
        `requests`.
        """
        if isinstance(texts, list | tuple):
            return self.decode_all(self.requests(texts, *given, **settings), batch_size)
        return self.answer(self.requests([texts], *given, **settings)[0])

    def answer(self, request: Request) -> Result:
        """The result of one request."""
        if request.stop:
            return self.decode_all([request], 1)[0]
        return self.results(self.run(request.source, request.draws, request.config))[0]

    def samples(
        self, text: str, count: int, *given: Any, batch_size: int = BATCH, **settings: Any
    ) -> list[Result]:
        """So many samples of a text, which is read once; the first is what `generate` gives."""
        count = checks.whole("count", count, 1, checks.MAX_SAMPLES)
        (one,) = self.requests([text], *given, **settings)
        return self.decode_all([one.sample(i) for i in range(count)], batch_size)

    def decode_all(self, requests: Sequence[Request], batch_size: int = BATCH) -> list[Result]:
        """The results of `serve` in the order of the requests."""
        results = dict(self.serve(requests, batch_size))
        return [results[place] for place in range(len(requests))]

    def requests(
        self,
        texts: Sequence[str],
        seed: int = 0,
        example: int = 0,
        truncate: bool = False,
        stop: Sequence[str] = (),
        **settings: Any,
    ) -> list[Request]:
        """What `serve` is asked for by texts, equal ones of which are read once.

        Args:
            texts: sources, with their task's prefix, or prompts.
            seed: of all random numbers.
            example: number of the first text in its task; each has random numbers of its own.
            truncate: cut a source that is too long, instead of an error.
            stop: a text ends where it contains one of these, and is cut before it; its tokens are
                those up to the one that completed it.
            **settings: of `decoding`.

        Raises:
            ValueError: as `encode` and `decoding`, a stop string is empty or too long, or target or
                draft has too few positions.
        """
        config, stop = self.decoding(**settings), checked_stop(stop)
        if not texts:
            raise ValueError("There is no text to decode; give one, or a list of them.")
        seed = checks.whole("seed", seed, 0, 2**32 - 1)
        first = checks.whole("example", example, 0, 2**31 - len(texts))
        sources: dict[str, Array] = {}
        for text in texts:
            if checks.text("The prompt", text) not in sources:
                sources[text] = self.encode(text, truncate)
                self._require_positions(sources[text], config)
        return [
            Request(sources[text], config, seed, first + i, stop) for i, text in enumerate(texts)
        ]

    def serve(
        self, requests: Sequence[Request], batch_size: int = BATCH
    ) -> Iterator[tuple[int, Result]]:
        """Decodes requests in batches, and gives the place of each, and its result, as it ends.

        Those with sources of one width and settings of one program share batches, whatever their
        temperatures, top-k, top-p, min-p and limits.

        Raises:
            ValueError: target or draft has too few positions, or as `results`.
        """
        batch_size = checks.whole("batch_size", batch_size, 1)
        # By what they share, and then by source, so that each is read once.
        groups: dict[tuple[int, Hashable], dict[int, list[int]]] = {}
        for place, request in enumerate(requests):
            self._require_positions(request.source, request.config)
            shared = request.source.shape[1], request.config.program
            groups.setdefault(shared, {}).setdefault(id(request.source), []).append(place)

        def length(same: list[int]) -> int:
            source = np.asarray(requests[same[0]].source)
            return int((source != self.target.pad_id).sum())

        def texts(places: list[int]) -> Iterator[queue.Text]:
            for place in places:
                one = requests[place]
                yield queue.Text(place, one.source, one.draws, one.config)

        def ends(place: int, tokens: list[int]) -> bool:
            text, stop = self.vocabulary.decode(tokens), requests[place].stop
            return any(end in text for end in stop)

        def decoded() -> Iterator[tuple[int, Result]]:
            models = self.target, self.draft, self.params
            for shared in sorted(groups, key=lambda shared: -shared[0]):
                # Long sources tend to have long outputs, which had better not begin last.
                ordered = sorted(groups[shared].values(), key=length, reverse=True)
                places = [place for same in ordered for place in same]
                rows = min(batch_size, power_of_two(len(places)))
                stops = any(requests[place].stop for place in places)
                kinds = Kinds.of(requests[place].config.sampling for place in places)
                given = texts(places), kinds, rows, ends if stops else None
                for place, output in queue.generate(*models, *given):
                    yield place, self._cut(self.results(output)[0], requests[place].stop)

        return decoded()  # This itself is no generator, so that it raises when it is called.

    def run(self, sources: Array, draws: Array, config: Decoding) -> Output:
        """`decoding.loop.generate` with this pair, for sources [B, S].

        Raises:
            ValueError: target or draft has too few positions.
        """
        self._require_positions(sources, config)
        return loop.generate(self.target, self.draft, self.params, sources, draws, config)

    def results(self, output: Output) -> list[Result]:
        """The rows of an output as texts.

        Raises:
            ValueError: the target's logits were not finite, or the draft broke its contract.
        """
        output = self.sound(jax.device_get(output))
        tested, accepted = np.moveaxis(np.asarray(output.by_position), -1, 0).tolist()
        counts = output.target_calls.tolist(), output.drafted.tolist(), tested, accepted
        results = [
            self._result(tokens[:n].tolist(), *row)
            for tokens, n, *row in zip(output.tokens, output.lengths, *counts, strict=True)
        ]
        if not output.logprobs.size:
            return results
        return [
            dataclasses.replace(result, logprobs=own[: len(result.tokens)].tolist())
            for result, own in zip(results, output.logprobs, strict=True)
        ]

    def _result(
        self, tokens: list[int], calls: int, drafted: int, tested: list[int], accepted: list[int]
    ) -> Result:
        reason = "stop" if tokens[-1] == self.vocabulary.eos_id else "length"
        text = self.vocabulary.decode(tokens)
        return Result(text, tokens, calls, drafted, tested, accepted, reason)

    def _cut(self, result: Result, stop: tuple[str, ...]) -> Result:
        """A result up to the first token with which its text has one of the stop strings."""

        def first(tokens: int) -> tuple[int, str]:
            """The place of a stop string in a text of so many tokens, -1 if there is none."""
            text = self.vocabulary.decode(result.tokens[:tokens])
            return min([at for end in stop if (at := text.find(end)) >= 0], default=-1), text

        if not stop or first(len(result.tokens))[0] < 0:
            return result
        counts = range(len(result.tokens) + 1)
        count = bisect.bisect_left(counts, True, key=lambda count: first(count)[0] >= 0)
        at, text = first(count)
        return dataclasses.replace(
            result,
            text=text[:at],
            tokens=result.tokens[:count],
            finish_reason="stop",
            logprobs=result.logprobs and result.logprobs[:count],
        )

    def _require_positions(self, sources: Array, config: Decoding) -> None:
        needed = sources.shape[1] + config.max_length + config.room
        for name, part in zip(self.names, (self.target, self.draft), strict=True):
            if 0 < (most := part.max_positions) < needed:
                raise ValueError(
                    f"{name} has {most} positions, but a prompt of up to {sources.shape[1]} tokens "
                    f"with max_length = {config.max_length} and gamma = {config.gamma} needs "
                    f"{needed}; shorten one of them."
                )

    def sound(self, result: OutputOrStep) -> OutputOrStep:
        """The result; ValueError if the target's logits are not finite or the draft has a fault."""
        if not np.all(result.finite):
            raise ValueError(
                f"The logits of {self.names[0]} are not finite: its weights are damaged, its "
                "dtype is too narrow for it, or a processor gives NaN or forbids every token."
            )
        if fault := int(np.max(result.fault)):
            raise ValueError(
                f"The draft {self.names[1]} {FAULTS[fault]}: its weights are damaged, its dtype is "
                "too narrow for it, or it breaks the contract of drafts (Pair.check tells where). "
                "Take another draft."
            )
        return result

    def check(self, text: str, *given: Any, **settings: Any) -> Trace:
        """Checks a new draft: decodes with the reference loop, which tests every proposal.

        Raises:
            ValueError: a proposal breaks the draft's contract (the message names the step), or the
                fast path gives other tokens from the same random numbers.
        """
        (one,) = self.requests([text], *given, **settings)
        row, numbers = np.asarray(one.source)[0], np.asarray(one.draws)[0]
        found = reference.generate(self.target, self.draft, self.params, row, numbers, one.config)
        fast = self.answer(one).tokens
        if fast != found.tokens:
            pairs = itertools.zip_longest(fast, found.tokens)
            number = next(i for i, (a, b) in enumerate(pairs, 1) if a != b)
            raise ValueError(
                f"Token {number} of the fast path is not that of the reference loop: the draft "
                "proposes other tokens when compiled into the loop, or rounding decided a tie."
            )
        return found

    def stream(self, text: str, *given: Any, **settings: Any) -> Iterator[Step]:
        """Decodes like `generate`, and yields every `decoding.loop.Step`."""
        return self.steps(self.requests([text], *given, **settings)[0])

    def steps(self, request: Request) -> Iterator[Step]:
        """The steps of a request, up to the one with which its text has a stop string."""
        self._require_positions(request.source, request.config)
        models, given = (self.target, self.draft, self.params), (request.draws, request.config)
        steps = loop.stream(*models, request.source, *given)

        def until_it_stops() -> Iterator[Step]:
            tokens: list[int] = []
            for step in map(self.sound, steps):
                yield step
                if request.stop:
                    tokens += step.tokens[0, : step.count[0]].tolist()
                    text = self.vocabulary.decode(tokens)
                    if any(end in text for end in request.stop):
                        return

        return until_it_stops()

    def collect(self, steps: Iterable[Step], stop: tuple[str, ...] = ()) -> Result:
        """The result of streaming one text, which is that of `generate`."""
        tokens: list[int] = []
        counts = np.zeros((2, 0), int)
        calls = drafted = 0
        for step in steps:
            count, gamma = int(step.count[0]), step.guesses.shape[1]
            tokens += step.tokens[0, :count].tolist()
            calls += 1
            drafted += gamma
            reached = np.minimum([step.accepted[0] + 1, step.accepted[0]], count)
            of_step = np.arange(gamma) < reached[:, None]
            counts = counts + of_step if counts.size else of_step.astype(int)
        tested, accepted = counts.tolist()
        return self._cut(self._result(tokens, calls, drafted, tested, accepted), stop)
