"""`generate`: decodes the user's own text, and says how fast it came."""

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from speculative import checks, disk
from speculative.commands import SAMPLING, Command, add_options, many, prompts, rows, whole
from speculative.commands.figures import Figures, Timed, figures

if TYPE_CHECKING:
    from jax import Array

    from speculative.decoding import Decoding
    from speculative.decoding.loop import Step
    from speculative.pair import Pair
    from speculative.vocabulary import Vocabulary

DEFAULTS = SAMPLING | {"verification": "token", "lenience": 1.0}
FOREIGN = 0.1  # The share of characters in no piece from which a warning is given.


def _add_generate(parser: argparse.ArgumentParser) -> None:
    given = parser.add_mutually_exclusive_group()
    given.add_argument(
        "text", nargs="?", help="the prompt; by default lines of standard input, as they come"
    )
    given.add_argument(
        "--file",
        metavar="FILE",
        help="prompts, one a line; in .jsonl, a JSON object with prompt and, for it alone, "
        f"{', '.join(prompts.OWN)}",
    )
    add_options(parser, "--target", "--draft", "--vocabulary", "--dtype", "--max_length")
    add_options(parser, "--seed", seed=0)
    add = parser.add_argument
    add("--task", help="put the prefix of a task before each prompt: debian_ende, debian_synopsis")
    add_options(parser, "--module", "--prefix")
    add_options(parser, "--gamma", *(f"--{name}" for name in DEFAULTS), gamma=5, **DEFAULTS)
    add(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="where an output has this text, it ends before it; may be given several times",
    )
    add("--truncate", action="store_true", help="cut a prompt that is too long")
    add(
        "--logprobs",
        action="store_true",
        help="in JSON, natural logarithms of the probabilities with which the target's tokens are "
        "drawn; at T = 0 of its own distribution",
    )
    several = parser.add_argument_group("many texts")
    add_options(several, "--batch_size", batch_size=1)
    several.add_argument(
        "--samples",
        type=whole(1, checks.MAX_SAMPLES),
        default=1,
        metavar="N",
        help="of each prompt (1)",
    )
    several.add_argument(
        "--output",
        metavar="FILE",
        help="write lines of JSON there as texts end, with numbers of prompts and samples; the "
        "same command goes on with what an interrupted one left",
    )
    add(
        "--compare",
        action="store_true",
        help="decode each text without a draft too, and say how many times as long that takes",
    )
    add(
        "--trace",
        action="store_true",
        help="show what each step accepted, rejected and corrected (Figure 1 of the paper)",
    )
    add(
        "--json",
        action="store_true",
        help=f"a line {{{', '.join(many.FIELDS)}, prompt, finish_reason, seconds, settings}} "
        "each, with --compare also {tokens_autoregressive, seconds_autoregressive}",
    )


