"""The command line: `speculative <command>`.

Settings are checked before anything is loaded, and JAX is imported only by a command that runs.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from speculative.decoding.speculative import Step
    from speculative.vocabulary import Vocabulary

DTYPES = ("float32", "bfloat16")
MAX_GAMMA = 64
MAX_LENGTH = 1024
"""The longest output; a generation's cache is sized for it."""
MAX_SEED = 2**32 - 1

USAGE_ERROR, INTERRUPTED, CLOSED_PIPE = 2, 130, 141
"""Exit codes; the last two are a shell's own for SIGINT and SIGPIPE."""


@dataclasses.dataclass(frozen=True)
class Command:
    """A subcommand: one line of help, its options, and what it does with them."""

    help: str
    add_options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], None]


class _Parser(argparse.ArgumentParser):
    """One line an error, like every other error, instead of a usage text before it."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (see {self.prog} --help)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns the exit code: 0, 2 for wrong input, 130 for an interrupt."""
    try:
        options = _parser().parse_args(arguments)
        COMMANDS[options.command].run(options)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has left. Python flushes standard output once more on its way out.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE
    except KeyboardInterrupt as interrupt:
        print(f"interrupted{interrupt}", file=sys.stderr)
        return INTERRUPTED
    except (ValueError, OSError) as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return USAGE_ERROR
    return 0


def _parser() -> argparse.ArgumentParser:
    from speculative import __version__

    parser = _Parser(
        prog="speculative", description="Exact speculative decoding of T5.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"speculative {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, command in COMMANDS.items():
        command.add_options(
            commands.add_parser(
                name, help=command.help, description=command.help, allow_abbrev=False
            )
        )
    return parser


def _whole(low: int, high: int) -> Callable[[str], int]:
    """An option's type: a whole number of a range."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(
                f"must be a whole number from {low} to {high}, not {text!r}"
            )
        return value

    return parse


def _add_pair(parser: argparse.ArgumentParser) -> None:
    """The options that the commands that decode have."""
    add = parser.add_argument
    add("--target", default="debian_target", help="checkpoint folder or name (%(default)s)")
    add("--draft", help="checkpoint folder, name, uniform or bigram (debian_draft)")
    add("--vocabulary", metavar="FILE", help="SentencePiece model, where a checkpoint has none")
    add("--dtype", choices=DTYPES, help="of weights and products (as the checkpoints say)")
    add("--seed", type=_whole(0, MAX_SEED), default=0, help="of all random numbers (0)")
    add(
        "--max_length",
        type=_whole(1, MAX_LENGTH),
        default=128,
        metavar="TOKENS",
        help=f"where an output is cut, at most {MAX_LENGTH} (128)",
    )


def _add_demo(parser: argparse.ArgumentParser) -> None:
    _add_pair(parser)
    add = parser.add_argument
    add("--output_dir", default="results/demo", metavar="DIR", help="of the report (%(default)s)")
    add("--limit", type=_whole(1, 10**6), metavar="N", help="prompts of each task (all)")


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
    _add_pair(parser)
    add = parser.add_argument
    add("--task", help="put the prefix of a task before each prompt: debian_ende, debian_synopsis")
    add("--gamma", type=_whole(1, MAX_GAMMA), default=5, help="guesses a step (5)")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 is argmax (0)")
    add("--top_k", type=int, default=0, metavar="K", help="the K likeliest tokens; 0 is all (0)")
    add("--top_p", type=float, default=1.0, metavar="P", help="nucleus, in (0, 1] (1)")
    add("--truncate", action="store_true", help="cut a prompt that is too long")
    add("--json", action="store_true", help="a line {text, tokens, target_calls, accepted} each")


def _generate(options: argparse.Namespace) -> None:
    from speculative.pair import load
    from speculative.sampling import Sampling

    Sampling(options.temperature, options.top_k, options.top_p)  # Wrong values end here.
    prefix = _prefix(options.task)
    prompts = [prefix + prompt for prompt in _prompts(options)]
    pair = load(options.target, options.draft, options.dtype, options.vocabulary)
    for prompt in prompts:
        pair.encode(prompt, options.truncate)  # As do prompts that are too long.
    settings = {
        name: getattr(options, name)
        for name in ("seed", "truncate", "gamma", "temperature", "top_k", "top_p", "max_length")
    }
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
    from speculative.measurement.prompts import PREFIXES

    if task is not None and task not in PREFIXES:
        raise ValueError(f"There is no task {task!r}; the tasks are {', '.join(PREFIXES)}.")
    return PREFIXES[task] if task else ""


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


def _add_convert(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("source", help="checkpoint folder, gs://bucket/folder, name, or Hugging Face id")
    add("destination", help="the folder to make")
    add("--to", required=True, choices=["native", "t5x", "huggingface"], help="its format")
    add("--dtype", choices=DTYPES, help="of its tensors (what loses nothing)")
    add("--vocabulary", metavar="FILE", help="SentencePiece model to store with the weights")


def _convert(options: argparse.Namespace) -> None:
    from speculative import checkpoints

    made = checkpoints.convert(
        options.source, options.destination, options.to, options.dtype, options.vocabulary
    )
    print(f"Written: {made.place} ({made.format}, {made.parameters / 1e6:.1f} M parameters).")


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", help="checkpoint folder, gs://bucket/folder, name, or hub id")


def _inspect(options: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.table import Table

    from speculative import checkpoints

    table = Table(show_header=False, box=None)
    for name, value in checkpoints.describe(checkpoints.open(options.path)).items():
        table.add_row(name, value)
    Console().print(table, soft_wrap=True)


COMMANDS = {
    "demo": Command("measure the speed-up on the shipped prompts and show it", _add_demo, _demo),
    "generate": Command("decode your own text, streaming", _add_generate, _generate),
    "convert": Command("write a checkpoint in another format", _add_convert, _convert),
    "inspect": Command("tell what a checkpoint holds", _add_inspect, _inspect),
}

if __name__ == "__main__":
    sys.exit(main())
