"""`demo` and `generate`: decoding the shipped prompts, and the user's own text."""

import argparse
import json
import pathlib
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from speculative import checks, disk
from speculative.commands import Command, add_options, whole

if TYPE_CHECKING:
    from speculative.decoding.loop import Step
    from speculative.vocabulary import Vocabulary

AUTO = "auto"  # The number of guesses is picked by measured costs.
PAIR = ("--target", "--draft", "--vocabulary", "--dtype", "--seed", "--max_length")


def _add_demo(parser: argparse.ArgumentParser) -> None:
    add_options(parser, *PAIR, "--output_dir", "--limit", seed=0, output_dir="results/demo")


def _demo(options: argparse.Namespace) -> None:
    from speculative.reporting import demo

    names = ("target", "draft", "dtype", "vocabulary", "seed", "max_length")
    settings = {name: getattr(options, name) for name in names}
    demo.run(pathlib.Path(options.output_dir), num_examples=options.limit, **settings)


def _add_generate(parser: argparse.ArgumentParser) -> None:
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument("text", nargs="?", help="the prompt; by default standard input's lines")
    prompts.add_argument("--file", metavar="FILE", help="prompts, one a line")
    add_options(parser, *PAIR, seed=0)
    add = parser.add_argument
    add("--task", help="put the prefix of a task before each prompt: debian_ende, debian_synopsis")
    add(
        "--gamma",
        type=lambda text: text if text == AUTO else whole(1, checks.MAX_GAMMA)(text),
        default=5,
        help="guesses a step (5), or auto: it follows recent acceptance and the costs of steps, "
        "which are measured first. Outputs stay exact in distribution, but above T = 0 the text "
        "may differ between machines",
    )
    add("--temperature", type=float, default=0.0, metavar="T", help="0 is argmax (0)")
    add("--top_k", type=int, default=0, metavar="K", help="the K likeliest tokens; 0 is all (0)")
    add("--top_p", type=float, default=1.0, metavar="P", help="nucleus, in (0, 1] (1)")
    add(
        "--verification",
        default="token",
        metavar="RULE",
        help="how guesses are verified, a name of speculative.decoding.rules.RULES (token)",
    )
    add(
        "--lenience",
        type=float,
        default=1.0,
        metavar="L",
        help="in (0, 1]; below 1 more guesses are accepted, but outputs are not exact (1)",
    )
    add("--truncate", action="store_true", help="cut a prompt that is too long")
    add("--json", action="store_true", help="a line {text, tokens, target_calls, accepted} each")


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
    prefix = "" if options.task is None else tasks.task(options.task).prefix
    prompts = [prefix + prompt for prompt in _prompts(options)]
    pair = load(options.target, options.draft, options.dtype, options.vocabulary)
    for prompt in prompts:
        pair.encode(prompt, options.truncate)  # As do prompts that are too long.
    names = ("seed", "truncate", "temperature", "top_k", "top_p", "max_length", "lenience")
    settings = {name: getattr(options, name) for name in (*names, "verification")}
    if options.gamma == AUTO:
        from speculative.studies import step_costs

        settings["adaptive"] = step_costs.adaptive(pair, sampling, _say_measuring)
    else:
        settings["gamma"] = options.gamma
    for example, prompt in enumerate(prompts):
        if options.json or options.gamma == AUTO:  # What picks gamma does not stream.
            result = pair.generate(prompt, example=example, **settings)
            fields = ("text", "tokens", "target_calls", "accepted")
            line = json.dumps({name: getattr(result, name) for name in fields}, ensure_ascii=False)
            print(line if options.json else result.text, flush=True)
        else:
            steps = pair.stream(prompt, example=example, **settings)
            for text in as_it_grows(pair.vocabulary, steps):
                print(text, end="", flush=True)
            print(flush=True)


def _say_measuring() -> None:
    said = "Measuring the costs of this pair's steps first, once on this machine (some seconds) ..."
    print(said, file=sys.stderr)


def _prompts(options: argparse.Namespace) -> list[str]:
    """The prompts asked for; blank lines are left out, and said to be."""
    if options.text is not None:
        origin = "the command line"
        lines = [checks.text("The prompt on the command line", options.text)]
    else:
        origin = options.file or "standard input"
        lines = disk.lines(disk.text(origin, None if options.file else sys.stdin.buffer.read()))
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise ValueError(f"The prompt is missing: {origin} is empty; give a text to decode.")
    if blank := len(lines) - len(prompts):
        print(f"Blank lines of {origin} that are left out: {blank}.", file=sys.stderr)
    return prompts


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


COMMANDS = {
    "demo": Command("measure the speed-up on the shipped prompts and show it", _add_demo, _demo),
    "generate": Command("decode your own text", _add_generate, _generate),
}