def _generate(options: argparse.Namespace) -> None:
    from speculative import progress, tasks
    from speculative.decoding import rules
    from speculative.pair import checked_stop
    from speculative.sampling import Sampling

    sampling = Sampling(**{name: getattr(options, name) for name in SAMPLING})
    rules.select(options.verification, options.lenience)  # Wrong values end here.
    stop = checked_stop(options.stop)
    if options.logprobs and not (options.json or options.output):
        raise ValueError("--logprobs is for lines of JSON; add --json or --output.")
    several = options.batch_size > 1 or options.samples > 1 or options.output is not None
    if several and options.compare:
        raise ValueError("--compare is for one text at a time; leave it or --batch_size out.")
    if options.trace and (several or options.json):
        raise ValueError(
            "--trace is for texts that are shown one at a time; leave it, or --json, --output, "
            "--samples and --batch_size out."
        )
    rows.import_module(options)
    prefix = options.prefix or ""
    if options.task is not None and options.prefix is None:
        prefix = tasks.task(options.task).prefix
    typed, lists = prompts.typed(options), prompts.arriving(options)
    if options.output is not None:
        if typed:
            raise ValueError("--output is for a --file or another program's lines, not for typing.")
        disk.writable(options.output)
        lists = iter([list(itertools.chain.from_iterable(lists))])
    begun = [] if typed else next(lists)  # Wrong input ends before anything is loaded.
    lists = lists if typed else itertools.chain([begun], lists)
    with progress.bar(options.target) as on_progress:
        on_progress("loading", 0)
        pair = _load(options, begun)
    names = (*DEFAULTS, "seed", "max_length", "truncate", "logprobs")
    settings = {name: getattr(options, name) for name in names}
    drafted: dict[str, Any] = settings | {"gamma": options.gamma}
    alone: dict[str, Any] = settings | {"gamma": 0}

    def prepared(prompt: prompts.Prompt, example: int = 0) -> "tuple[Array, Array, Decoding]":
        own: dict[str, Any] = drafted | {"example": example} | prompt.own
        own.pop("stop", None)
        return pair.prepare(prefix + prompt.text, **own)

    lists = _checked(lists, prepared, typed)  # What does not fit the pair ends before its decoding.
    told = {"target": pair.names[0], "draft": pair.names[1], "gamma": options.gamma}
    told |= {name: settings[name] for name in (*DEFAULTS, "max_length", "seed")}
    told |= {"dtype": pair.target.config.dtype, "stop": list(stop)}
    if several:
        first = 0
        for given in lists:
            for number, prompt in enumerate(given, first + 1):
                _warn_of_script(pair.vocabulary, prompt.text, number)
            asked = [many.Asked(prefix + prompt.text, told | prompt.own) for prompt in given]
            _together(pair, asked, first, options, drafted | {"stop": stop})
            first += len(given)
        return
    decoder = Decoder(pair, streams=not options.json)
    if typed:  # Now, so that a first line of usual length is answered at once.
        for way in (drafted, alone) if options.compare else (drafted,):
            decoder.compile("a", **way)
        print(f"Each line is a prompt for {options.target}; Ctrl-D ends.", file=sys.stderr)
    total = Figures()
    for example, prompt in enumerate(itertools.chain.from_iterable(lists)):
        _warn_of_script(pair.vocabulary, prompt.text, example + 1)
        text, show = prefix + prompt.text, _ignore if options.json else _print
        own = {"stop": stop, "example": example} | prompt.own
        fast = decoder.decode(text, show, **drafted | own)
        show("\n")
        compared = None
        if options.compare:
            compared = decoder.decode(text, _ignore, **alone | own)
        if options.json:
            print(_json(text, told | prompt.own, fast, compared), flush=True)
            continue
        inputs = prepared(prompt, example)
        if options.trace:
            from speculative.reporting import tables, traces

            traces.show(traces.trace(pair, text, *inputs), options.gamma, tables.CONSOLE)
        greedy = prompt.own.get("temperature", sampling.temperature) == 0
        found = figures(pair, inputs[0], fast, compared, greedy)
        if typed:
            print(found, file=sys.stderr)
        total += found
    # Where nobody asks or watches, a program that went well leaves standard error empty.
    if total.texts > (1 if typed else 0) and (options.compare or sys.stderr.isatty()):
        print(total, file=sys.stderr)


def _load(options: argparse.Namespace, begun: Sequence[prompts.Prompt]) -> "Pair":
    """The pair, if there is memory for batches of such prompts as these first ones."""
    from speculative.loading import resolve
    from speculative.ragged import power_of_two
    from speculative.rows import memory
    from speculative.rows.config import RowConfig

    found = resolve(options.target, options.draft, options.dtype, options.vocabulary)
    if options.batch_size > 1:
        length = max([options.max_length, *(one.own.get("max_length", 0) for one in begun)])
        target, draft = found.names
        given = {"gamma": options.gamma, "max_length": length, "temperature": 0.0}
        row = RowConfig(task=rows.OWN, prefix="", target=target, draft=draft, **given)
        size = options.batch_size
        if options.file or options.output:  # There are no others.
            size = min(size, power_of_two(len(begun) * options.samples))
        memory.require_batch(row, found.configs, size)
    return found.load()


def _checked(
    lists: Iterator[list[prompts.Prompt]],
    check: Callable[[prompts.Prompt], object],
    typed: bool,
) -> Iterator[list[prompts.Prompt]]:
    """Lists of prompts, each checked as a whole; someone who types may type the next one."""
    for given in lists:
        try:
            for prompt in given:
                check(prompt)
        except ValueError as error:
            if not typed:
                raise
            prompts.complain(error)
            continue
        yield given


def _print(part: str) -> None:
    print(part, end="", flush=True)


def _ignore(part: str) -> None:
    pass


