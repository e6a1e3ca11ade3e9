"""`generate`: the user's own texts, answered as they come."""

import argparse
import dataclasses
import itertools
import json
import re
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from speculative import checks, disk
from speculative.commands import Command, add_options, whole

if TYPE_CHECKING:
    from speculative.decoding.loop import Step
    from speculative.pair import Pair, Result
    from speculative.vocabulary import Vocabulary

AUTO = "auto"  # The number of guesses is picked by measured costs.
FOREIGN = 0.5  # The share of tokens that spell out another script, from which a text is noise.
DEFAULTS = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "verification": "token", "lenience": 1.0}


def _add_generate(parser: argparse.ArgumentParser) -> None:
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument(
        "text", nargs="?", help="the prompt; by default lines of standard input, as they come"
    )
    prompts.add_argument("--file", metavar="FILE", help="prompts, one a line")
    add_options(parser, "--target", "--draft", "--vocabulary", "--dtype", "--max_length")
    add_options(parser, "--seed", seed=0)
    add = parser.add_argument
    add("--task", help="put the prefix of a task before each prompt: debian_ende, debian_synopsis")
    add_options(parser, "--prefix")
    add(
        "--gamma",
        type=lambda text: text if text == AUTO else whole(1, checks.MAX_GAMMA)(text),
        default=5,
        help="guesses a step (5), or auto: it follows recent acceptance and the costs of steps, "
        "which are measured first. Outputs stay exact in distribution, but above T = 0 the text "
        "may differ between machines",
    )
    add_options(parser, *(f"--{name}" for name in DEFAULTS), **DEFAULTS)
    add("--truncate", action="store_true", help="cut a prompt that is too long")
    add(
        "--compare",
        action="store_true",
        help="decode each text once more without a draft, and tell how much faster it was with it",
    )
    add(
        "--json",
        action="store_true",
        help="a line each: {prompt, text, tokens, target_calls, accepted, finish_reason, seconds "
        "(of the first text with compilation), seed}",
    )


def _generate(options: argparse.Namespace) -> None:
    from speculative import tasks
    from speculative.decoding import rules
    from speculative.loading import load
    from speculative.sampling import Sampling

    sampling = Sampling(options.temperature, options.top_k, options.top_p)
    rule = rules.select(options.verification, options.lenience)  # Wrong values end here.
    if options.gamma == AUTO and not rule.exact:
        raise ValueError(
            f"--gamma {AUTO} is for exact decoding, but --verification is {options.verification} "
            f"and --lenience is {options.lenience}; give a number of guesses."
        )
    prefix = options.prefix or ""
    if options.task is not None and options.prefix is None:
        prefix = tasks.task(options.task).prefix
    typed = options.text is None and options.file is None and sys.stdin.isatty()
    arriving = _prompts(options, typed)
    if not typed:  # Wrong input ends before anything is loaded.
        arriving = itertools.chain([next(arriving)], arriving)
    pair = load(options.target, options.draft, options.dtype, options.vocabulary)
    names = (*DEFAULTS, "seed", "max_length", "truncate")
    settings = {name: getattr(options, name) for name in names}
    if options.gamma == AUTO:
        from speculative.studies import step_costs

        settings["adaptive"] = step_costs.adaptive(pair, sampling, _say_measuring)
    else:
        settings["gamma"] = options.gamma
    numbers, tally = itertools.count(), Tally(options.compare)
    for prompts in arriving:
        prompts = [prefix + prompt for prompt in prompts]
        try:
            for prompt in prompts:
                pair.encode(prompt, options.truncate)  # As do prompts that are too long.
        except ValueError as error:
            if not typed:
                raise
            print(error, file=sys.stderr)  # Whoever types may type it anew.
            continue
        for prompt in prompts:
            _warn_of_script(pair.vocabulary, prompt, prefix)
            answered = settings | {"example": next(numbers)}
            if options.json:
                print(_line(pair, prompt, answered), flush=True)
            else:
                tally.add(_answer(pair, prompt, answered))
                if options.compare:
                    tally.compare(pair, prompt, answered)
    if not options.json and (options.compare or sys.stderr.isatty()):
        print(tally, file=sys.stderr)


def _line(pair: "Pair", prompt: str, settings: dict[str, Any]) -> str:
    """A generation as a line of JSON."""
    began = time.perf_counter()
    result = pair.generate(prompt, **settings)
    seconds = time.perf_counter() - began
    fields = {name: getattr(result, name) for name in ("text", "tokens", "target_calls")}
    fields |= {"accepted": result.accepted, "prompt": prompt}
    fields |= {"finish_reason": result.finish_reason(pair.vocabulary.eos_id)}
    fields |= {"seconds": round(seconds, 6), "seed": settings["seed"]}
    line = json.dumps(fields, ensure_ascii=False)
    # Some programs end lines at these too; JSON says them in ASCII just as well.
    return re.sub("[\x85\u2028\u2029]", lambda found: f"\\u{ord(found[0]):04x}", line)


@dataclasses.dataclass
class Answer:
    """What a text that was printed took; the first step is apart, for it may be compiled first."""

    tokens: int
    target_calls: int
    later_tokens: int = 0
    later_seconds: float = 0.0


