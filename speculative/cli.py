"""The command line: `speculative <command>`."""

import argparse
import gc
import io
import itertools
import os
import re
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

from speculative import __version__, checks, disk, removed
from speculative.commands import (
    audit,
    bench,
    compile,
    convert,
    count,
    distil,
    evaluate,
    generate,
    tables,
)

USAGE_ERROR, INTERRUPTED, CLOSED_PIPE = 2, 130, 141
"""Exit codes; the last two are those that a shell reports after SIGINT and SIGPIPE."""

COMMANDS = generate.COMMANDS | tables.COMMANDS | bench.COMMANDS | convert.COMMANDS
COMMANDS |= count.COMMANDS | distil.COMMANDS | compile.COMMANDS | audit.COMMANDS
COMMANDS |= evaluate.COMMANDS


class _Parser(argparse.ArgumentParser):
    """Reports an error in one line, like every other error, without the usage text."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (see {self.prog} --help)")


class _CommandParser(_Parser):
    """Parses one command; unknown options are reported first, with a pointer to its help."""

    def parse_known_args(self, args, namespace=None):  # pyright: ignore
        """See `ArgumentParser`, which leaves unknown arguments to the parser of all commands."""
        own = args[: args.index("--")] if "--" in args else args
        for word, following in itertools.zip_longest(own, own[1:], fillvalue=""):
            name, _, value = word.partition("=")
            option = f"{self.prog} {name}"
            gone = removed.said(option) or removed.said(f"{option} {value or following}")
            if gone is not None:
                raise ValueError(gone)
            if re.match(r"--?[a-z]\S*$", word, re.I) and name not in self._option_string_actions:
                self.error(f"there is no option {name}")
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"there is one argument too many: {unknown[0]}")
        return options, unknown


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code; 2 means wrong input, 130 an interrupt."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    # Tracing makes many long-lived objects, which the collector would scan again and again: a
    # twentieth of the time that a table of the bundled pair takes.
    gc.set_threshold(100_000, 50, 100)
    try:
        arguments = sys.argv[1:] if arguments is None else arguments
        if arguments and (gone := removed.said(f"speculative {arguments[0]}")):
            raise ValueError(gone)
        _reconfigure(errors="replace")  # A locale may lack characters.
        options = _parser().parse_args(arguments)
        if getattr(options, "json", False):  # Lone surrogates are escaped as in JSON.
            _reconfigure(encoding="utf-8", errors="backslashreplace")
        options.arguments = list(arguments)  # Worker processes run with them too.
        code = COMMANDS[options.command].run(options)
        sys.stdout.flush()
        return code or 0
    except BrokenPipeError:
        # The reader has left. Python flushes standard output once more on its way out.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE
    except KeyboardInterrupt as interrupt:
        print(f"interrupted{interrupt}", file=sys.stderr)
        return INTERRUPTED
    except (ValueError, OSError, RuntimeError) as error:
        message = (
            checks.no_device(error) if isinstance(error, RuntimeError) else disk.sentence(error)
        )
        if message is None:
            raise
        print(f"error: {message}", file=sys.stderr)
        return USAGE_ERROR


def _reconfigure(encoding: str | None = None, errors: str | None = None) -> None:
    """Sets the encoding of standard output, unless a caller has replaced the stream."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding=encoding, errors=errors)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raises KeyboardInterrupt; during an import it exits, as a library may abort on exceptions."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            os.write(2, b"interrupted\n")
            os._exit(INTERRUPTED)
        frame = frame.f_back
    raise KeyboardInterrupt


def _parser() -> argparse.ArgumentParser:
    about = "Exact speculative decoding of T5, GPT-2, Llama, Qwen and Gemma models."
    parser = _Parser(prog="speculative", description=about, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"speculative {__version__}")
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="command", parser_class=_CommandParser
    )
    for name, command in COMMANDS.items():
        text = command.help
        own = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        command.add_options(own)
    return parser


if __name__ == "__main__":
    sys.exit(main())
