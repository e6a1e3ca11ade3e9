"""A target and its draft, ready to decode text."""

import bisect
import dataclasses
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, TypeVar, overload

import jax
import numpy as np
from jax import Array

from speculative import checks
from speculative.chat import Message, template
from speculative.decoding import Decoding, Output, Params, loop, queue, tracing
from speculative.decoding.loop import Earlier, Step
from speculative.decoding.queue import Request
from speculative.decoding.tracing import Trace
from speculative.drafts import Draft
from speculative.drafts.base import FAULTS, require_grows
from speculative.grouping import filled, groups, padded
from speculative.models import FlaxModel
from speculative.sampling import Kinds
from speculative.settings import Settings, by_name
from speculative.vocabulary import Rendered, Vocabulary

Texts = str | list[str]
OutputOrStep = TypeVar("OutputOrStep", Output, Step)

BATCH = Settings.batch_size


@dataclasses.dataclass(frozen=True)
class Result:
    """A decoded text: its tokens with the end of sequence, and counts as in `Output`.

    Guesses are counted by their positions in a step, 1 to gamma; the tested ones are the accepted
    ones and the first rejected one.
    """

    text: str
    tokens: list[int]
    target_calls: int  # Passes of the target.
    draft_tokens: int  # Guesses proposed.
    tested_by_position: list[int]
    accepted_by_position: list[int]  # Before the text's end.
    finish_reason: str = "stop"  # End of sequence or a stop string; "length" is `max_length`.
    logprobs: list[float] | None = None  # See `sampling.log_probabilities`; if requested.
    # For trees, the accepted ones by position and by rank among the successors of one token.
    accepted_by_rank: list[list[int]] | None = None

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
        """The numbers of steps in which 0, 1, ... gamma guesses were accepted."""
        return lengths_accepted(self.target_calls, self.accepted_by_position)

    @property
    def tokens_per_call(self) -> float:
        """The mean number of tokens per target call, which the paper's Equation 1 predicts."""
        return len(self.tokens) / self.target_calls


def require_positions(
    models: Iterable[tuple[str, int]], source: int, max_length: int, prompts: bool
) -> None:
    """Raises ValueError if one of the models (name, limit or 0) has too few positions.

    A prompt's positions go on in the output; an encoder's source has its own.
    """
    # The last token is not read; the logits of guesses beyond it do not matter.
    needed = source + max_length - 1 if prompts else max(source, max_length)
    kind = "prompt" if prompts else "source"
    for name, most in models:
        if 0 < most < needed:
            raise ValueError(
                f"{name} has {most} positions, but a {kind} of {source} tokens with max_length "
                f"= {max_length} needs {needed}; shorten one of them."
            )


def lengths_accepted(target_calls: int, accepted_by_position: Sequence[int]) -> list[int]:
    """The numbers of steps in which 0, 1, ... gamma guesses were accepted."""
    reached = [target_calls, *accepted_by_position, 0]
    return [more - fewer for more, fewer in itertools.pairwise(reached)]


