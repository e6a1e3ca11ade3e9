"""The bar that long work shows on standard error, where that is a terminal."""

import contextlib
import sys
from collections.abc import Callable, Iterator

from rich import progress as columns
from rich.console import Console
from rich.progress import Progress, TaskID, TextColumn

# Called with what is being done, and the share of it that is done, from 0 to 1.
OnProgress = Callable[[str, float], None]


def bar() -> Progress:
    """A bar with elapsed and remaining time, which is removed at the end."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description:36}"),
        columns.BarColumn(),
        TextColumn("{task.percentage:3.0f}%"),
        columns.TimeElapsedColumn(),
        TextColumn("to go"),
        columns.TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


@contextlib.contextmanager
def waiting(what: str) -> Iterator[None]:
    """Says on a terminal what is being waited for, and wipes it out at the end."""
    if not sys.stderr.isatty():
        yield
        return
    print(what, end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        print(f"\r{' ' * len(what)}\r", end="", file=sys.stderr, flush=True)


@contextlib.contextmanager
def alone(setting: str) -> Iterator[OnProgress]:
    """A bar for one row's work."""
    with bar() as progress:
        yield row(progress, progress.add_task("", total=1), 0, setting)


def row(progress: Progress, task: TaskID, done: int, setting: str) -> OnProgress:
    """Shows a row's progress after so many rows that are done."""

    def show(what: str, share: float) -> None:
        progress.update(task, description=f"{setting}: {what}", completed=done + share)

    return show
