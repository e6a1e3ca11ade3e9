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
"""Exit codes; the last two are a shell's own for SIGINT and SIGPIPE."""

COMMANDS = generate.COMMANDS | tables.COMMANDS | bench.COMMANDS | convert.COMMANDS
COMMANDS |= count.COMMANDS | distil.COMMANDS | compile.COMMANDS | audit.COMMANDS
COMMANDS |= evaluate.COMMANDS


class _Parser(argparse.ArgumentParser):
    """One line an error, like every other error, instead of a usage text before it."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (see {self.prog} --help)")


class _CommandParser(_Parser):
    """Of one command; what it does not know is told before all else, and points to its own help."""

    def parse_known_args(self, args, namespace=None):  # pyright: ignore
        """See `ArgumentParser`, which leaves what is unknown to the parser of all commands."""
        own = args[: args.index("--")] if "--" in args else args
        for given, following in itertools.zip_longest(own, own[1:], fillvalue=""):
            name, _, value = given.partition("=")
            option = f"{self.prog} {name}"
            gone = removed.said(option) or removed.said(f"{option} {value or following}")
            if gone is not None:
                raise ValueError(gone)
            if re.match(r"--?[a-z]\S*$", given, re.I) and name not in self._option_string_actions:
                self.error(f"there is no option {name}")
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"there is one argument too many: {unknown[0]}")
        return options, unknown


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code; 2 is wrong input, 130 an interrupt."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    # Tracing makes many objects that live on, which the collector would look through again and
    # again: of a table of the shipped pair that is a twentieth of the time.
    gc.set_threshold(100_000, 50, 100)
    try:
        arguments = sys.argv[1:] if arguments is None else arguments
        if arguments and (gone := removed.said(f"speculative {arguments[0]}")):
            raise ValueError(gone)
        _reconfigure(errors="replace")  # What a locale cannot say must end nothing.
        options = _parser().parse_args(arguments)
        if getattr(options, "json", False):  # Half a character is said as JSON says it.
            _reconfigure(encoding="utf-8", errors="backslashreplace")
        options.arguments = list(arguments)  # For processes that are to run the same.
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
        said = checks.no_device(error) if isinstance(error, RuntimeError) else disk.sentence(error)
        if said is None:
            raise
        print("error:", said, file=sys.stderr)
        return USAGE_ERROR


def _reconfigure(encoding: str | None = None, errors: str | None = None) -> None:
    """How standard output encodes, unless a caller has replaced it by something else."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding=encoding, errors=errors)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raises KeyboardInterrupt, but ends an import at once: a library may abort if it fails."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            os.write(2, b"interrupted\n")
            os._exit(INTERRUPTED)
        frame = frame.f_back
    raise KeyboardInterrupt


def _parser() -> argparse.ArgumentParser:
    about = "Exact speculative decoding of T5 and GPTs."
    parser = _Parser(prog="speculative", description=about, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"speculative {__version__}")
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="command", parser_class=_CommandParser
    )
    for name, command in COMMANDS.items():
        said = command.help
        own = commands.add_parser(name, help=said, description=said, allow_abbrev=False)
        command.add_options(own)
    return parser


if __name__ == "__main__":
    sys.exit(main())
