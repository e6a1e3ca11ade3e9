"""`demo` and `generate`: decoding the shipped prompts, and the user's own text."""

import argparse
import json
import pathlib
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from speculative.commands import MAX_GAMMA, Command, add_pair, whole

if TYPE_CHECKING:
    from speculative.decoding.speculative import Step
    from speculative.vocabulary import Vocabulary


def _add_demo(parser: argparse.ArgumentParser) -> None:
    add_pair(parser)
    add = parser.add_argument
    add("--output_dir", default="results/demo", metavar="DIR", help="of the report (%(default)s)")
    add("--limit", type=whole(1, 10**6), metavar="N", help="prompts of each task (all)")


def _demo(options: argparse.Namespace) -> None:
    from speculative.experiments import demo

    demo.run(
        options.target,
        options.draft,
        options.dtype,
        options.vocabulary,
        pathlib.Path(options.output_dir),
        options.seed,
        options.max_length,
        options.limit,
    )


def _add_generate(parser: argparse.ArgumentParser) -> None:
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument("text", nargs="?", help="the prompt; by default standard input's lines")
    prompts.add_argument("--file", metavar="FILE", help="prompts, one a line")
    add_pair(parser)
    add = parser.add_argument
    add("--task", help="put the prefix of a task before each prompt: debian_ende, debian_synopsis")
    add("--gamma", type=whole(1, MAX_GAMMA), default=5, help="guesses a step (5)")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 is argmax (0)")
    add("--top_k", type=int, default=0, metavar="K", help="the K likeliest tokens; 0 is all (0)")
    add("--top_p", type=float, default=1.0, metavar="P", help="nucleus, in (0, 1] (1)")
    add(
        "--lenience",
        type=float,
        default=1.0,
        metavar="L",
        help="in (0, 1]; below 1 more guesses stand, and outputs are not the target's own (1)",
    )
    add("--truncate", action="store_true", help="cut a prompt that is too long")
    add("--json", action="store_true", help="a line {text, tokens, target_calls, accepted} each")


def _generate(options: argparse.Namespace) -> None:
    from speculative.decoding import Decoding
    from speculative.pair import load
    from speculative.sampling import Sampling

    sampling = Sampling(options.temperature, options.top_k, options.top_p)
    Decoding(1, sampling, lenience=options.lenience)  # Wrong values end here.
    prefix = _prefix(options.task)
    prompts = [prefix + prompt for prompt in _prompts(options)]
    pair = load(options.target, options.draft, options.dtype, options.vocabulary)
    for prompt in prompts:
        pair.encode(prompt, options.truncate)  # As do prompts that are too long.
    names = ("seed", "truncate", "gamma", "temperature", "top_k", "top_p", "max_length", "lenience")
    settings = {name: getattr(options, name) for name in names}
    for example, prompt in enumerate(prompts):
        if options.json:
            result = pair.generate(prompt, example=example, **settings)
            fields = ("text", "tokens", "target_calls", "accepted")
            line = {name: getattr(result, name) for name in fields}
            print(json.dumps(line, ensure_ascii=False), flush=True)
        else:
            steps = pair.stream(prompt, example=example, **settings)
            for text in _as_it_grows(pair.vocabulary, steps):
                print(text, end="", flush=True)
            print(flush=True)


def _prefix(task: str | None) -> str:
    from speculative import tasks

    return "" if task is None else tasks.task(task).prefix


def _prompts(options: argparse.Namespace) -> list[str]:
    """The prompts asked for, none of them empty."""
    if options.text is not None:
        place, lines = "the command line", [options.text]
    else:
        place = options.file or "standard input"
        try:
            raw = pathlib.Path(place).read_bytes() if options.file else sys.stdin.buffer.read()
            lines = raw.decode().splitlines()
        except UnicodeDecodeError:
            raise ValueError(f"{place} is not UTF-8 text; convert it first.") from None
        if not lines:
            raise ValueError(f"There is no prompt: {place} is empty; give a line for each.")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            where = place if options.text is not None else f"line {number} of {place}"
            raise ValueError(f"The prompt on {where} is empty; give a text to decode.")
    return lines


def _as_it_grows(vocabulary: "Vocabulary", steps: Iterable["Step"]) -> Iterator[str]:
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


COMMANDS = {
    "demo": Command("measure the speed-up on the shipped prompts and show it", _add_demo, _demo),
    "generate": Command("decode your own text, streaming", _add_generate, _generate),
}