def _answer(pair: "Pair", prompt: str, settings: dict[str, Any]) -> Answer:
    """Prints a generation as it grows."""
    if "adaptive" in settings:  # What picks gamma does not stream.
        result = pair.generate(prompt, **settings)
        print(result.text, flush=True)
        return Answer(len(result.tokens), result.target_calls)
    found, since = Answer(0, 0), 0.0

    def counted() -> Iterator["Step"]:
        nonlocal since
        for step in pair.stream(prompt, **settings):
            if count := int(step.count[0]):
                if found.target_calls:
                    found.later_tokens += count
                    found.later_seconds = time.perf_counter() - since
                else:
                    since = time.perf_counter()
                found.tokens += count
                found.target_calls += 1
            yield step

    for text in as_it_grows(pair.vocabulary, counted()):
        print(text, end="", flush=True)
    print(flush=True)
    return found


@dataclasses.dataclass
class Tally:
    """What all texts took, and what they take without a draft."""

    comparing: bool
    answers: list[Answer] = dataclasses.field(default_factory=list)
    seconds: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    """Of whole generations, prefill included, with the draft and without it."""
    equal: int = 0  # Texts whose tokens are the same both ways.
    greedy: bool = False

    def add(self, answer: Answer) -> None:
        """Notes a text that was printed."""
        self.answers.append(answer)

    def compare(self, pair: "Pair", prompt: str, settings: dict[str, Any]) -> None:
        """Times a text both ways, after a run of each that compiles what it needs."""
        alone: dict[str, Any] = {**settings, "gamma": 0}
        alone.pop("adaptive", None)
        ways = [pair.prepare(prompt, **way) for way in (settings, alone)]
        results: list[Result] = []
        seconds = []
        for inputs in ways:
            pair.results(pair.run(*inputs))
            began = time.perf_counter()
            results += pair.results(pair.run(*inputs))
            seconds.append(time.perf_counter() - began)
        self.seconds.append((seconds[0], seconds[1]))
        self.equal += results[0].tokens == results[1].tokens
        self.greedy = settings["temperature"] == 0 and settings["lenience"] == 1.0

    def __str__(self) -> str:
        tokens = sum(answer.tokens for answer in self.answers)
        calls = sum(answer.target_calls for answer in self.answers)
        if not calls:
            return ""
        said = f"{tokens} tokens in {calls} target calls, {tokens / calls:.1f} a call"
        if later := sum(answer.later_seconds for answer in self.answers):
            rate = sum(answer.later_tokens for answer in self.answers) / later
            said += f", {rate:.0f} tokens a second after the first call"
        if self.seconds:
            fast, slow = map(sum, zip(*self.seconds, strict=True))
            said += f"; without the draft {slow:.3g} s instead of {fast:.3g} s: "
            said += f"{slow / fast:.2f} times as fast with it"
            if self.greedy:
                said += f", the same tokens in {self.equal} of {len(self.seconds)} texts"
        return f"{said}."


def _warn_of_script(vocabulary: "Vocabulary", prompt: str, prefix: str) -> None:
    """Warns of a text that the vocabulary can only spell out."""
    share = vocabulary.spelled_out(prompt.removeprefix(prefix))
    if share >= FOREIGN:
        print(
            f"{share:.0%} of this prompt's tokens are unknown pieces or single bytes: the models "
            "were hardly trained on such text, so that outputs may be noise.",
            file=sys.stderr,
        )


def _say_measuring() -> None:
    said = "Measuring the costs of this pair's steps first, once on this machine (some seconds) ..."
    print(said, file=sys.stderr)


def _prompts(options: argparse.Namespace, typed: bool) -> Iterator[list[str]]:
    """The prompts that are there at once; blank lines are left out, and said to be.

    A file's are one list; standard input's are what has arrived, so that a line is answered before
    the next is sent.
    """
    if options.text is not None:
        origin = "the command line"
        chunks = iter([[checks.text("The prompt on the command line", options.text)]])
    elif options.file:
        origin = options.file
        chunks = iter([disk.lines(disk.text(options.file))])
    else:
        origin, chunks = "standard input", _arriving(typed)
    found = blank = 0
    for lines in chunks:
        prompts = [line for line in lines if line.strip()]
        found, blank = found + len(prompts), blank + len(lines) - len(prompts)
        if prompts:
            yield prompts
    if not found and not typed:
        raise ValueError(f"The prompt is missing: {origin} is empty; give a text to decode.")
    if blank and not typed:
        print(f"Blank lines of {origin} that are left out: {blank}.", file=sys.stderr)


def _arriving(typed: bool) -> Iterator[list[str]]:
    """The whole lines of standard input that have arrived; it waits for the next ones."""
    rest, before = b"", 0
    stdin: Any = sys.stdin.buffer
    while True:
        if typed and sys.stderr.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        data = stdin.read1()
        whole, end, rest = (rest + data).rpartition(b"\n") if data else (rest, b"", b"")
        if whole or end:
            yield disk.lines(disk.text("standard input", whole + end, before + 1))
        before += whole.count(b"\n") + len(end)
        if not data:
            return


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