def _warn_of_script(vocabulary: "Vocabulary", prompt: str, number: int) -> None:
    """Warns of a prompt that the vocabulary can only spell out."""
    share = vocabulary.spelled_out(prompt)
    if share >= FOREIGN:
        print(
            f"{share:.0%} of the characters of prompt {number} are unknown pieces or single bytes "
            f"of the vocabulary {vocabulary.path.name}: the models were hardly trained on such "
            "text, so that outputs may be noise.",
            file=sys.stderr,
        )


def _json(prompt: str, told: dict[str, Any], decoded: Timed, alone: Timed | None = None) -> str:
    line = many.line(many.Asked(prompt, told), decoded.result) | {
        "seconds": round(decoded.seconds, 6)
    }
    if alone:
        line["tokens_autoregressive"] = alone.result.tokens
        line["seconds_autoregressive"] = round(alone.seconds, 6)
    return disk.json_line(line)


def _together(
    pair: "Pair",
    given: Sequence[many.Asked],
    first: int,
    options: argparse.Namespace,
    settings: dict[str, Any],
) -> None:
    """Decodes prompts in batches, `first` others having come before; shows their texts in order."""
    places = [(i, sample) for i in range(len(given)) for sample in range(options.samples)]
    if options.output is not None:
        results = many.Results(options.output, given, ["logprobs"] if options.logprobs else [])
        many.into_file(pair, results, places, options.batch_size, **settings)
        print(f"Written: {options.output}, {len(results)} texts.")
        return
    decoded = many.decode(pair, given, places, options.batch_size, first, **settings)
    for (number, sample), result in many.in_order(places, decoded):
        line = many.line(given[number], result) | {"number": first + number, "sample": sample}
        print(disk.json_line(line) if options.json else result.text, flush=True)


class Decoder:
    """Decodes prompts one by one, and times them: prefill included, compilation not."""

    def __init__(self, pair: "Pair", streams: bool):
        """`streams` tells whether texts are shown as they grow, or decoded in one dispatch."""
        self._pair, self._streams = pair, streams
        self._compiled: set[tuple[int, str]] = set()

    def compile(self, prompt: str, stop: Sequence[str] = (), **settings: Any) -> None:
        """Compiles what prompts of such a length need, by decoding this one, if it is new."""
        width = self._pair.encode(prompt, settings["truncate"]).shape[1]
        ignored = "seed", "example", "truncate"
        named = {name: settings[name] for name in sorted(settings) if name not in ignored}
        programs = width, repr((named, bool(stop)))
        if programs not in self._compiled:
            from speculative import progress

            with progress.bar("prompts of such a length") as on_progress:
                on_progress("compiling", 0)
                if self._streams and not stop:
                    self._pair.compile(prompt, **settings)
                else:
                    self._pair.generate(prompt, stop=stop, **settings)
            self._compiled.add(programs)

    def decode(
        self, prompt: str, show: Callable[[str], None], stop: Sequence[str] = (), **settings: Any
    ) -> Timed:
        """The result of a prompt, whose text is shown in parts, and the seconds that it took.

        With stop strings it is shown as a whole, for its last characters may be cut.
        """
        self.compile(prompt, stop, **settings)
        began = time.perf_counter()
        if self._streams and not stop:
            steps, shown = itertools.tee(self._pair.stream(prompt, **settings))
            for part in as_it_grows(self._pair.vocabulary, shown):
                show(part)
            seconds = time.perf_counter() - began
            return Timed(self._pair.collect(steps), seconds)
        result = self._pair.generate(prompt, stop=stop, **settings)
        seconds = time.perf_counter() - began
        show(result.text)
        return Timed(result, seconds)


def as_it_grows(vocabulary: "Vocabulary", steps: Iterable["Step"]) -> Iterator[str]:
    """The text of a streamed generation, in parts that later tokens do not change."""
    tokens: list[int] = []
    shown = text = ""
    for step in steps:
        tokens += step.tokens[0, : step.count[0]].tolist()
        text = vocabulary.decode(tokens)
        # A character cut off after some of its bytes decodes to marks, which more bytes replace.
        final = text.rstrip("\N{REPLACEMENT CHARACTER}")
        yield final[len(shown) :]
        shown = final
    yield text[len(shown) :]


COMMANDS = {"generate": Command("decode your own text", _add_generate, _generate)}
