"""The command line: `speculative <command>`."""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from speculative import disk
from speculative.commands import bench, convert, decode, tables

USAGE_ERROR, INTERRUPTED, CLOSED_PIPE = 2, 130, 141
"""Exit codes; the last two are a shell's own for SIGINT and SIGPIPE."""

COMMANDS = decode.COMMANDS | tables.COMMANDS | bench.COMMANDS | convert.COMMANDS


class _Parser(argparse.ArgumentParser):
    """One line an error, like every other error, instead of a usage text before it."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (see {self.prog} --help)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code; 2 is wrong input, 130 an interrupt."""
    try:
        options = _parser().parse_args(arguments)
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
    except (ValueError, OSError) as error:
        print("error:", disk.told(error), file=sys.stderr)
        return USAGE_ERROR


def _parser() -> argparse.ArgumentParser:
    from speculative import __version__

    about = "Exact speculative decoding of T5 and GPTs."
    parser = _Parser(prog="speculative", description=about, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"speculative {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, command in COMMANDS.items():
        said = command.help
        own = commands.add_parser(name, help=said, description=said, allow_abbrev=False)
        command.add_options(own)
    return parser


if __name__ == "__main__":
    sys.exit(main())
