"""The prompts of `generate`: read at once, or line by line as they come."""

import argparse
import os
import stat
import sys
from collections.abc import Callable, Iterator

from speculative import checks, disk

INPUT = "standard input"
MARK = "> "  # Where a line is awaited.


def listed(options: argparse.Namespace) -> list[str] | None:
    """The prompts of the command line or a file; None if lines are yet to come, see `coming`.

    Blank lines are left out, and said to be. Raises ValueError if there is no prompt.
    """
    if options.text is not None:
        origin = "the command line"
        lines = [checks.text("The prompt on the command line", options.text)]
    elif options.file is not None:
        origin, lines = options.file, disk.lines(disk.text(options.file))
    elif sys.stdin is None:  # Whoever started this has closed it.
        origin, lines = INPUT, []
    elif sys.stdin.isatty() or not stat.S_ISREG(os.fstat(0).st_mode):
        return None
    else:
        origin, lines = INPUT, disk.lines(disk.text(INPUT, sys.stdin.buffer.read()))
    prompts = [line for line in lines if line.strip()]
    _end(origin, len(prompts), len(lines) - len(prompts))
    return prompts


def coming(check: Callable[[str], object]) -> Iterator[str]:
    """The prompts of standard input, each as soon as its line has ended.

    A line that is wrong, also by `check`, is a ValueError; on a terminal it is told, and the next
    one awaited. Blank lines are left out, which only a terminal is not told. Raises ValueError if
    there is no prompt.
    """
    typed = sys.stdin.isatty()
    mark = MARK if typed and sys.stderr.isatty() else ""
    given = blank = 0
    while raw := _line(mark):
        given += 1
        try:
            [line] = disk.lines(disk.text(INPUT, raw, given))
            if not line.strip():
                blank += 1
                continue
            check(line)
        except ValueError as error:
            if not typed:
                raise
            print("error:", disk.sentence(error), file=sys.stderr)
            continue
        yield line
    if mark:
        print(file=sys.stderr)  # What follows stands on a line of its own.
    _end(INPUT, given - blank, 0 if typed else blank)


def _line(mark: str) -> bytes:
    print(mark, end="", file=sys.stderr, flush=True)
    try:
        return sys.stdin.buffer.readline()
    except KeyboardInterrupt:
        if mark:
            print(file=sys.stderr)
        raise


def _end(origin: str, prompts: int, blank: int) -> None:
    if not prompts:
        raise ValueError(f"The prompt is missing: {origin} is empty; give a text to decode.")
    if blank:
        print(f"Blank lines of {origin} that are left out: {blank}.", file=sys.stderr)