@dataclasses.dataclass(frozen=True)
class Pair:
    """Target, draft, their parameters and the vocabulary they share."""

    target: FlaxModel  # Outputs have its distribution.
    draft: Draft
    params: Params  # Both models' parameters, laid out for decoding.
    vocabulary: Vocabulary
    names: tuple[str, str]  # The target's and the draft's, as the user gave them.
    training_minutes: float | None = None  # The draft's training time, if known.

    def encode(self, texts: Texts, source_length: int | None = None) -> Array:
        """Encodes one or several texts as sources or prompts [B, S], padded to a power of two.

        A longer text is cut to `source_length` tokens: a prompt keeps its last ones, a source its
        first ones and the end of sequence.

        Raises:
            ValueError: there is no text, one is not UTF-8 or has more than 100,000 tokens, or a
                source is empty (a prompt may be).
        """
        listed = texts if isinstance(texts, list | tuple) else [texts]
        if not listed:
            raise ValueError("There is no text to decode; give one, or a list of them.")
        if source_length is not None:
            checks.whole("source_length", source_length, 1, checks.MAX_TOKENS)
        prompts, limit, rows = self.target.decoder_only, source_length or checks.MAX_TOKENS, []
        for text in listed:
            if not checks.text("The prompt", text).strip() and not prompts:
                raise ValueError("The prompt is empty; give a text to decode.")
            tokens = self._read(text)
            if len(tokens) > limit:
                if source_length is None:
                    raise ValueError(
                        f"The prompt has {len(tokens):,} tokens, the limit is {limit:,}; shorten "
                        "it, or have it cut (--source_length, or source_length=)."
                    )
                tokens = tokens[-limit:] if prompts else [*tokens[: limit - 1], tokens[-1]]
            rows.append(tokens)
        # jnp.asarray compiles for each shape.
        return jax.device_put(filled(rows, padded(max(map(len, rows))), self.target.pad_id))

    def truncated(self, texts: Texts, source_length: int | None) -> int:
        """The number of texts that `encode` cuts to `source_length` tokens."""
        if source_length is None:
            return 0
        listed = texts if isinstance(texts, list | tuple) else [texts]
        return sum(len(self._read(text)) > source_length for text in listed)

    @property
    def _read(self) -> Callable[[str], np.ndarray]:
        """The function that turns a text into tokens."""
        return self.vocabulary.prompt if self.target.decoder_only else self.vocabulary.encode

    @overload
    @by_name
    def generate(self, texts: str, settings: Settings) -> Result: ...

    @overload
    @by_name
    def generate(self, texts: list[str], settings: Settings) -> list[Result]: ...

    @by_name
    def generate(self, texts: Texts, settings: Settings) -> Result | list[Result]:
        """Decodes a text, or several; `batch_size` texts at a time share passes of the models.

        Each is decoded as it would be alone: see `decoding.queue`. Raises ValueError if a setting
        has the wrong type or range, or for the reasons that `requests` and `results` name.
        """
        if isinstance(texts, list | tuple):
            return self.decode_all(self.requests(texts, settings), batch_size=settings.batch_size)
        return self.answer(self.requests([texts], settings)[0])

    @by_name
    def chat(self, messages: Sequence[Message], settings: Settings) -> Result:
        """The target's answer to the messages of a chat, by its template; see `generate`.

        ValueError is also raised if it has no template, or the template rejects the messages.
        """
        return self.answer(self.requests([self.rendered(messages)], settings)[0])

    def rendered(self, messages: Sequence[Message]) -> Rendered:
        """Renders a chat as a prompt, for `generate` and all other methods that take texts."""
        return template(self.vocabulary.special, self.names[0])(messages)

    @by_name
    def samples(self, text: str, count: int, settings: Settings) -> list[Result]:
        """Draws `count` samples of a text, which is read once; the first is that of `generate`."""
        count = checks.whole("count", count, 1, checks.MAX_SAMPLES)
        (one,) = self.requests([text], settings)
        each = [one.sample(i) for i in range(count)]
        return self.decode_all(each, batch_size=settings.batch_size)

    @by_name
    def stream(self, text: str, settings: Settings) -> Iterator[Step]:
        """Decodes like `generate`, and yields every `decoding.loop.Step`."""
        return self.steps(self.requests([text], settings)[0])

    @by_name
    def check(self, text: str, settings: Settings) -> Trace:
        """Checks a new draft: decodes with the traced loop, which tests every proposal.

        Raises:
            ValueError: a proposal breaks the draft's contract (the message names the step), or the
                fast path gives other tokens from the same random numbers.
        """
        (one,) = self.requests([text], settings)
        row, numbers = np.asarray(one.source)[0], np.asarray(one.draws)[0]
        trace = tracing.generate(self.target, self.draft, self.params, row, numbers, one.config)
        fast = self.answer(one).tokens
        if fast != trace.tokens:
            pairs = itertools.zip_longest(fast, trace.tokens)
            number = next(i for i, (a, b) in enumerate(pairs, 1) if a != b)
            raise ValueError(
                f"Token {number} of the fast path is not that of the traced loop: the draft "
                "proposes other tokens when compiled into the loop, or rounding decided a tie."
            )
        return trace

    def requests(self, texts: Sequence[str], settings: Settings) -> list[Request]:
        """The requests to `serve` for texts; equal texts are read once.

        Raises ValueError for the reasons that `encode` names, or if target or draft has too few
        positions; with several texts, the message says which one.
        """
        if not texts:
            raise ValueError("There is no text to decode; give one, or a list of them.")
        config = settings.decoding(self.vocabulary.size, self.vocabulary.eos_ids)
        first = checks.whole("example", settings.example, 0, 2**31 - len(texts))
        sources: dict[str, Array] = {}
        for number, text in enumerate(texts, 1):
            try:
                if checks.text("The prompt", text) in sources:
                    continue
                source = self.encode(text, settings.source_length)
                self._require_fit(source, config)
            except ValueError as error:
                place = f"Text {number} of {len(texts)}: " if len(texts) > 1 else ""
                raise ValueError(f"{place}{error}") from error
            sources[text] = source
        seed, stop = settings.seed, tuple(settings.stop)
        shown = stop, settings.show_special
        return [
            Request(sources[text], config, seed, first + i, *shown) for i, text in enumerate(texts)
        ]

    def decode_all(self, requests: Sequence[Request], *, batch_size: int = BATCH) -> list[Result]:
        """The results of `serve` in the order of the requests."""
        results = dict(self.serve(requests, batch_size=batch_size))
        return [results[place] for place in range(len(requests))]

    def serve(
        self, requests: Sequence[Request], *, batch_size: int = BATCH
    ) -> Iterator[tuple[int, Result]]:
        """Decodes requests in batches, and yields the place and result of each as it ends.

        Requests share batches if their sources have the same width and their settings the same
        `Decoding.program`; temperatures, top-k, top-p, min-p and limits may differ. Raises
        ValueError for the reasons that `run` and `results` name.
        """
        batch_size = checks.whole("batch_size", batch_size, 1)
        order: dict[int, tuple[int, int, int]] = {}  # By source: each is read once.
        for place, (source, config, *_) in enumerate(requests):
            self._require_fit(source, config)
            if id(source) not in order:
                # Long sources tend to have long outputs, which should not begin last.
                length = int((np.asarray(source) != self.target.pad_id).sum())
                order[id(source)] = -source.shape[1], -length, place
        numbered = sorted(enumerate(requests), key=lambda item: order[id(item[1].source)])

        def shared(item: tuple[int, Request]) -> tuple[int, Hashable]:
            _, request = item
            return request.source.shape[1], request.config.program

        def ends(place: int, tokens: list[int]) -> int:
            return self._end(tokens, requests[place].stop, requests[place].show_special)

        def decoded() -> Iterator[tuple[int, Result]]:
            models = self.target, self.draft, self.params
            for group, rows in groups(numbered, shared, batch_size):
                kinds = Kinds.of(one.config.sampling for _, one in group)
                ending = ends if any(one.stop for _, one in group) else None
                for place, output in queue.generate(*models, group, kinds, rows, ending):
                    one = requests[place]
                    (result,) = self.results(output, one.show_special)
                    yield place, self._cut(result, one.stop, one.show_special)

        return decoded()  # `serve` is not a generator itself, so that it raises when called.

    def answer(self, request: Request) -> Result:
        """The result of one request, in one dispatch unless it has stop strings."""
        if request.stop:
            return self.decode_all([request], batch_size=1)[0]
        models, params = loop.used(self.target, self.draft, self.params, request.config.gamma)
        output = loop.decode(models, params, request.source, request.draws, request.config)
        return self.results(output, request.show_special)[0]

    def run(self, sources: Array, draws: Array, config: Decoding) -> Output:
        """`decoding.loop.generate` with this pair, for sources [B, S].

        ValueError is raised if target or draft has too few positions.
        """
        self._require_fit(sources, config)
        return loop.generate(self.target, self.draft, self.params, sources, draws, config)

    def results(self, output: Output, show_special: bool = False) -> list[Result]:
        """The rows of an output as texts. Raises ValueError where `sound` does."""
        output = self.sound(jax.device_get(output))
        decoded = []
        for row, length in enumerate(output.lengths):
            tokens = output.tokens[row, :length].tolist()
            tested, *by_rank = np.asarray(output.by_position[row]).T
            result = Result(
                self.vocabulary.decode(tokens, show_special),
                tokens,
                int(output.target_calls[row]),
                int(output.drafted[row]),
                tested.tolist(),
                np.sum(by_rank, axis=0).tolist(),
                finish_reason="stop" if tokens[-1] in self.vocabulary.eos_ids else "length",
                logprobs=output.logprobs[row, :length].tolist() if output.logprobs.size else None,
                accepted_by_rank=np.stack(by_rank, 1).tolist() if len(by_rank) > 1 else None,
            )
            decoded.append(result)
        return decoded

    def _stops(self, tokens: list[int], stop: tuple[str, ...], show_special: bool) -> bool:
        """Whether the text of tokens contains one of the stop strings."""
        return bool(stop) and self.vocabulary.before(stop, tokens, show_special) is not None

    def _end(self, tokens: list[int], stop: tuple[str, ...], show_special: bool) -> int:
        """The number of tokens after which a text first contains a stop string; 0 if it never does.

        Once the first n tokens contain a stop string, so do the first n + 1, so n can be bisected.
        """
        if not self._stops(tokens, stop, show_special):
            return 0
        counts, how = range(len(tokens) + 1), (stop, show_special)
        return bisect.bisect_left(counts, True, key=lambda n: self._stops(tokens[:n], *how))

    def _cut(self, result: Result, stop: tuple[str, ...], show_special: bool) -> Result:
        """Cuts a stop string, which the last token may complete, off the text of a result."""
        text = self.vocabulary.before(stop, result.tokens, show_special) if stop else None
        if text is None:
            return result
        return dataclasses.replace(result, text=text, finish_reason="stop")

    def _require_fit(self, sources: Array, config: Decoding) -> None:
        if config.tree:
            require_grows(self.draft.grows, self.names[1], config.tree)
        parts = zip(self.names, (self.target, self.draft), strict=True)
        limits = [(name, part.max_positions) for name, part in parts]
        if not any(most for _, most in limits):
            return
        longest = int((np.asarray(sources) != self.target.pad_id).sum(axis=1).max())
        require_positions(limits, longest, config.max_length, self.target.decoder_only)

    def sound(self, result: OutputOrStep) -> OutputOrStep:
        """Returns the result; raises ValueError if logits are not finite or the draft is faulty."""
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

    def steps(self, request: Request, earlier: Earlier | None = None) -> Iterator[Step]:
        """The steps of a request, up to the one that completes a stop string.

        If the prompt begins like the `earlier` text, the target reads only the rest; see
        `loop.stream`.
        """
        self._require_fit(request.source, request.config)
        models, how = (self.target, self.draft, self.params), (request.draws, request.config)
        kept = earlier if self.target.decoder_only else None
        steps = loop.stream(*models, request.source, *how, kept)

        def until_it_stops() -> Iterator[Step]:
            tokens: list[int] = []
            for step in map(self.sound, steps):
                yield step
                tokens += step.tokens[0, : step.count[0]].tolist()
                if self._stops(tokens, request.stop, request.show_special):
                    return

        return until_it_stops()

    def collect(
        self, steps: Iterable[Step], stop: tuple[str, ...] = (), show_special: bool = False
    ) -> Result:
        """The result of streaming one text, equal to that of `generate`."""
        tokens: list[int] = []
        drafted, by_step = 0, []
        for step in steps:
            before = len(tokens)
            tokens += step.tokens[0, : step.count[0]].tolist()
            if end := self._end(tokens, stop, show_special):
                tokens = tokens[:end]
            drafted += int(step.drafted[0])
            counted = np.arange(step.by_position.shape[1])[:, None] < len(tokens) - before
            by_step.append(np.where(counted, step.by_position[0], 0))
            if end:
                break
        counts = len(tokens), len(by_step), drafted, np.sum(by_step, axis=0)
        # `steps` has checked that the row is sound; steps have no log-probabilities.
        fields: list[Any] = [np.array([one]) for one in (tokens, *counts, True, 0, ())]
        return self._cut(self.results(Output(*fields), show_special)[0], stop, show_special)
